"""The command line with the embedded model: piped, as JSON, interrupted in a terminal, and with invalid options."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmark
from tot import ThoughtTree

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
TINY = ("--prompts", "papers", "--search", "bfs:thoughts=2,depth=2", "--max-tokens", "16")


@pytest.mark.real
def test_a_piped_run_prints_plain_text_and_is_saved(smollm2: str, python: Any, tmp_path: Path) -> None:
    process = python("-m", "tot.cli.app", "solve", "gsm8k", "-", *TINY, "--out", "run.json")
    out, err = process.communicate(QUESTION, timeout=120)
    assert (process.returncode, err) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)
    answer, *lines, saved = out.splitlines()
    lines = lines[lines.index(QUESTION) :]
    assert saved == "Saved to run.json; `tot report run.json` draws it."
    tree = ThoughtTree.load(tmp_path / "run.json")
    run = json.loads((tmp_path / "run.json").read_text())
    drawn = [line[:5] for line in lines[1:-1] if line]
    two = [["├── ★", "└── ·"], ["├── ·", "└── ★"]]
    assert drawn in (two if len(tree) == 3 else [["└── ★"]])  # two thoughts, or one that was written twice
    assert answer == f"Answer: {run['answer']}"
    thoughts = "2 thoughts" if len(tree) == 3 else "1 thought"
    assert lines[-1].startswith(f"{thoughts}, {run['calls']} calls, {run['usage']['new_tokens']} new tokens, ")
    assert tree.state(tree.root).question == QUESTION
    assert [node.depth for node in tree] == [0] + [1] * len(drawn)
    assert all(1 <= node.value <= 10 for node in tree if node.value is not None)
    assert run["value"] == max(node.value for node in tree if node.value is not None)


@pytest.mark.smoke
@pytest.mark.real
def test_a_json_run_prints_one_object_with_its_usage(smollm2: str, tot: Any, usage_fields: list[str]) -> None:
    status, out, err = tot("solve", "gsm8k", QUESTION, *TINY, "--decoder", "ar", "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    result = json.loads(out)
    assert list(result) == ["answer", "certainty", "gain", "solved", "value", "usage"]
    assert result["solved"] is False
    assert 1 <= result["value"] <= 10
    usage = result["usage"]
    assert list(usage) == usage_fields
    assert 0 < usage["new_tokens"] <= 5 * 16  # two sub-questions, two sub-answers, one answer
    assert usage["forwards"] <= 4 * 16 + 10
    assert usage["reused_prompt_tokens"] > usage["prompt_tokens"] / 2  # the demonstrations were computed once
    assert (usage["drafted"], usage["accepted"]) == (0, 0)
    assert usage["seconds"] > 0


@pytest.mark.processes
@pytest.mark.real
def test_ctrl_c_prints_the_best_so_far_and_saves_the_tree(smollm2: str, python: Any, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()  # a pseudo-terminal, so that the progress line reports the progress
    arguments = ["--prompts", "papers", "--search", "bfs:thoughts=2,breadth=2,depth=30", "--max-tokens", "16"]
    arguments += ["--out", "run.json"]
    process = python("-m", "tot.cli.app", "solve", "gsm8k", QUESTION, *arguments, stderr=theirs)
    os.close(theirs)
    progress = ""
    while not re.search(r"level [2-9], \d+ thoughts, \d+ tokens", progress):
        progress += os.read(ours, 4096).decode(errors="replace")
    assert "loading the model" in progress
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 130
    assert "\nStopped early: interrupted. Th" in out
    tree = ThoughtTree.load(tmp_path / "run.json")
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["stopped"] == "interrupted"
    answer = "Answer: none found" if run["answer"] is None else f"Answer: {run['answer']}"
    assert out.startswith(f"{answer}\n")
    assert out.count("── ") == len(tree) - 1 >= 2  # two levels, each of two thoughts or of one written twice
    assert run["value"] == [node.value for node in tree if node.chosen][-1] >= 1
    assert "\x1b" not in out


@pytest.mark.real
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("How many? " * 4000,),
            r"the prompt has \d{5} tokens, the model's context holds 8192, .*: shorten the prompt",
        ),
        (
            (QUESTION, "--kv-budget", "100"),
            r"this request may need \d+ tokens .* the budget holds 100: raise kv_budget, .*",
        ),
        ((QUESTION, "--kv-budget", "1KiB"), r"a kv_budget of '1KiB' holds 0 tokens .*: give more"),
        ((QUESTION, "--kv-budget", "lots"), r"kv_budget is 'lots': give tokens, such as 20000, or a size, .*"),
    ],
)
def test_options_that_do_not_fit_the_model_are_rejected_with_the_numbers(
    smollm2: str, tot: Any, refused: Any, arguments: tuple[str, ...], message: str
) -> None:
    assert re.fullmatch(message, refused(tot("solve", "gsm8k", *arguments)))


@pytest.mark.real
def test_models_lists_the_embedded_model_and_its_file(smollm2: str, python: Any) -> None:
    process = python("-m", "tot.cli.app", "models")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    (line,) = (line for line in out.splitlines() if line.startswith(f"{smollm2}  embedded  "))
    path = Path(line.split("  ")[-1])
    assert path.suffix == ".gguf"
    assert path.is_file()


@pytest.mark.real
def test_the_demo_shows_a_wrong_answer_beside_a_right_one(smollm2: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert benchmark(["demo"]) == 0
    out = capfd.readouterr().out
    (judged,) = (line for line in out.splitlines() if "hidden tests" in line and "│" in line)
    assert [cell.strip() for cell in judged.split("│")[1:]] == ["wrong", "right"]


@pytest.mark.real
def test_a_chat_remembers_the_conversation_and_votes_on_the_last_question(smollm2: str, python: Any) -> None:
    process = python("-m", "tot.cli.app", "chat", "--max-tokens", "12")
    lines = [
        "/vote",
        "What is the capital of France?",
        "And of Italy?",
        "/tree",
        "/vote",
        "/tree",
        "/nope",
        "/quit",
        "Hi",
    ]
    out, err = process.communicate("\n".join(lines), timeout=120)
    assert process.returncode == 0
    first, second, voted, asked, *tree = out.splitlines()
    assert (first, second) == ("The capital of France is Paris.", "The capital of Italy is Rome.")
    assert re.fullmatch(r"Answer \(\d of \d votes\): The capital of Italy is Rome\.", voted)
    assert asked == "And of Italy?"
    assert all(line.startswith(("├──", "└──")) for line in tree)
    assert err.splitlines() == [
        "tot: there is no question to vote on: type one first",
        "tot: no vote has run: type /vote after a question",
        "tot: unknown command '/nope' (did you mean /vote?): choose one of /clear, /model, /quit, /tree, /vote",
    ]


@pytest.mark.real
def test_ask_needs_no_quotes_and_prints_a_plain_answer_once(smollm2: str, tot: Any) -> None:
    status, out, err = tot("ask", "What", "is", "the", "capital", "of", "Japan?")
    assert (status, err) == (0, "")
    assert out.startswith("Answer: The capital of Japan is Tokyo.\n")
    assert out.count("Tokyo") == 1
