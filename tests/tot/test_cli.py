"""The command line: real runs as a subprocess, and everything else in this process, on a scripted decoder."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tot import State, Thought, ThoughtTree
from tot.cli import main
from tot.decoders import ModelError
from tot.tasks.gsm8k import GSM8K

QUESTION = "Tom has 3 apples and buys 4 more. How many apples does he have?"
TINY = ("--depth", "2", "--thoughts", "2", "--max-tokens", "16")
USAGE = ["prompt_tokens", "reused_prompt_tokens", "new_tokens", "forwards", "drafted", "accepted", "seconds"]
USAGE += ["approximate_tokens", "undecoded_tokens", "cost"]


class Gsm8kScript(dict[str, Any]):
    """Replies to GSM8K's prompts by how the assistant's prefix ends; the n-th sample of a reply is its n-th text."""

    def get(self, prompt: str, default: Any = None) -> Any:
        return next((reply for ending, reply in self.items() if prompt.endswith(ending)), default)


@pytest.fixture
def script() -> Gsm8kScript:
    thought = Thought(parts={"sub_question": "Q", "sub_answer": "A"})
    rated = GSM8K().prompt("value", State(question="q", thoughts=(thought,)))[-1].content
    return Gsm8kScript(
        {
            "Sub-question 1:": ["How many now?", "How many then?"],
            "How many now?\nSub-answer 1:": "3 + 4 = 7 apples.",
            "How many then?\nSub-answer 1:": "3 apples.",
            "Sub-question 2:": ["What else?", "What more?"],
            "Sub-answer 2:": "Nothing.",
            rated.splitlines()[-1]: "6",
            "The answer is": "7.",
        }
    )


@pytest.fixture
def scripted_model(script: Gsm8kScript, scripted: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The decoder that every run in this process gets."""
    decoder = scripted(script)
    monkeypatch.setattr("tot.solver.load_decoder", lambda *_, **__: nullcontext(decoder))
    return decoder


