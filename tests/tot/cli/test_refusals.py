"""Invalid commands: one line on standard error with a remedy, and exit status 2."""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tot.decoders.errors import reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("solv", r"No such command 'solv'\. Did you mean 'solve'\?; see tot --help"),
        ("train colect", r"No such command 'colect'\. Did you mean 'collect'\?; see tot train --help"),
        ("solve", r"no task is given: give .* gsm8k, or path/to/file\.py:ClassName, or a question in quotes"),
        ("ask", r"Missing argument 'question'\.?"),
        ("gsm8k q", r'gsm8k is a task, not a command: type tot solve gsm8k "your question"'),
        ("'What is it?'", r"'What is it\?' is not a command: to ask it, type tot solve 'What is it\?'"),
        ("solve hello", r"unknown task 'hello': choose one of .*; if it is a question, type tot solve ask hello"),
        ("cllm train", r"command 'cllm' was removed: run tot train collect, and tot train cllm"),
        ("fastcot calibrate", r"command 'fastcot' was removed: run python -m benchmarks fastcot in a clone .*"),
        ("bench peers", r"command 'bench' was removed: run python -m benchmarks in a clone of the repository"),
        ("train-draft", r"command 'train-draft' was removed: give a small model of the same family as the draft"),
        ("eval gsm8k --track wandb", r"option 'track' was removed: read samples\.jsonl in the folder .*"),
        ("report x.json --format sft", r"option 'format' was removed: a run's folder has its rows .*"),
        ("help solv", r"No such command 'solv'\. Did you mean 'solve'\?; see tot --help"),
        ("solve gsm8k q --evaluater x", r"No such option: --evaluater .*--evaluator.*; see tot solve --help"),
        (
            "solve gsm8k q --breadth 2",
            r"option '--breadth' was removed: give it with the search, as in --search bfs:.*",
        ),
        ("--quiet", r"No such option: --quiet; see tot --help"),
        ("solve gsm8k q two", r"Got unexpected extra argument\(s\) \(two\)"),
        ("solve gsm9k q", r"unknown task 'gsm9k' \(did you mean gsm8k\?\): choose one of .*, gsm8k, .*"),
        ("solve gsm8k q --model gpt", r"unknown model 'gpt': choose one of smollm2-135m; or a hub id .*"),
        ("solve gsm8k q --model ./gpt.gguf", r"there is no file or folder \./gpt\.gguf: check the path"),
        ("solve gsm8k q --decoder beam", r"unknown decoder 'beam'.*: choose one of .*\bar\b.*"),
        (
            "solve gsm8k q --decoder judge=ar",
            r"unknown purpose 'judge': choose one of answer, escalate, evaluate, generate",
        ),
        ("solve gsm8k q --decoder generate=", r"--decoder 'generate=' can't be read: write generate=NAME,.*"),
        ("solve gsm8k q --search dsf", r"unknown search 'dsf' \(did you mean dfs\?\): choose one of .*"),
        ("solve gsm8k q --search dfs:goal=2", r"search dfs, option goal: .* \(its options: .*\)"),
        ("solve gsm8k q --search mcts:iterations", r"search 'mcts:iterations': .* write mcts:option=value.*"),
        ("solve gsm8k q --search dfs:breadth=2", r"search dfs, option breadth: .*"),
        ("solve gsm8k q --generator sampel", r"unknown generator 'sampel' \(did you mean sample\?\): .*"),
        ("solve gsm8k q --search bfs --generator enumerate", r"task GSM8K has no `actions`: .*"),
        ("solve gsm8k q --model none", r"the search needs a model, but none was given: give model=.*"),
        ("solve gsm8k q --decoder-option k", r"--decoder-option 'k' can't be read: write NAME=VALUE.*"),
        ("solve gsm8k q --decoder sd --decoder-option k=0", r"decoder sd, option k: .*"),
        ("solve gsm8k q --decoder-option k=2", r"decoder auto, option k: .* \(its options: draft\)"),
        ("solve gsm8k q --data x.jsonl", r"both --data and a question are given: leave --data or 'q' out"),
        ("solve gsm8k --data x.jsonl", r"x\.jsonl: there is no such file"),
        ("solve gsm8k --data x.doc", r"x\.doc: unknown kind of data set '\.doc'.*"),
        ("solve gsm8k q --resume x.jsonl", r"--resume uses the options of the run: leave 'question' out"),
        ("solve --resume x.jsonl", r"x\.jsonl can't be opened: No such file or directory; .*"),
        ("solve my_task.py:Mine", r"my_task\.py: there is no such file; give path/to/file\.py:Name"),
        ("solve my_task.py", r"my_task\.py: add a name in the file, as in my_task\.py:Name"),
        ("solve gsm8k q --evaluator votes", r"unknown evaluator 'votes' \(did you mean vote\?\): .*"),
        ("solve gsm8k q --dtype int8", r".*'--dtype': .*'int8' is not one of 'auto', 'bf16', 'fp32'\."),
        ("solve gsm8k q --device tpu", r"device 'tpu' is not known: choose auto, cpu, cuda or cuda:N"),
        (
            "solve gsm8k q --search bfs:thoughts=0",
            r"search bfs, option thoughts: Input should be greater than or equal to 1 .*",
        ),
        ("solve gsm8k q --max-tokens 0", r".*'--max-tokens': .*greater than or equal to 1"),
        ("solve gsm8k q --temperature -1", r".*'--temperature': .*greater than or equal to 0"),
        ("solve gsm8k q --budget-seconds nan", r".*'--budget-seconds': .*"),
        ("solve gsm8k q --budget-seconds inf", r"budget.seconds = inf: Input should be a finite number"),
        ("solve gsm8", r"unknown task 'gsm8' \(did you mean gsm8k\?\): choose one of ask, .*"),
        ("solve chess", r"unknown task 'chess': choose one of ask, .*"),
        ("solve 'my tasks/mine.py:Mine'", r"my tasks/mine\.py: there is no such file; give path/to/file\.py:Name"),
        ("solve 'Who wrote Hamlet?' --model none", r"the search needs a model, but none was given: .*"),
        ("solve 2+2 --model none", r"the search needs a model, but none was given: .*"),
        ("solve 'Who wrote Hamlet?' --data x.jsonl", r"unknown task 'Who wrote Hamlet\?': .*"),
        ("solve ''", r"the question is empty: give some text"),
        ("solve '  '", r"the question is empty: give some text"),
        ("solve gsm8k ''", r"the question is empty: give some text"),
        ("solve gsm8k ' \n'", r"the question is empty: give some text"),
        ("solve gsm8k 'caf\udce9'", r"the question is not Unicode text: give it in UTF-8"),
        ("solve gsm8k q --out absent/run.json", r"--out absent/run\.json: the folder .*/absent does not exist: .*"),
        ("solve gsm8k q --out .", r"--out \. is a folder: give a file in it"),
        ("models all", r"Got unexpected extra argument\(s\) \(all\)"),
    ],
)
def test_an_invalid_command_is_one_line_with_a_remedy(tot: Any, refused: Any, arguments: str, message: str) -> None:
    assert re.fullmatch(message, refused(tot(*shlex.split(arguments))))


