"""`tot train`, and the benchmarks `cllm`, `solutions` and `steps`, in sequence on a tiny model; errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main as benchmark
from benchmarks.rationales import scored
from tot.cli.app import main
from tot.decoders.errors import TaskError
from tot.decoders.models.loading import load_model
from tot.evaluation.solutions import solutions

pytestmark = pytest.mark.training

TASK = """
from tot import Task

class Riddle(Task):
    templates = {"chain": "Riddle: {{ question }}\\nThink, then answer:"}
    sampling = {"chain": {"max_tokens": 28, "stop": ("@@",)}}

    def parse_answer(self, text):
        return text[:1] or None

    def score(self, answer, reference):
        return float(reference == "ever")
"""
METHODS = ("ar", "jacobi", "jacobi, whole", "lookahead", "lookahead, whole")
PROMPTS = [f"What comes after {word}?" for word in ("one", "two", "ten", "the end", "all", "noon", "rain", "this")]

Tot = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def base(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    folder = tmp_path_factory.mktemp("base")
    with tiny() as decoder:
        pass  # closing the decoder restores the model's own attention
    decoder.model.save_pretrained(folder)
    decoder.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with the model, a task and its questions; use a small key-value store.

    The default of a million tokens takes a second to allocate.
    """
    monkeypatch.setattr("tot.decoders.engine.runner.MAX_TOKENS", 3000)
    monkeypatch.chdir(tmp_path)
    Path("base").symlink_to(base)
    Path("riddle.py").write_text(TASK)
    Path("riddles.jsonl").write_text(
        "".join(
            json.dumps({"question": prompt, "answer": ("ever", "never")[i % 2], "solution": " ever"}) + "\n"
            for i, prompt in enumerate(PROMPTS)
        )
    )
    Path("others.jsonl").write_text('{"prompt": "one", "other": 1}\n')
    Path("empty.jsonl").write_text("")