@pytest.fixture
def tot(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process; gives its status and what it wrote to standard output and error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        return status, *capfd.readouterr()

    return run


SOLVE = ("solve", "gsm8k", QUESTION, "--evaluator", "value", "--thoughts", "2", "--depth", "2")


# -- output -----------------------------------------------------------------------------------------------------


def test_the_tree_the_answer_and_the_usage_are_printed_as_plain_text(tot: Any, scripted_model: Any) -> None:
    status, out, err = tot(*SOLVE)
    question, first, second, blank, answer, usage = out.splitlines()
    assert (status, err) == (0, "")
    assert question == QUESTION
    assert first == "├── ★  6.00  How many now? → 3 + 4 = 7 apples."
    assert second == "└── ·  6.00  How many then? → 3 apples."
    assert blank == ""
    assert answer == "Answer: 7"
    assert re.fullmatch(
        r"2 thoughts, 7 calls, 35 new tokens, 0 prompt tokens \(0 reused\), 0 forwards, 0\.\d s, \d+ tokens/s", usage
    )


def test_json_is_one_object_and_nothing_else(tot: Any, scripted_model: Any) -> None:
    status, out, err = tot(*SOLVE, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    result = json.loads(out)
    assert list(result) == ["answer", "solved", "value", "usage"]
    assert (result["answer"], result["solved"], result["value"]) == ("7", False, 6.0)
    assert list(result["usage"]) == USAGE
    assert result["usage"]["new_tokens"] == 35


def test_out_writes_the_run_and_its_tree_can_be_loaded(tot: Any, scripted_model: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("an old one")
    _, out, _ = tot(*SOLVE, "--json", "--out", str(path))
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
    assert out.startswith("How many é?\n├── ")
    assert "Question: How many é?" in scripted_model.requests[0].prompt[0].content


def test_without_a_question_the_tasks_example_is_solved(tot: Any, scripted_model: Any) -> None:
    _, out, _ = tot("solve", "gsm8k", *SOLVE[3:])
    assert out.startswith("A gardener plants 7 rows of tulips")


def test_options_reach_the_search(tot: Any, scripted_model: Any) -> None:
    tot(*SOLVE[:3], "--thoughts", "2", "--breadth", "1", "--depth", "3", "--evaluator", "value", "--temperature", "0.5",
        "--max-tokens", "9", "--seed", "4")  # fmt: skip
    first, again = scripted_model.requests[0].sampling, list(scripted_model.requests)
    assert (first.n, first.temperature, first.max_tokens) == (2, 0.5, 9)
    assert [len(batch) for batch in scripted_model.batches] == [1, 2, 2, 1, 2, 2, 1]
    tot(*SOLVE, "--seed", "5")
    assert first.seed != scripted_model.requests[len(again)].sampling.seed


@pytest.mark.parametrize(
    ("budget", "stopped", "asked", "answer"),
    [
        (("--budget-tokens", "12"), "budget: tokens (20 of 12)", ["generate"] * 2, "none found"),
        (("--budget-tokens", "30"), "budget: tokens (30 of 30)", ["generate"] * 2 + ["evaluate"], "7"),
        (("--budget-nodes", "0"), "budget: nodes (0 of 0)", [], "none found"),
        (("--budget-forwards", "0"), "budget: forwards (0 of 0)", [], "none found"),
        (("--budget-seconds", "0"), "budget: seconds (", [], "none found"),
    ],
)
def test_a_spent_budget_is_said_with_the_best_so_far(
    tot: Any, scripted_model: Any, budget: tuple[str, str], stopped: str, asked: list[str], answer: str
) -> None:
    status, out, _ = tot(*SOLVE, *budget)
    assert status == 0
    assert f"\nStopped ({stopped}" in out
    assert f"; this is the best so far.\nAnswer: {answer}\n" in out
    assert [batch[0].purpose for batch in scripted_model.batches] == asked


def test_a_run_that_fails_on_the_way_keeps_what_it_had_grown(
    tot: Any, scripted_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = scripted_model.generate

    def fail(requests: Any) -> Any:
        if "Sub-question 2:" in requests[0].prompt[-1].content:
            raise ModelError("the model is gone: bring it back")
        return generate(requests)

    monkeypatch.setattr(scripted_model, "generate", fail)
    status, out, err = tot(*SOLVE, "--depth", "3", "--out", str(tmp_path / "run.json"))
    assert (status, out, err) == (2, "", "tot: the model is gone: bring it back\n")
    assert [node.value for node in ThoughtTree.load(tmp_path / "run.json")] == [None, 6, 6]


def test_control_characters_and_markup_are_shown_not_obeyed(
    tot: Any, scripted_model: Any, script: Gsm8kScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    nasty = "\x1b[31mred\x1b[0m \x1b]0;title\x07 [bold]b[/bold] [/] :smile: \x9b2J \u202eabc\r\x08 {{ 7*7 }}"
    script["How many now?\nSub-answer 1:"] = nasty
    monkeypatch.setattr("tot.tasks.gsm8k.GSM8K.parse_answer", lambda self, text: nasty)
    _, out, _ = tot(*SOLVE[:2], f"How {nasty} many?", *SOLVE[3:])
    shown = "�[31mred�[0m �]0;title� [bold]b[/bold] [/] :smile: �2J �abc�� {{ 7*7 }}"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out)
    lines = out.splitlines()
    assert lines[0] == f"How {shown} many?"
    assert shown.replace("c��", "c �") in lines[1]  # a thought is shown on one line: its carriage return is a space
    assert lines[-2] == f"Answer: {shown}"


# -- refusals ---------------------------------------------------------------------------------------------------


def refused(result: tuple[int, str, str]) -> str:
    """The one line on standard error of a command that was refused."""
    status, out, err = result
    assert (status, out) == (2, "")
    assert re.fullmatch(r"tot: [^\n]+\n", err)
    return err.removeprefix("tot: ").removesuffix("\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("solv",),
            r"No such command 'solv': choose one of solve, eval, report, serve, models, train-draft, instances, "
            "export, bench, cllm, fastcot",
        ),
        (
            ("bench", "fast"),
            r"No such command 'fast': choose one of fastcot, pdos, ray, serve, servers, packed, decoders, .*",
        ),
        (("solve",), r"there is no task: give its name, such as gsm8k, or path/to/file\.py:ClassName"),
        (("solve", "gsm8k", "q", "--breath", "2"), r"No such option: --breath: choose one of --data, .*--breadth, .*"),
        (
            ("--quiet",),
            r"No such option: --quiet: choose one of solve, eval, report, serve, models, train-draft, instances, "
            "export, bench, cllm, fastcot",
        ),
        (("solve", "gsm8k", "q", "two"), r"Got unexpected extra argument\(s\) \(two\)"),
        (("solve", "gsm9k", "q"), r"unknown task 'gsm9k' \(did you mean gsm8k\?\): choose one of .*, gsm8k, .*"),
        (
            ("solve", "gsm8k", "q", "--model", "gpt"),
            r"there is no model 'gpt': known names are smollm2-135m; a hub id .*",
        ),
        (("solve", "gsm8k", "q", "--model", "./gpt.gguf"), r"there is no file or folder \./gpt\.gguf: check the path"),
        (("solve", "gsm8k", "q", "--decoder", "beam"), r"unknown decoder 'beam'.*: choose one of .*\bar\b.*"),
        (
            ("solve", "gsm8k", "q", "--decoder", "judge=ar"),
            r"unknown purpose 'judge': choose one of answer, evaluate, generate",
        ),
        (
            ("solve", "gsm8k", "q", "--decoder", "generate="),
            r"--decoder 'generate=' can't be read: write generate=NAME,.*",
        ),
        (("solve", "gsm8k", "q", "--search", "dsf"), r"unknown search 'dsf' \(did you mean dfs\?\): choose one of .*"),
        (("solve", "gsm8k", "q", "--search", "dfs:goal=2"), r"search dfs, option goal: .* \(its options: .*goals.*\)"),
        (
            ("solve", "gsm8k", "q", "--search", "mcts:iterations"),
            r"search 'mcts:iterations': .* write mcts:option=value.*",
        ),
        (("solve", "gsm8k", "q", "--search", "dfs", "--breadth", "2"), r"search dfs, option breadth: .*"),
        (("solve", "gsm8k", "q", "--generator", "sampel"), r"unknown generator 'sampel' \(did you mean sample\?\): .*"),
        (("solve", "gsm8k", "q", "--generator", "enumerate"), r"task GSM8K has no `actions` to enumerate: .*"),
        (("solve", "gsm8k", "q", "--model", "none"), r"this search asks a model, and there is none: give model=.*"),
        (("solve", "gsm8k", "q", "--decoder-option", "k"), r"--decoder-option 'k' can't be read: write NAME=VALUE.*"),
        (("solve", "gsm8k", "q", "--decoder", "sd", "--decoder-option", "k=0"), r"decoder sd, option k: .*"),
        (("solve", "gsm8k", "q", "--decoder-option", "k=2"), r"decoder ar, option k: .* \(its options: none\)"),
        (("solve", "gsm8k", "q", "--data", "x.jsonl"), r"--data and a question: give one of the two, not 'q' as well"),
        (("solve", "gsm8k", "--data", "x.jsonl"), r"x\.jsonl: there is no such file"),
        (("solve", "gsm8k", "--data", "x.doc"), r"x\.doc: unknown kind of data set '\.doc'.*"),
        (("solve", "gsm8k", "q", "--resume", "x.jsonl"), r"--resume goes on as the run was started: leave 'task' out"),
        (("solve", "--resume", "x.jsonl"), r"x\.jsonl can't be opened: No such file or directory; .*"),
        (("solve", "my_task.py:Mine"), r"my_task\.py: there is no such file; give path/to/file\.py:ClassName"),
        (("solve", "my_task.py"), r"my_task\.py: name the class in it, as in my_task\.py:MyTask"),
        (("solve", "gsm8k", "q", "--evaluator", "votes"), r"unknown evaluator 'votes' \(did you mean vote\?\): .*"),
        (
            ("solve", "gsm8k", "q", "--dtype", "int8"),
            r".*'--dtype': .*'int8' is not one of 'auto', 'bf16', 'fp16', 'fp32'\.",
        ),
        (("solve", "gsm8k", "q", "--device", "tpu"), r"device 'tpu' is not known: choose auto, cpu, cuda or cuda:N"),
        (
            ("solve", "gsm8k", "q", "--thoughts", "0"),
            r"search bfs, option thoughts: Input should be greater than or equal to 1 .*",
        ),
        (("solve", "gsm8k", "q", "--thoughts", "two"), r".*'--thoughts': .*integer.*"),
        (
            ("solve", "gsm8k", "q", "--breadth", "-1"),
            r"search bfs, option breadth: Input should be greater than or equal to 1 .*",
        ),
        (
            ("solve", "gsm8k", "q", "--depth", "0"),
            r"search bfs, option depth: Input should be greater than or equal to 1 .*",
        ),
        (("solve", "gsm8k", "q", "--max-tokens", "0"), r".*'--max-tokens': .*greater than or equal to 1"),
        (("solve", "gsm8k", "q", "--temperature", "-1"), r".*'--temperature': .*greater than or equal to 0"),
        (("solve", "gsm8k", "q", "--budget-seconds", "nan"), r".*'--budget-seconds': .*"),
        (("solve", "gsm8k", "q", "--budget-seconds", "inf"), r"seconds = inf: Input should be a finite number"),
        (("solve", "gsm8k", ""), r"the question is empty: give some text"),
        (("solve", "gsm8k", " \n"), r"the question is empty: give some text"),
        (("solve", "gsm8k", "caf\udce9"), r"the question is not Unicode text: give it in UTF-8"),
        (
            ("solve", "gsm8k", "q", "--out", "absent/run.json"),
            r"--out absent/run\.json: the folder .*/absent does not exist: .*",
        ),
        (("solve", "gsm8k", "q", "--out", "."), r"--out \. is a folder: give a file in it"),
        (("models", "all"), r"Got unexpected extra argument\(s\) \(all\)"),
    ],
)
def test_what_cannot_be_done_is_one_line_that_says_what_can(
    tot: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.fullmatch(said, refused(tot(*arguments)))


@pytest.mark.parametrize(
    ("stdin", "said"), [(b"", "is empty"), (b" \n", "is empty"), (b"caf\xe9", "is not utf-8 text")]
)
def test_standard_input_without_a_question_is_refused(
    tot: Any, monkeypatch: pytest.MonkeyPatch, stdin: bytes, said: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    assert said in refused(tot("solve", "gsm8k", "-"))


@pytest.mark.parametrize(("arguments", "named"), [((), ("solve", "models", "bench")), (("bench",), ("packed",))])
def test_a_command_without_arguments_shows_its_help(
    tot: Any, arguments: tuple[str, ...], named: tuple[str, ...]
) -> None:
    status, out, err = tot(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("Usage: tot ")
    assert all(re.search(rf"^ +{name} ", err, re.MULTILINE) for name in named)


def test_help_names_every_option_with_a_word_about_it(tot: Any) -> None:
    status, out, err = tot("solve", "--help")
    assert (status, err) == (0, "")
    for option in ("--thoughts", "--breadth", "--depth", "--budget-seconds", "--out", "--json", "--kv-budget"):
        assert re.search(rf"^ +{option}\b.* [A-Za-z]", out, re.MULTILINE)


def test_a_refused_command_exits_with_2_and_no_traceback() -> None:
    script = Path(sys.executable).parent / "tot"
    done = subprocess.run([script, "solv"], capture_output=True, text=True, timeout=60, check=False)
    assert refused((done.returncode, done.stdout, done.stderr)).startswith("No such command 'solv'")


def test_output_that_the_terminal_cannot_spell_is_no_error(tot: Any, scripted_model: Any, monkeypatch: Any) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(list(SOLVE)) == 0
    out.flush()
    assert b"? 6.00" in out.buffer.getvalue().replace(b"  ", b" ")  # the star


# -- with the real model ----------------------------------------------------------------------------------------


@pytest.mark.real
def test_a_real_run_in_a_pipe_is_plain_text_and_is_kept(smollm2: str, python: Any, tmp_path: Path) -> None:
    process = python("-m", "tot.cli", "solve", "gsm8k", "-", *TINY, "--out", "run.json")
    out, err = process.communicate(QUESTION, timeout=120)
    assert (process.returncode, err) == (0, "")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)
    lines = out.splitlines()
    assert lines[0] == QUESTION
    assert [line[:5] for line in lines[1:3]] == ["├── ★", "└── ·"] or [line[:5] for line in lines[1:3]] == [
        "├── ·",
        "└── ★",
    ]
    tree = ThoughtTree.load(tmp_path / "run.json")
    run = json.loads((tmp_path / "run.json").read_text())
    assert lines[-2] == f"Answer: {run['answer']}"
    assert lines[-1].startswith(f"2 thoughts, {run['calls']} calls, {run['usage']['new_tokens']} new tokens, ")
    assert tree.state(tree.root).question == QUESTION
    assert [node.depth for node in tree] == [0, 1, 1]
    assert all(1 <= node.value <= 10 for node in tree if node.value is not None)
    assert run["value"] == max(node.value for node in tree if node.value is not None)


@pytest.mark.real
def test_a_real_run_as_json_prints_one_object_with_what_was_spent(smollm2: str, tot: Any) -> None:
    status, out, err = tot("solve", "gsm8k", QUESTION, *TINY, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    result = json.loads(out)
    assert list(result) == ["answer", "solved", "value", "usage"]
    assert result["solved"] is False
    assert 1 <= result["value"] <= 10
    usage = result["usage"]
    assert list(usage) == USAGE
    assert 0 < usage["new_tokens"] <= 5 * 16  # two sub-questions, two sub-answers, one answer
    assert usage["forwards"] <= 4 * 16 + 10
    assert usage["reused_prompt_tokens"] > usage["prompt_tokens"] / 2  # the demonstrations were computed once
    assert (usage["drafted"], usage["accepted"]) == (0, 0)
    assert usage["seconds"] > 0


@pytest.mark.real
def test_ctrl_c_prints_the_best_so_far_and_keeps_the_tree(smollm2: str, python: Any, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()  # a terminal, so that the progress line says how far the search is
    arguments = ("--depth", "30", "--thoughts", "2", "--breadth", "2", "--max-tokens", "16", "--out", "run.json")
    process = python("-m", "tot.cli", "solve", "gsm8k", QUESTION, *arguments, stderr=theirs)
    os.close(theirs)
    progress = ""
    while not re.search(r"level [2-9], \d+ thoughts, \d+ tokens", progress):
        progress += os.read(ours, 4096).decode(errors="replace")
    assert "loading the model" in progress
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 130
    assert "\nStopped (interrupted); this is the best so far.\nAnswer: " in out
    tree = ThoughtTree.load(tmp_path / "run.json")
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["stopped"] == "interrupted"
    assert f"\nAnswer: {run['answer'] or 'none found'}\n" in out
    assert out.count("── ") == len(tree) - 1 >= 4
    assert run["value"] == [node.value for node in tree if node.chosen][-1] >= 1
    assert "\x1b" not in out


@pytest.mark.real
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("How many? " * 4000,),
            r"the prompt has \d{5} tokens and the model's context holds 8192, .*: shorten the prompt",
        ),
        (
            (QUESTION, "--kv-budget", "100"),
            r"this request may need \d+ tokens .* the budget holds 100: raise kv_budget, .*",
        ),
        ((QUESTION, "--kv-budget", "1KiB"), r"a kv_budget of '1KiB' holds 0 tokens .*: give more"),
        ((QUESTION, "--kv-budget", "lots"), r"kv_budget is 'lots': give tokens, such as 20000, or a size, .*"),
    ],
)
def test_what_does_not_fit_the_real_model_is_one_line_with_the_numbers(
    smollm2: str, tot: Any, arguments: tuple[str, ...], said: str
) -> None:
    assert re.fullmatch(said, refused(tot("solve", "gsm8k", *arguments)))


@pytest.mark.real
def test_models_lists_the_embedded_model_and_its_file(smollm2: str, python: Any) -> None:
    process = python("-m", "tot.cli", "models")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    (line,) = (line for line in out.splitlines() if line.startswith(f"{smollm2}  embedded  "))
    path = Path(line.split("  ")[-1])
    assert path.suffix == ".gguf"
    assert path.is_file()