@pytest.mark.parametrize(
    ("stdin", "message"), [(b"", "is empty"), (b" \n", "is empty"), (b"caf\xe9", "is not utf-8 text")]
)
def test_standard_input_without_a_question_is_rejected(
    tot: Any, refused: Any, monkeypatch: pytest.MonkeyPatch, stdin: bytes, message: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    assert message in refused(tot("solve", "gsm8k", "-"))


def test_a_rejected_command_exits_with_2_and_no_traceback(refused: Any) -> None:
    script = Path(sys.executable).parent / "tot"
    done = subprocess.run([script, "solv"], capture_output=True, text=True, timeout=60, check=False)
    assert refused((done.returncode, done.stdout, done.stderr)).startswith("No such command 'solv'")


UNKNOWN = """
import sys
from tot import TotError, evaluate, solve
from tot.cli.app import main

for command in (["solve", "gsm8k", "q"], ["eval", "gsm8k", "--data", "rows.jsonl"]):
    for flag in ("--search", "--generator", "--evaluator", "--decoder"):
        main([*command, flag, "nonsense"])
    main([*command, "--decoder", "generate=ar,evaluate=nonsense"])
main(["solve", "nonsense", "q"])
for call in (lambda: solve("gsm8k", "q", search="nonsense"), lambda: evaluate("gsm8k", "x.jsonl", search="nonsense")):
    try:
        call()
    except TotError as error:
        print(error, file=sys.stderr)
print("torch" in sys.modules)
"""


def test_unknown_names_are_rejected_before_torch_is_imported(python: Any, rows: Path) -> None:
    out, err = python("-c", UNKNOWN).communicate(timeout=60)
    searches = "unknown search 'nonsense': choose one of "  # also of installed plug-ins
    decoders = "unknown decoder 'nonsense': choose one of "
    messages = [searches, "unknown generator ", "unknown evaluator ", decoders, decoders]
    messages = [*messages, *messages, "unknown task 'nonsense'", searches, searches]
    lines = [line.removeprefix("tot: ") for line in err.splitlines()]
    assert [line[: len(wanted)] for line, wanted in zip(lines, messages, strict=True)] == messages
    assert out == "False\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory for 77,500,032 bytes"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("can't start new thread"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        ImportError("libtorch.so: failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_missing_memory_is_one_line_with_a_remedy(
    tot: Any, refused: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("tot.api.run_search", fails)
    message = refused(tot("solve", "gsm8k", "q"))
    assert message.startswith(f"there is not enough memory ({reason(error)}): ")
    assert message.endswith("raise its limit (ulimit -v), or use a smaller model or --kv-budget")


def test_another_error_of_the_program_is_not_hidden(tot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("tot.api.run_search", fails)
    with pytest.raises(RuntimeError, match="a bug"):
        tot("solve", "gsm8k", "q")