@pytest.fixture
def tot(capfd: pytest.CaptureFixture[str]) -> Tot:
    """Run `tot train`, or a benchmark; return the status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        command, *options = arguments
        program, _, name = command.rpartition(" ")
        status = benchmark([name, *options]) if program else main(["train", name, *options])
        out, err = capfd.readouterr()
        return status, out, err

    return run


RIDDLES = ("--questions", "riddle.py:Riddle=riddles.jsonl")
SHORT = ("--max-tokens", "24")


def cells(printed: str) -> list[list[str]]:
    """Return the rows of the printed tables; of each row its first line."""
    rows = ([cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in printed.splitlines() if "│" in line)
    return [row for row in rows if row[0] and row[0] != "whole"]  # the second line of that name


# -- the whole sequence ----------------------------------------------------------------------------


def test_trajectories_are_collected_trained_on_and_evaluated(tot: Tot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cllm.load_model", partial(load_model, dtype="fp32"))
    status, _, err = tot("collect", "--model", "base", "--out", "data", "--n", "5", *SHORT, *RIDDLES)
    assert (status, err) == (0, "")
    assert [path.name[:12] for path in Path("data").glob("*.parquet")] == ["shard-00000-"]
    assert json.loads(Path("data/settings.json").read_text())["model"] == "base"

    options = (
        "--epochs",
        "2",
        "--learning-rate",
        "1e-3",
        "--accumulate",
        "2",
    )
    status, out, err = tot("cllm", "--model", "base", "--data", "data", "--out", "made", *options)
    assert (status, err) == (0, "")
    assert "made: the model, losses.jsonl and losses.png" in out
    assert Path("made/losses.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in Path("made/losses.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 4

    status, out, err = tot("benchmarks cllm", "--model", "made", "--base", "base", "--out", "n.json", *SHORT, *RIDDLES)
    assert (status, err) == (0, "")
    rows = cells(out)
    sides = [f"{model} + {method}" for model in ("base", "made") for method in METHODS]
    assert [row[0].removesuffix(" whole") for row in rows] == [
        *(side.removesuffix(" whole") for side in sides),
        "base",
        "made",
    ]
    assert [rows[0][2][:5], rows[5][3][:5]] == ["1.00x", "1.00x"]
    assert [row[4] for row in rows if row[0].endswith("+ ar")] == ["1.00", "1.00"]
    same = [row[6] for row in rows[:10]]
    assert all(share.startswith("100% (") for share in same[:5])  # in float32 all methods give the same text
    assert len(set(same[5:])) == 1
    assert all(row[5].startswith("50%") for row in rows[:10])

    numbers = json.loads(Path("n.json").read_text())
    cells_of: dict[str, list[Any]] = {name: [] for name in sides}
    for cell in numbers["questions, one at a time"]:
        cells_of[cell["side"]].append(cell)
    for name, found in cells_of.items():
        assert [cell["score"] for cell in found] == [1.0, 0.0] * 4
        assert all(cell["tokens"] == cell["forwards"] for cell in found if name.endswith("+ ar"))
        assert all(cell["tokens"] >= cell["forwards"] for cell in found)
    windows = numbers["windows"]
    assert [cell["side"] for cell in windows].count("made") == len(PROMPTS)
    assert all(cell["tokens"] >= cell["forwards"] for cell in windows)


def test_a_model_is_trained_on_answers_in_parallel_steps(tot: Tot) -> None:
    steps = ("benchmarks steps", "--model", "base", "--questions", "2", "--out", "steps")
    assert tot(*steps)[0] == 0
    written = [path.read_bytes() for path in Path("steps").glob("*.parquet")]
    assert len(written) == 1
    assert tot(*steps)[0] == 0
    assert [path.read_bytes() for path in Path("steps").glob("*.parquet")] == written
    status, out, err = tot("cllm", "--model", "base", "--data", "steps", "--out", "taught", "--ar-weight", "1")
    assert (status, err) == (0, "")
    assert "taught: the model" in out
    losses = [json.loads(line) for line in Path("taught/losses.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    assert all(step["ar"] > step["consistency"] == 0 for step in losses)


# -- questions -------------------------------------------------------------------------------------


def test_questions_are_whole_solutions_of_a_task() -> None:
    Path("gsm8k.jsonl").write_text(
        json.dumps({"question": "Hana reads 24 pages and then 12. How many pages?", "answer": "24 + 12\n#### 36"})
    )
    *riddles, gsm8k = map(scored, solutions(["riddle.py:Riddle=riddles.jsonl", "gsm8k=gsm8k.jsonl"], 100))
    assert len(riddles) == 8
    assert riddles[0].request.prompt[-1].content == f"Riddle: {PROMPTS[0]}\nThink, then answer:"
    assert (riddles[0].request.sampling.max_tokens, riddles[0].request.sampling.stop) == (28, ("@@",))
    assert [riddle.score("x") for riddle in riddles] == [1.0, 0.0] * 4
    assert any("Hana reads 24 pages" in message.content for message in gsm8k.request.prompt)
    assert gsm8k.request.sampling.max_tokens == 100
    assert gsm8k.request.sampling.temperature == 0
    assert [gsm8k.score(gsm8k.parse(text)) for text in ("So it is 36.\n#### 36", "#### 35", "")] == [1.0, 0.0, 0.0]
    assert gsm8k.canonical("36") == gsm8k.canonical("36.0")


def test_a_task_without_a_template_for_whole_solutions_is_rejected() -> None:
    Path("other.py").write_text('from tot import Task\n\nclass Other(Task):\n    templates = {"thought": "x"}\n')
    with pytest.raises(TaskError, match="task Other has no template 'chain': define it in `templates`"):
        next(solutions(["other.py:Other=riddles.jsonl"], 10))


# -- errors ----------------------------------------------------------------------------------------

NOTHING = "there are no questions: give --questions TASK=FILE, with more rows than --offset"
BAD = [
    ((), "questions"),
    (("--questions", "riddle.py:Riddle=empty.jsonl"), NOTHING),
    ((*RIDDLES, "--offset", "8"), NOTHING),
    (("--questions", "gsm8k=riddle.py"), "riddle.py: unknown kind of data set '.py'"),
    (("--questions", "gsm8k"), "--questions 'gsm8k' can't be read: write TASK=FILE, such as gsm8k=train.jsonl"),
    (("--questions", "gsm8k="), "unknown kind of data set ''"),
    (("--questions", "gsm9k=riddles.jsonl"), "unknown task 'gsm9k' (did you mean gsm8k?)"),
    (("--questions", "gsm8k=nowhere.jsonl"), "nowhere.jsonl: there is no such file"),
    (("--questions", "gsm8k=others.jsonl"), "others.jsonl has a row without 'question' (it has prompt, other)"),
    ((*RIDDLES, "--max-tokens", "1"), "--max-tokens"),
    ((*RIDDLES, "--model", "nothing"), "unknown model 'nothing'"),
    ((*RIDDLES, "--n", "500"), "--n"),
]


@pytest.mark.parametrize("command", ["collect", "benchmarks cllm"])
@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_invalid_questions_are_a_one_line_error(
    tot: Tot, command: str, arguments: tuple[str, ...], message: str
) -> None:
    given = () if "--model" in arguments else ("--model", "base")
    rest = ("--out", "data") if command == "collect" else ("--base", "base", "--out", "n.json")
    status, _, err = tot(command, *given, *rest, *arguments)
    assert status == 2
    assert message in " ".join(err.split())
    assert err.count("\n") == 1
    assert not Path("data").exists()
    assert not Path("n.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere"), "nowhere holds no trajectories: give a folder that `tot train collect` wrote"),
        (("--data", "."), ". holds no trajectories: give a folder that `tot train collect` wrote"),
        (("--data", "nowhere", "--learning-rate", "0"), "learning_rate = 0.0: "),
        (("--data", "nowhere", "--model", "nothing"), "unknown model 'nothing'"),
        ((), "--data"),
    ],
)
def test_invalid_training_options_are_a_one_line_error(tot: Tot, arguments: tuple[str, ...], message: str) -> None:
    given = () if "--model" in arguments else ("--model", "base")
    status, _, err = tot("cllm", *given, "--out", "made", *arguments)
    assert status == 2
    assert message in " ".join(err.split())
    assert err.count("\n") == 1
    assert not Path("made").exists()


def test_fine_tuning_starts_on_the_solutions_of_the_rows(tot: Tot) -> None:
    status, _, err = tot("benchmarks solutions", "--model", "base", "--out", "data", *RIDDLES)
    assert (status, err) == (0, "")
    assert tot("cllm", "--model", "base", "--data", "data", "--out", "tuned", "--accumulate", "3")[0] == 0
    losses = [json.loads(line) for line in Path("tuned/losses.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    assert all(line["consistency"] == 0.0 and line["ar"] > 0 for line in losses)
    status, _, err = tot("cllm", "--model", "base", "--data", "data", "--out", "tuned")
    assert status == 2
    assert "already holds a model" in err
