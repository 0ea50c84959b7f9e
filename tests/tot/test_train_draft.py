"""`tot train-draft` on a tiny target: its output, the gain of the draft, and resuming."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from filelock import FileLock

from tot.cli.app import main
from tot.decoders import OptionError, Request, Sampling, list_models, load_decoder
from tot.decoders.models.model_names import draft_folder
from tot.decoders.training.distill.record import load, save
from tot.decoders.training.distill.train import train
from tot.registry import load_task
from tot.training import train_draft
from tot.training.train_draft import TOGETHER

pytestmark = pytest.mark.training

TASK = """
from tot import Task

class Riddle(Task):
    templates = {
        "thought": "Riddle: {{ question }}{% for thought in thoughts %} {{ thought.thought }}{% endfor %}\\nAn idea:",
        "value": "Riddle: {{ question }} {{ thoughts[-1].thought }}\\nHow good, from 1 to 10?",
        "answer": "Riddle: {{ question }} {{ thoughts[-1].thought }}\\nAnswer:",
    }
    depth = 2
    sampling = {name: {"max_tokens": 8} for name in templates}
"""
QUESTIONS = ["What has keys but opens no lock?", "What gets wetter as it dries?", "What has hands and no arms?"]

Tot = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def target(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model."""
    folder = tmp_path_factory.mktemp("target")
    with tiny() as decoder:
        pass  # closing the decoder restores the model's own attention
    decoder.model.save_pretrained(folder)
    decoder.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _small_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a small key-value store: the default of a million tokens takes a second to allocate."""
    monkeypatch.setattr("tot.decoders.engine.runner.MOST_TOKENS", 3000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def riddles(tmp_path: Path) -> str:
    """TASK=FILE."""
    (tmp_path / "riddle.py").write_text(TASK)
    lines = [json.dumps({"question": question}) for question in QUESTIONS]
    (tmp_path / "riddles.jsonl").write_text("\n".join(lines))
    return f"{tmp_path / 'riddle.py'}:Riddle={tmp_path / 'riddles.jsonl'}"


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"The sum of {i} and {i + 1} is {2 * i + 1}." for i in range(30)))
    return str(path)


@pytest.fixture
def tot(capfd: pytest.CaptureFixture[str], cache: Path, target: Path) -> Tot:
    """Train a small draft for the target; return the status, standard output and standard error."""

    def run(*arguments: str, tokens: int = 500) -> tuple[int, str, str]:
        small = ("--model", str(target), "--tokens", str(tokens), "--layers", "1", "--width", "64", "--epochs", "1")
        status = main(["train-draft", *small, *arguments])
        out, err = capfd.readouterr()
        return status, " ".join(out.split()), " ".join(err.split())

    return run


# -- a draft ---------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_draft_is_trained_found_and_useful(
    tot: Tot, target: Path, riddles: str, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = tot("--questions", riddles, "--text", text)
    folder = draft_folder(str(target))
    assert status == 0
    assert f"{folder}: " in out
    assert "parameters" in out
    assert not (folder / ".training").exists()

    report = json.loads((folder / "report.json").read_text())
    assert (report["model"], report["questions"], report["text"]) == (str(target), [riddles], [text])
    assert (report["tokens"], report["layers"], report["width"], report["epochs"]) == (500, [1], 64, 1.0)
    assert report["recorded"] >= 500
    assert report["parameters"] > 64 * 64
    assert len(report["agreement"]) == report["steps"] == 4
    for one in report["agreement"]:
        assert 0 <= one["greedy"] <= 1
        assert 0 < one["overlap"] <= 1.01

    sampling = Sampling(max_tokens=40, temperature=0.7, ignore_eos=True, n=2)
    requests = [Request(prompt=question, sampling=sampling) for question in QUESTIONS]
    own = {"dtype": "fp32", "kv_budget": 3000}
    with load_decoder("ar", target, **own) as reference:
        expected = [completion.tokens for completion in reference.generate(requests)]
    with load_decoder("sd", target, draft="trained", **own) as decoder:
        got = decoder.generate(requests)
    assert [completion.tokens for completion in got] == expected
    assert all(completion.usage.drafted > 0 for completion in got)

    (entry,) = [entry for entry in list_models() if entry.kind == "trained draft"]
    assert (entry.name, entry.where, entry.note) == (str(folder), folder, f"for {target}")
    assert entry.size == (folder / "model.safetensors").stat().st_size
    assert main(["models"]) == 0
    listed = capfd.readouterr().out
    assert any("trained draft" in line and str(target) in line for line in listed.splitlines())


def test_a_missing_draft_error_names_the_training_command(cache: Path, target: Path) -> None:
    with pytest.raises(OptionError, match=r"no draft was trained for .*: run `tot train-draft`"):
        load_decoder("sd", target, draft="trained", kv_budget=500)


@pytest.mark.parametrize("sources", ["questions", "text"])
def test_questions_or_texts_alone_suffice(tot: Tot, tmp_path: Path, riddles: str, text: str, sources: str) -> None:
    out = tmp_path / "draft"
    status, _, err = tot(f"--{sources}", riddles if sources == "questions" else text, "--out", str(out))
    assert (status, err) == (0, "")
    report = json.loads((out / "report.json").read_text())
    assert report["recorded"] >= 500
    assert (out / "model.safetensors").exists()


def test_equal_seeds_give_equal_drafts(tot: Tot, tmp_path: Path, text: str) -> None:
    weights = []
    for name in ("one", "two"):
        assert tot("--text", text, "--out", str(tmp_path / name))[0] == 0
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


# -- errors ----------------------------------------------------------------------------------------


def test_missing_training_data_is_an_error(tot: Tot) -> None:
    status, _, err = tot()
    assert status == 2
    assert err == "tot: there is no training data: give --questions gsm8k=FILE, or --text FILE, or both"


def write(path: Path, content: str) -> str:
    path.write_text(content)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda folder: ("--questions", "gsm8k"), "--questions 'gsm8k' can't be read: write TASK=FILE"),
        (lambda folder: ("--questions", "gsm9k=x.jsonl"), "gsm9k"),
        (lambda folder: ("--questions", "gsm8k=nowhere.jsonl"), "nowhere.jsonl: there is no such file"),
        (lambda folder: ("--questions", "gsm8k=nowhere.docx"), "nowhere.docx: "),
        (lambda folder: ("--text", "nowhere.txt"), "nowhere.txt: there is no such file"),
        (lambda folder: ("--text", write(folder / "empty.txt", "")), "empty.txt has no rows: give a file of texts"),
        (
            lambda folder: ("--questions", "gsm8k=" + write(folder / "empty.csv", "question,answer\n")),
            "empty.csv has no rows: give a file of gsm8k questions",
        ),
        (
            lambda folder: ("--questions", "gsm8k=" + write(folder / "other.jsonl", '{"riddle": "?"}')),
            "other.jsonl has a row without 'question' (it has riddle): give a file of gsm8k questions",
        ),
        (lambda folder: ("--text", write(folder / "a.txt", "a b"), "--width", "2"), "'--width': Input should be"),
        (
            lambda folder: ("--text", write(folder / "a.txt", "a b"), "--layers", "99"),
            "the target has no layer 99: give",
        ),
        (lambda folder: ("--text", write(folder / "a.txt", "a b"), "--model", "nothing"), "unknown model 'nothing'"),
    ],
)
def test_invalid_input_is_a_one_line_error(
    tot: Tot, tmp_path: Path, cache: Path, arguments: Callable[[Path], tuple[str, ...]], message: str
) -> None:
    status, _, err = tot(*arguments(tmp_path))
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert not list(cache.glob("drafts/*/config.json"))


def test_texts_of_single_tokens_are_rejected(tot: Tot, tmp_path: Path) -> None:
    status, _, err = tot("--text", write(tmp_path / "a.txt", "a\nb\nc"))
    assert status == 2
    assert "no tokens were recorded: give texts" in err


def test_texts_too_short_to_train_on_are_left_out(tot: Tot, tmp_path: Path) -> None:
    lines = [f"{i} and {i + 1} make {2 * i + 1}, and so on and on" for i in range(32)]
    text = write(tmp_path / "a.txt", "\n".join([*lines, "a b"]))
    assert tot("--text", text, "--out", str(tmp_path / "draft"))[0] == 0


def test_a_folder_with_a_model_is_not_overwritten(tot: Tot, target: Path, text: str) -> None:
    before = sorted((file.name, file.stat().st_mtime_ns) for file in target.iterdir())
    status, _, err = tot("--text", text, "--out", str(target))
    assert status == 2
    assert f"{target} already holds a model: delete it to train again, or give another --out" in err
    assert sorted((file.name, file.stat().st_mtime_ns) for file in target.iterdir()) == before


def test_a_locked_folder_is_rejected(tot: Tot, tmp_path: Path, text: str) -> None:
    out = tmp_path / "draft"
    (out / ".training").mkdir(parents=True)
    with FileLock(out / ".training" / "lock"):
        status, _, err = tot("--text", text, "--out", str(out))
    assert status == 2
    assert "is in use by another tot train-draft: wait for it, or give --out" in err
    assert tot("--text", text, "--out", str(out))[0] == 0


# -- resuming --------------------------------------------------------------------------------------


def stop_saving_after(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    left = iter(range(files))

    def stopping(*arguments: Any) -> None:
        save(*arguments)
        if next(left, None) == files - 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("tot.training.train_draft.save", stopping)


def contents(work: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(work.glob("texts-*.safetensors"))}


def test_resuming_with_other_settings_is_rejected(
    tot: Tot, tmp_path: Path, riddles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "draft"
    with monkeypatch.context() as patch:
        stop_saving_after(patch, 1)
        assert tot("--questions", riddles, "--out", str(out), tokens=100_000)[0] == 130
    status, _, err = tot("--questions", riddles, "--out", str(out), tokens=700)
    assert status == 2
    assert f"{out / '.training'} was started with tokens=100000, not 700: resume with the same options, or give" in err


def test_an_interrupted_recording_keeps_its_records(
    tot: Tot, tmp_path: Path, riddles: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts and questions are processed again only if they were not recorded."""
    sources = ("--questions", riddles, "--text", text)
    batches: list[int] = []
    ask = train_draft._ask

    async def noted(engine: Any, recorder: Any, batch: Any) -> None:
        batches.extend(seed for seed, _, _ in batch)
        await ask(engine, recorder, batch)

    monkeypatch.setattr("tot.training.train_draft._ask", noted)
    with monkeypatch.context() as patch:
        stop_saving_after(patch, 2)
        assert tot(*sources, "--out", str(tmp_path), tokens=3000)[0] == 130
    before = contents(tmp_path / ".training")
    assert list(before) == ["texts-00000.safetensors", "texts-00001.safetensors"]
    after: dict[str, bytes] = {}

    def spy(written: list[Any], path: Path) -> None:
        save(written, path)
        after.update(contents(path.parent))

    monkeypatch.setattr("tot.training.train_draft.save", spy)
    assert tot(*sources, "--out", str(tmp_path), tokens=3000)[0] == 0
    assert after.items() > before.items()
    assert list(after) == [f"texts-{number:05d}.safetensors" for number in range(len(after))]
    assert batches == list(range(len(batches)))
    assert len(batches) == TOGETHER * (len(after) - 1)
    assert json.loads((tmp_path / "report.json").read_text())["recorded"] >= 3000


