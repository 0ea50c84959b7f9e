"""Whole searches and evaluations on a server: from Python, from the command line, and across a crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import BFS, LogProb, Model, SelfConsistency, Task, Value, evaluate, solve
from tot.cli.app import main
from tot.decoders import ModelError, OptionError

PATH = "{{ thoughts | map(attribute='thought') | join('/') }}"
SEARCH: dict[str, Any] = {"search": BFS(thoughts=2, breadth=1, depth=3), "evaluator": Value(), "max_tokens": 6}


class Letters(Task):
    """A task whose prompts contain the purpose, the question and the path of thoughts."""

    templates: ClassVar = {
        "thought": "grow {{ question }} " + PATH,
        "value": "value {{ question }} " + PATH,
        "answer": "answer {{ question }} " + PATH,
    }
    depth = 3


def script(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Reply with a letter as a thought, values with c highest, and the path as the answer, determined by prompt and
    seed."""
    purpose, _, rest = body["messages"][-1]["content"].partition(" ")
    if purpose == "grow":
        return [{"text": "bcd"[(body["seed"] + i) % 3], "finish_reason": "stop"} for i in range(body.get("n", 1))]
    if purpose == "value":
        return [{"text": str({"b": 3, "c": 9, "d": 5}.get(rest[-1:], 1)), "finish_reason": "stop"}]
    return [{"text": rest, "finish_reason": "stop"}]


@pytest.fixture
def options(server: Any) -> dict[str, Any]:
    server.reply = script
    return at(server)


def at(server: Any, **options: Any) -> dict[str, Any]:
    return {"model": Model("tiny", "openai", {"base_url": server.url, **options})}


def lines(folder: Path) -> list[str]:
    """Return the lines of samples.jsonl without measured values, which depend on the machine."""
    return [line.partition(', "measured"')[0] for line in (folder / "samples.jsonl").read_text().splitlines()]


# -- searches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("requested", "answer"), [(True, "b"), (False, "c")])
def test_votes_are_weighted_by_log_probabilities_if_the_server_gives_them(
    server: Any, requested: bool, answer: str
) -> None:
    samples = [("b", -0.1), ("c", -5.0), ("c", -5.0)]

    def reply(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"text": text, "logprobs": {"content": [{"token": text, "logprob": value}]}} for text, value in samples]

    class Word(Task):
        templates: ClassVar = {"chain": "{{ question }}", "answer": "{{ question }}"}
        claims = staticmethod(lambda text: [])

        def answer_at(self, state: Any) -> str | None:
            return state.text or None

    server.reply = reply
    solution = solve(
        Word,
        "q",
        search=SelfConsistency(samples=3, weighted=True),
        evaluator=LogProb(),
        **at(server, logprobs=requested),
    )
    assert solution.answer == answer
    assert [len(part.logprobs) for node in solution.tree if node.thought for part in node.thought.drawn.values()] == (
        [1, 1, 1] if requested else []
    )


@pytest.mark.parametrize("decoder", ["openai", {"evaluate": "openai"}, None])
def test_reproducible_is_refused_for_a_server(remote: Any, options: dict[str, Any], decoder: Any) -> None:
    where = {**options, "decoder": decoder} if decoder else {"decoder": remote()}
    with pytest.raises(OptionError, match="but the decoder is remote: leave reproducible out"):
        solve(Letters, "q", **SEARCH, **where, reproducible=True)


# -- evaluations --------------------------------------------------------------------------------------------------


