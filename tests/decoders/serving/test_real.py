"""The real model, served and asked: the texts that the local decoder gives, and many clients in few forwards."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tot.bench.serve import served
from tot.cli.app import main
from tot.decoders import Message, Request, Sampling, load_decoder
from tot.decoders.errors import ModelError

QUESTIONS = [
    "What is 12 + 30?",
    "Name three colours.",
    "Is fire cold?",
    "Tom has 5 apples and eats 2. How many are left?",
]


@pytest.mark.real
def test_smollm2_says_to_openais_client_what_it_says_locally(smollm2: str) -> None:
    sampling = {"max_tokens": 24, "temperature": 0.8, "seed": 4}
    requests = [
        Request(prompt=(Message(role="user", content=text),), sampling=Sampling(**sampling, n=2)) for text in QUESTIONS
    ]
    with load_decoder("ar", smollm2, dtype="fp32", kv_budget=8000) as decoder:
        expected = [completion.text for completion in decoder.generate(requests)]
    with served(["--model", smollm2, "--decoder", "seed", "--dtype", "fp32", "--kv-budget", "8000"]) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)

        def ask(text: str) -> list[str]:
            reply = client.chat.completions.create(
                model=server.model, messages=[{"role": "user", "content": text}], n=2, **sampling
            )
            return [choice.message.content or "" for choice in reply.choices]

        with client, ThreadPoolExecutor(len(QUESTIONS)) as pool:
            told = [text for texts in pool.map(ask, QUESTIONS) for text in texts]
    assert told == expected


@pytest.mark.real
def test_the_bench_compares_many_clients_with_one(
    smollm2: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOT_SERVE_KEY", "not for the bench's own server")
    out = tmp_path / "numbers.json"
    options = ("--clients", "4", "--requests", "1", "--tokens", "6", "--rounds", "2", "--out", str(out))
    assert main(["bench", "serve", *options]) == 0
    printed = capfd.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["1 client", "4 clients"]
    assert re.fullmatch(r"\d+\.\d\dx \(.*\)", rows[1][2])
    (cells,) = (
        found["cells"] for found in json.loads(out.read_text()).values() if isinstance(found, dict) and "cells" in found
    )
    forwards = {
        side: [cell["forwards"] for cell in cells if cell["side"] == side] for side in ("1 client", "4 clients")
    }
    assert [len(each) for each in forwards.values()] == [2, 2]
    assert max(forwards["4 clients"]) < 4 * min(forwards["1 client"])  # packed, or it would be as many


def test_a_server_that_does_not_start_is_said() -> None:
    with (
        pytest.raises(ModelError, match=r"the server did not start: tot: unknown decoder 'beam'"),
        served(["--model", "x", "--decoder", "beam"]),
    ):
        pass