def test_interrupted_training_ends_as_uninterrupted(
    tot: Tot, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tot.decoders.training.distill.train._CHECKPOINT_EVERY", 1)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert tot("--text", text, "--out", str(whole))[0] == 0
    with monkeypatch.context() as patch:

        def stopping(draft: Any, records: Any, options: Any, checkpoint: Path, tell: Any) -> None:
            def stop(step: int, steps: int, loss: float) -> None:
                if step == 2:
                    raise KeyboardInterrupt

            train(draft, records, options, checkpoint, stop)

        patch.setattr("tot.training.train_draft.train", stopping)
        assert tot("--text", text, "--out", str(stopped))[0] == 130
    assert (stopped / ".training" / "checkpoint.safetensors").exists()
    assert tot("--text", text, "--out", str(stopped))[0] == 0
    assert (stopped / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_an_interrupted_save_is_repeated(tot: Tot, tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tot.training.train_draft.shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        assert tot("--text", text, "--out", str(tmp_path))[0] == 130
    assert (tmp_path / "config.json").exists()
    assert tot("--text", text, "--out", str(tmp_path))[0] == 0
    assert json.loads((tmp_path / "report.json").read_text())["recorded"] > 0
    assert "already holds a model" in tot("--text", text, "--out", str(tmp_path))[2]


@pytest.mark.processes
def test_a_killed_run_is_resumed(tot: Tot, tmp_path: Path, target: Path, riddles: str, python: Any) -> None:
    """A process is killed while it records; the same command resumes in this process."""
    out = tmp_path / "draft"
    small = ("--model", str(target), "--layers", "1", "--width", "64", "--epochs", "1")
    options = ("--questions", riddles, "--out", str(out), "--seed", "3")
    start = (
        "import sys, tot.cli.app as cli, tot.decoders.engine.runner as r; r.MOST_TOKENS = 3000; cli.main(sys.argv[1:])"
    )
    process = python("-c", start, "train-draft", *small, "--tokens", "4000", *options)
    deadline = time.monotonic() + 60
    while not contents(out / ".training") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = contents(out / ".training")
    assert before
    assert not (out / "model.safetensors").exists()
    recorded_tokens = sum(len(record.top) for name in before for record in load(out / ".training" / name))
    assert tot(*options, tokens=4000)[0] == 0
    assert json.loads((out / "report.json").read_text())["recorded"] >= max(4000, recorded_tokens)


def test_some_breadth_first_searches_evaluate_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluators: list[Any] = []

    async def solved(*_: Any, **options: Any) -> None:
        evaluators.append(options.get("evaluator"))

    monkeypatch.setattr(train_draft, "asolve", solved)
    questions = [(seed, load_task("gsm8k"), "1 + 1?") for seed in range(200)]
    asyncio.run(train_draft._ask(Mock(), Mock(), questions))
    assert evaluators.count(None) == 100
    assert 10 < evaluators.count("value") < 40
    assert evaluators.count("value") + evaluators.count("random") == 100