def test_an_evaluation_stopped_by_a_dying_server_resumes_to_the_same_samples(
    server: Any, options: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    evaluate(Letters, rows, out=tmp_path / "whole", concurrency=2, **SEARCH, **options)
    expected = lines(tmp_path / "whole")
    assert len(set(expected)) == 8
    out, done = tmp_path / "torn", list[int]()
    for replies in (20, 22, 3, None):
        server.die_after = replies
        arguments = {"out": out, "resume": True, "concurrency": 2, **SEARCH, **at(server, retries=1)}
        if replies is None:
            evaluate(Letters, rows, **arguments)
            continue
        with pytest.raises(ModelError, match=r"does not answer .*resume with --resume"):
            evaluate(Letters, rows, **arguments)
        assert not (out / "results.json").exists()
        done.append(len(lines(out)))
        server.die_after = None
        server.start()
    assert 0 < done[0] < done[1] == done[2] < 8
    assert lines(out) == expected
    assert json.loads((out / "results.json").read_text())["samples"] == 8
    assert len(list((out / "trees").glob("[!.]*"))) == 8


def test_an_evaluation_resumes_with_a_server_at_another_address(
    server: Any, options: dict[str, Any], rows: Path, tmp_path: Path
) -> None:
    arguments = {"out": tmp_path / "out", "resume": True, **SEARCH}
    server.die_after = 20
    with pytest.raises(ModelError):
        evaluate(Letters, rows, **arguments, **at(server, retries=0), concurrency=1)
    server.die_after, server.port = None, 0
    server.start()
    moved = at(server, timeout=50.0)
    assert evaluate(Letters, rows, **arguments, **moved, concurrency=3).samples == 8
    with pytest.raises(OptionError, match="decoder_option"):
        evaluate(Letters, rows, **arguments, **at(server, extra='{"top_k": 1}'))


BROKEN = {
    "status 400": (400, {"error": {"message": "This content was flagged"}}),
    "error with status 200": (200, {"error": {"message": "This content was flagged"}}),
    "status 500": (500, {"error": {"message": "cannot render these messages"}}),
    "no message": (200, {"choices": [{"index": 0}]}),
    "content filter": (200, {"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}),
}


@pytest.mark.parametrize("how", list(BROKEN))
@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_question_at_which_the_server_always_fails_fails_alone_and_is_asked_again_on_resume(
    server: Any, options: dict[str, Any], rows: Path, tmp_path: Path, how: str, concurrency: int
) -> None:
    server.reply = lambda path, body: BROKEN[how] if "what is 3?" in str(body) else script(path, body)  # language: ok
    arguments = {**SEARCH, **options, "out": tmp_path / "out", "concurrency": concurrency}
    results = evaluate(Letters, rows, **arguments)
    assert (results.samples, results.errors) == (8, 1)
    failed = [line for line in map(json.loads, lines_whole(tmp_path / "out")) if line["error"]]
    assert [line["index"] for line in failed] == [3]
    assert failed[0]["error"].startswith(("RefusedError: ", "RequestError: "))
    posts = len(server.posts)
    assert evaluate(Letters, rows, **arguments, resume=True).errors == 1
    assert len(server.posts) > posts


def lines_whole(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().splitlines()


# -- the command line and its files ---------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, server: Any, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `tot` on the server in an empty folder with a task's file, and return (status, output, errors)."""
    server.reply = script
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "letters.py").write_text(
        "from tot import Task\n\n\nclass Letters(Task):\n"
        f"    templates = {Letters.templates!r}\n    depth = 2\n    evaluator = 'value'\n"
    )
    monkeypatch.chdir(folder)

    def run(*arguments: str, url: str = "") -> tuple[int, str, str]:
        flags = ["--model", "tiny", "--decoder", "openai", "--decoder-option", f"base_url={url or server.url}"]
        status = main([*arguments, *flags, "--evaluator", "value"])
        return status, *capfd.readouterr()

    return run


def written(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.rglob("*") if path.is_file())


def test_tot_solve_and_tot_eval_use_a_server_and_store_no_key(command: Any, rows: Path, key: str) -> None:
    status, output, errors = command("solve", "letters.py:Letters", "q", "--out", "run.json")
    assert (status, errors) == (0, "")
    assert json.loads(Path("run.json").read_text())["usage"]["new_tokens"] > 0
    assert key not in output + written(Path())
    status, output, errors = command("eval", "letters.py:Letters", "--data", str(rows), "--limit", "2", "--out", "out")
    assert (status, "Score" in output) == (0, True), errors
    assert "base_url=http://127.0.0.1" in Path("out/config.yaml").read_text()
    assert key not in output + errors + written(Path())


@pytest.mark.parametrize("verb", ["solve", "eval"])
def test_an_address_with_a_password_is_refused_and_stored_nowhere(
    command: Any, rows: Path, server: Any, verb: str
) -> None:
    rest = ["q", "--out", "run.json"] if verb == "solve" else ["--data", str(rows), "--out", "out"]
    status, output, errors = command(
        verb, "letters.py:Letters", *rest, url=f"http://me:sk-hidden@127.0.0.1:{server.port}/v1"
    )
    assert status == 2
    assert "must not contain a user, password or query" in errors
    assert "sk-hidden" not in output + errors + written(Path())


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("api_key=sk-hidden", "the API key is not an option"),
        ("conurrency=3", "did you mean concurrency?"),
        ("served=tiny", "was removed: give the name of the model on the server"),
    ],
)
def test_invalid_options_are_reported_in_one_line(command: Any, option: str, complaint: str) -> None:
    status, output, errors = command(
        "solve", "letters.py:Letters", "q", "--out", "run.json", "--decoder-option", option
    )
    assert (status, output, errors.count("\n")) == (2, "", 1)
    assert complaint in errors
    assert "sk-hidden" not in errors + written(Path())


# -- imports -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["solve", "eval"])
def test_using_a_server_imports_no_torch(command: Any, rows: Path, server: Any, verb: str) -> None:
    script = (
        "import sys\nfrom tot.cli.app import main\nstatus = main(sys.argv[1:])\n"
        "print(status, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    rest = ["q"] if verb == "solve" else ["--data", str(rows), "--out", "out"]
    flags = ["--model", "tiny", "--decoder", "openai", "--decoder-option", f"base_url={server.url}"]
    done = subprocess.run(
        [sys.executable, "-c", script, verb, "letters.py:Letters", *rest, *flags], capture_output=True, text=True
    )
    assert (done.stdout.splitlines()[-1], server.posts != []) == ("0 []", True), done.stderr
