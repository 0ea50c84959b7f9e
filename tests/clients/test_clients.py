"""OpenAI clients against `tot serve`: the examples and the table of docs/clients.md, for a vote and for one sample."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

pytestmark = pytest.mark.clients

VOTE, SAMPLE = "smollm2-135m:vote", "smollm2-135m"
QUESTION = "What is the capital of France?"  # language: ok
PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")


def fenced(kind: str, text: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def examples() -> Iterator[tuple[str, str]]:
    for section in PAGE.split("\n## ")[1:]:
        client = section.partition("\n")[0]
        for i, code in enumerate(fenced("python", section), start=1):
            yield f"{client} {i}", code


def table() -> dict[str, dict[str, str]]:
    """Return the rows of the table by client, with the columns as keys."""
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line[:1] == "|"]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


EXAMPLES = dict(examples())
TABLE = table()
Run = Callable[..., CompletedProcess[str]]


def answer(server: str, model: str, question: str = QUESTION, **sampling: Any) -> str:
    """Return the answer that the server gives without any client."""
    body = {"model": model, "messages": [{"role": "user", "content": question}], **sampling}
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def votes(server: str) -> float:
    """Return the number of votes so far."""
    with urllib.request.urlopen(f"{server}/metrics") as reply:
        found = re.findall(rf'^tot_searches_total{{model="{VOTE}",.*}} (\S+)$', reply.read().decode(), re.MULTILINE)
    return sum(map(float, found))


def test_the_table_has_all_clients() -> None:
    assert {name.rpartition(" ")[0] for name in EXAMPLES} | {"lm-eval"} == set(TABLE)
    assert len(TABLE) == 6


@pytest.mark.parametrize("model", [VOTE, SAMPLE])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_the_servers_answer(name: str, model: str, server: str, run: Run) -> None:
    before, code = votes(server), EXAMPLES[name]
    assert code.count(VOTE) == 1
    done = run("python", "-", code=code.replace(VOTE, model))
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    if model == SAMPLE and not name.startswith("DSPy"):  # DSPy's prompt has a format; a vote's samples depend on time
        assert answer(server, model, temperature=0.3, seed=2) in done.stdout
    can, uses_responses = TABLE[name.rpartition(" ")[0]], "response" in code
    thoughts = can["shows thoughts"] == "yes" or (can["shows thoughts"] == "with Responses" and uses_responses)
    assert ("[1] " in done.stdout) == (thoughts and model == VOTE)
    assert ("'votes': [" in done.stdout) == (can["shows `tot`"] == "yes" and model == VOTE)
    assert (votes(server) > before) == (model == VOTE)


def changed(name: str, old: str, new: str) -> str:
    assert old in EXAMPLES[name]
    return EXAMPLES[name].replace(old, new)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("OpenAI 1", "seed=2", 'seed=2, reasoning_effort="low", user="u", metadata={"a": "b"}'),
        ("OpenAI 1", "seed=2", 'seed=2, extra_body={"thinking_budget": 99, "chat_template_kwargs": {"a": 1}}'),
        ("OpenAI 3", '"seed": 2', '"seed": 2, "thinking": {"type": "enabled", "budget_tokens": 99}'),
        ("LiteLLM 1", "seed=2", 'seed=2, extra_body={"thinking": {"type": "disabled"}}'),
        ("LiteLLM 1", "seed=2", 'seed=2, reasoning_effort="low", user="u", max_completion_tokens=2000'),
        ("LangChain 1", "seed=2", 'seed=2, reasoning_effort="low", max_tokens=2000, stop=["\\n"]'),
        ("LangChain 1", f'invoke("{QUESTION}").content', f'batch(["{QUESTION}"] * 2)'),
        ("LangChain 1", f'model.invoke("{QUESTION}").content', f'[one.content for one in model.stream("{QUESTION}")]'),
        ("DSPy 1", "seed=2", 'model_type="responses"'),
        ("DSPy 1", "seed=2", "seed=2, max_tokens=2000"),
        ("DSPy 1", 'print(capital(country="France").capital)', f'print(lm("{QUESTION}", n=2)), exit()'),
        ("Inspect 1", "seed=2", 'reasoning_effort="low", max_tokens=100, stop_seqs=["\\n"]'),
        ("Inspect 1", 'api_key="any"', 'api_key="any", stream=True'),
        ("Inspect 1", 'api_key="any"', 'api_key="any", responses_api=True'),
    ],
)
def test_other_calls(name: str, old: str, new: str, run: Run) -> None:
    done = run("python", "-", code=changed(name, old, new))
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


UNTIL = 'extra_body={"x_tot": {"until": 2}}'
OUT_OF_RANGE = "x_tot.until: Input should be less than or equal to 1"


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        *((f"{client} 1", "seed=2", UNTIL, OUT_OF_RANGE) for client in TABLE if client != "lm-eval"),
        *((f"{client} 1", "seed=2", "n=2", "n is not supported") for client in ("OpenAI", "LiteLLM", "LangChain")),
        ("OpenAI 1", "seed=2", 'extra_body={"thinking_budget": 9999}', "this server s limit is 2048"),
        ("OpenAI 1", "seed=2", "logprobs=True", "logprobs is not supported"),
        ("OpenAI 3", "temperature=0.3", "store=True", "store is not supported"),
        ("Inspect 1", "seed=2", "num_choices=2", "n is not supported"),
    ],
)
def test_the_servers_refusal_is_the_clients_error(name: str, old: str, new: str, message: str, run: Run) -> None:
    done = run("python", "-", code=changed(name, old, new))
    assert done.returncode != 0
    assert message in " ".join(re.sub(r"\\n|\\x1b\[[\d;]*m|'", " ", done.stderr).split())


@pytest.mark.parametrize("model", [VOTE, SAMPLE])
def test_lm_eval_reads_the_servers_answers(model: str, server: str, run: Run, data: Path, tmp_path: Path) -> None:
    with (data / "gsm8k_test_0_400.jsonl").open(encoding="utf-8") as file:
        (tmp_path / "rows.jsonl").write_text("".join(islice(file, 5)), encoding="utf-8")
    (settings,) = fenced("yaml", PAGE)
    short = settings.replace("max_gen_toks: 400", "max_gen_toks: 60")
    assert short != settings
    (tmp_path / "gsm8k_rows.yaml").write_text(short, encoding="utf-8")
    (command,) = re.findall(r"^    (lm_eval (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    before = votes(server)
    done = run(*shlex.split(command.replace("\\\n", "").replace(VOTE, model)))
    assert done.returncode == 0, done.stderr
    assert "|exact_match|" in done.stdout
    assert votes(server) - before == (3 if model == VOTE else 0)
    (log,) = tmp_path.rglob("samples_gsm8k_rows_*.jsonl")
    samples = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert sorted(sample["doc_id"] for sample in samples) == [0, 1, 2]
    for sample in samples:
        ((text,),) = sample["resps"]
        assert text
        if model == SAMPLE:
            options = {"max_tokens": 60, "temperature": 0.7, "stop": ["Question:"], "seed": 1234}
            assert text == answer(server, model, sample["doc"]["question"], **options)
