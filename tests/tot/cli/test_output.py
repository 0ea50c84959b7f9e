"""The output of `tot solve` with a scripted decoder: tree, answer, usage, JSON, files and stop reasons."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tot import State, ThoughtTree
from tot.cli.app import main
from tot.cli.output import usage_line
from tot.decoders import ModelError, Usage
from tot.solution import Solution

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
RULES = ("--model", "none", "--search", "best-first:rank=cost", "--generator", "enumerate:prior=uniform")
SOLVE = ("solve", "gsm8k", QUESTION, "--evaluator", "value", "--search", "bfs:thoughts=2,depth=2")


def test_the_tree_the_answer_and_the_usage_are_printed_as_plain_text(tot: Any, scripted_model: Any) -> None:
    status, out, err = tot(*SOLVE)
    answer, _, question, first, second, blank, usage, hint = out.splitlines()
    assert (status, err) == (0, "")
    assert hint == "To keep the tree, add --out run.json; `tot report run.json` draws it."
    assert question == QUESTION
    assert first == "├── ★  6.00  7  How many now? → 3 + 4 = 7 apples."
    assert second == "└── ·  6.00  How many then? → 3 apples."
    assert blank == ""
    assert answer == "Answer: 7"
    assert re.fullmatch(
        r"2 thoughts, 7 calls, 35 new tokens, 0 prompt tokens, 0% of them reused, 0 forward passes, \d+\.\d s, "
        r"\d+ tokens/s",
        usage,
    )


def test_json_output_is_exactly_one_object(tot: Any, scripted_model: Any, usage_fields: list[str]) -> None:
    status, out, err = tot(*SOLVE, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    result = json.loads(out)
    assert list(result) == ["answer", "certainty", "gain", "solved", "value", "usage"]
    assert (result["answer"], result["solved"], result["value"]) == ("7", False, 6.0)
    assert list(result["usage"]) == usage_fields
    assert result["usage"]["new_tokens"] == 35


def test_out_writes_the_run_and_its_tree_can_be_loaded(tot: Any, scripted_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("an old one")
    status, _, err = tot(*SOLVE, "--out", str(path))
    assert (status, path.read_text()) == (2, "an old one")
    assert "exists: give another file, or add --overwrite" in err
    _, out, _ = tot(*SOLVE, "--json", "--out", str(path), "--overwrite")
    run = json.loads(path.read_text())
    assert (run["format"], run["version"]) == ("tot.run", 2)
    assert json.loads(out).items() <= run.items()
    tree = ThoughtTree.load(path)
    assert [node.value for node in tree] == [None, 6, 6]
    assert tree.state(tree[1]).text == "How many now?\n3 + 4 = 7 apples."


def test_a_dash_reads_the_question_from_standard_input(
    tot: Any, scripted_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("  How many é?\n"))
    _, out, _ = tot("solve", "gsm8k", "-", *SOLVE[3:])
    assert "\nHow many é?\n├── " in out
    assert "Question: How many é?" in scripted_model.requests[0].prompt[0].content


def test_without_a_question_the_example_of_the_task_is_solved(tot: Any, scripted_model: Any) -> None:
    _, out, _ = tot("solve", "gsm8k", *SOLVE[3:])
    assert "\nA gardener plants 7 rows of tulips" in out


def test_options_reach_the_search(tot: Any, scripted_model: Any) -> None:
    tot(*SOLVE[:3], "--search", "bfs:thoughts=2,breadth=1,depth=3", "--evaluator", "value", "--temperature", "0.5",
        "--max-tokens", "9", "--seed", "4")  # fmt: skip
    first, again = scripted_model.requests[0].sampling, list(scripted_model.requests)
    assert (first.n, first.temperature, first.max_tokens) == (2, 0.5, 9)
    assert [len(batch) for batch in scripted_model.batches] == [1, 2, 2, 1, 2, 2, 1]
    tot(*SOLVE, "--seed", "5")
    assert first.seed != scripted_model.requests[len(again)].sampling.seed


@pytest.mark.parametrize(
    ("budget", "stopped", "purposes", "answer"),
    [
        (("--budget-tokens", "12"), "budget: tokens (20 of 12)", ["generate"] * 2, "Answer: none found"),
        (
            ("--budget-tokens", "30"),
            "budget: tokens (30 of 30)",
            ["generate"] * 2 + ["evaluate"],
            "Answer: 7",
        ),
        (("--budget-nodes", "0"), "budget: nodes (0 of 0)", [], "Answer: none found"),
        (("--budget-forwards", "0"), "budget: forwards (0 of 0)", [], "Answer: none found"),
        (("--budget-seconds", "0"), "budget: seconds (", [], "Answer: none found"),
    ],
)
def test_a_spent_budget_is_reported_with_the_best_so_far(
    tot: Any, scripted_model: Any, budget: tuple[str, str], stopped: str, purposes: list[str], answer: str
) -> None:
    status, out, _ = tot(*SOLVE, *budget)
    assert status == 0
    assert out.startswith(f"{answer}\nStopped early: {stopped}")
    assert ("This is the best answer so far.\n" in out) == (not answer.endswith("none found"))
    assert ("The thoughts marked ★ are the best so far.\n" in out) == (answer.endswith("none found") and bool(purposes))
    assert [batch[0].purpose for batch in scripted_model.batches] == purposes


def test_a_failing_run_keeps_its_tree(
    tot: Any, scripted_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = scripted_model.generate

    def fail(requests: Any) -> Any:
        if "Sub-question 2:" in requests[0].prompt[-1].content:
            raise ModelError("the model is gone: bring it back")
        return generate(requests)

    monkeypatch.setattr(scripted_model, "generate", fail)
    status, out, err = tot(*SOLVE, "--search", "bfs:thoughts=2,depth=3", "--out", str(tmp_path / "run.json"))
    assert (status, out, err) == (2, "", "tot: the model is gone: bring it back\n")
    assert [node.value for node in ThoughtTree.load(tmp_path / "run.json")] == [None, 6, 6]


def test_control_characters_and_markup_are_displayed_as_text(
    tot: Any, scripted_model: Any, script: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nasty = "\x1b[31mred\x1b[0m \x1b]0;title\x07 [bold]b[/bold] [/] :smile: \x9b2J \u202eabc\r\x08 {{ 7*7 }}"
    script["How many now?\nSub-answer 1:"] = nasty
    monkeypatch.setattr("tot.tasks.gsm8k.GSM8K.parse_answer", lambda self, text: nasty)
    _, out, _ = tot(*SOLVE[:2], f"How {nasty} many?", *SOLVE[3:])
    visible = "�[31mred�[0m �]0;title� [bold]b[/bold] [/] :smile: �2J �abc�� {{ 7*7 }}"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out)
    lines = out.splitlines()
    assert lines[0] == f"Answer: {visible}"
    one_line = visible.replace("c��", "c �")  # its carriage return is a space
    place = lines.index(f"How {one_line} many?")
    assert one_line[:20] in lines[place + 1]


def test_characters_that_the_terminal_cannot_encode_are_no_error(
    tot: Any, scripted_model: Any, monkeypatch: Any
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(list(SOLVE)) == 0
    out.flush()
    assert b"? 6.00" in out.buffer.getvalue().replace(b"  ", b" ")  # the star


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [("list",), ("--version",), ("solve", "game24", "4 9 10 13", "--json", *RULES)])
def test_output_that_cannot_be_written_is_one_line(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "tot", *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "tot: standard output can't be written: No space left on device; write it to another place\n",
    )


@pytest.mark.parametrize("command", [("list",), ("solve", "game24", "4 9 10 13", *RULES)])
def test_a_reader_that_ends_early_is_no_error(command: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "tot", *command], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_have_their_nouns_and_percentages_follow_from_them() -> None:
    usage = Usage(new_tokens=1, prompt_tokens=1, forwards=1, drafted=294, accepted=149, reached=257, seconds=0.0)
    solution = Solution(None, False, None, ThoughtTree(State(question="q")), usage, 1, 1, 1, None)
    assert usage_line(solution) == (
        "0 thoughts, 1 call, 1 new token, 1 prompt token, 0% of them reused, 1 forward pass, 0.0 s, 149 of 294 drafted "
        "tokens accepted (51%), acceptance rate 58% (of 257 reached), 1 rejected thought, 1 unreadable reply"
    )
