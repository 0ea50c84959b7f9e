"""Searches on an engine, in front of another server, and as a program."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tot.cli.app import main
from tot.decoders import load_decoder
from tot.serving.searches import load_searches

VOTE = "vote: {search: 'self-consistency:samples=3', top_k: 0, top_p: 1, max_tokens: 12}"


def test_a_search_in_front_of_a_server_equals_the_search_of_that_server(serve: Any, tiny: Any, user: Any) -> None:
    with tiny() as local:
        engine = serve(local, VOTE)
        with load_decoder("openai", "chat", base_url=f"{engine.url}/v1") as remote:
            proxy = serve(remote, VOTE)
            assert list(proxy.searches.models) == ["chat", "chat:vote"]
            replies = [
                server.post(model="chat:vote", messages=user("a?"), seed=5, x_tot={"seconds": 50}).json()
                for server in (engine, proxy)
            ]
            direct, through = (reply["choices"][0]["message"] for reply in replies)
            assert direct == through
            assert direct["reasoning_content"].startswith("[1] ")
            proxy.stop()
        engine.stop()


def test_decoders_and_searches_share_a_server(serve: Any, tiny: Any, user: Any) -> None:
    with tiny() as decoder:
        server = serve(decoder, VOTE)
        with server.client() as client:
            for model in ("chat", "chat:jacobi", "chat:vote"):
                reply = client.chat.completions.create(model=model, messages=user("a?"), max_tokens=5)
                assert "decoder" in reply.tot if model != "chat:vote" else "votes" in reply.tot
            assert client.responses.create(model="chat", input="a?", extra_body={"max_tokens": 5}).status == "completed"
            texts = [
                client.responses.create(model=f"chat{method}", input="a?", extra_body={"seed": 1}).output_text
                for method in ("", ":jacobi")
            ]
            assert texts[0] == texts[1]
        server.stop()


@pytest.mark.real
def test_searches_of_an_engine_in_c_load_no_transformers_module(smollm2: str) -> None:
    with load_decoder("ar", smollm2) as decoder:
        assert decoder.engine.loaded.module is None
        load_searches(None, decoder)
        assert decoder.engine.loaded.module is None


@pytest.mark.real
@pytest.mark.processes
def test_tot_serve_streams_a_search_of_a_real_model(smollm2: str, python: Any, tmp_path: Path) -> None:
    file = tmp_path / "searches.yaml"
    file.write_text("sums: {task: gsm8k, search: 'auto:samples=3,until=1,solutions=chain', max_tokens: 60}\n")
    process = python("-m", "tot.cli.app", "serve", "--model", smollm2, "--port", "0", "--searches", str(file))
    url = next(found[1] for line in process.stderr if (found := re.search(r"served at (\S+)", line)))
    with openai.OpenAI(base_url=url, api_key="any") as client:
        assert f"{smollm2}:sums" in [model.id for model in client.models.list()]
        messages: Any = [{"role": "user", "content": "Tom has 3 pens and buys 4 more. How many pens has he?"}]
        chunks = list(client.chat.completions.create(model=f"{smollm2}:sums", messages=messages, seed=1, stream=True))
        thoughts = [text for chunk in chunks if (text := getattr(chunk.choices[0].delta, "reasoning_content", None))]
        assert [thought[:4] for thought in thoughts] == ["[1] ", "[2] ", "[3] "]
        assert json.loads(chunks[-1].model_dump_json())["tot"]["thoughts"] == 3
        reply = client.responses.create(model=f"{smollm2}:sums", input=messages[0]["content"], extra_body={"seed": 1})
        assert reply.output_text == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.processes
def test_tot_serve_in_front_of_a_server_loads_no_model(serve: Any, chat: Any, python: Any, user: Any) -> None:
    upstream = serve(chat("Paris"))
    options = ("--model", "chat", "--decoder-option", f"base_url={upstream.url}/v1", "--port", "0", "--name", "mine")
    process = python("-m", "tot.cli.app", "serve", "--decoder", "openai", *options)
    url = next(found[1] for line in process.stderr if (found := re.search(r"served at (\S+)", line)))
    with openai.OpenAI(base_url=url, api_key="any") as client:
        assert [model.id for model in client.models.list()][:4] == ["mine", "mine:vote", "mine:best", "mine:tree"]
        assert client.chat.completions.create(model="mine", messages=user("a?")).choices[0].message.content == "Paris"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_server_in_front_of_a_model_that_is_not_listed_is_refused(
    serve: Any, chat: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--decoder", "openai", "--decoder-option", f"base_url={serve(chat('Paris')).url}/v1", "--port", "0"]
    assert main(["serve", "--model", "chat:vot", *options]) == 2
    err = capfd.readouterr().err
    assert (
        "tot: the server of --decoder openai: unknown model 'chat:vot' (did you mean chat:vote?): choose one of" in err
    )


def test_a_server_in_front_needs_an_address(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--decoder", "openai", "--model", "m", "--port", "0"]) == 2
    assert capfd.readouterr().err.startswith("tot: decoder openai, option base_url: Field required")
