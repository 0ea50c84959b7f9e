"""export() and `tot export`: evaluations as training data for TRL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import (
    BFS,
    ChainOfThought,
    SelfConsistency,
    State,
    Task,
    Thought,
    ThoughtTree,
    TotError,
    Value,
    evaluate,
    export,
)
from tot.decoders.request import Part
from tot.evaluation.export import _labels

TABLE = {
    "grow": ["a", "b"],
    "grow a": ["e", "f"],
    "grow b": ["c", "d"],
    "answer a/e": "no",
    "answer a/f": "no",
    "answer b/c": "yes",
    "answer b/d": "no",
    **dict.fromkeys(("value a", "value b", "value a/e", "value a/f", "value b/c", "value b/d"), "5"),
}
TREE: dict[str, Any] = {"search": BFS(thoughts=2, breadth=2, aggregate="vote"), "evaluator": Value()}
Run = Callable[..., Path]


class Sums(Task):
    """A whole solution ends in its answer."""

    templates: ClassVar = {"thought": "?", "answer": "?", "chain": "add {{ question }}"}

    def parse_answer(self, text: str) -> str | None:
        return text.split()[-1] if " " in text.strip() else None


class Story(Sums):
    """The thoughts and the answer are one message."""

    templates: ClassVar = dict.fromkeys(
        ("thought", "value", "answer"),
        "{% block user %}tell{% endblock %}{% block assistant %}So"
        "{% for one in thoughts %} {{ one.thought }}{% endfor %}{% endblock %}",
    )
    depth = 3


class Broken(Sums):
    def score(self, answer: Any, reference: Any) -> float:
        raise ZeroDivisionError


@pytest.fixture
def run(tmp_path: Path, scripted: Any) -> Run:
    """Evaluate questions with the answer "yes": run("name", task, table, questions, **options)."""

    def evaluated(name: str, task: Any, table: dict[str, Any], questions: Any = ("q",), **options: Any) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"question": one, "answer": "yes"}) + "\n" for one in questions))
        evaluate(task, path, out=tmp_path / name, decoder=scripted(table), **options)
        return tmp_path / name

    return evaluated


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def short(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows of messages as the last texts of each column."""
    return [tuple(messages[-1]["content"] for messages in row.values()) for row in rows]


def test_thoughts_have_the_label_of_the_best_answer_below(letters: Any, run: Run, tmp_path: Path) -> None:
    counts = export([run("runs", letters, TABLE, **TREE)], tmp_path / "out", letters, held_out=0)
    assert counts == {"train/preference.jsonl": 2, "train/sft.jsonl": 3, "train/steps.jsonl": 4}
    train = tmp_path / "out" / "train"
    assert sorted((row["completions"], row["labels"]) for row in lines(train / "steps.jsonl")) == [
        (["a", "e"], [False, False]),
        (["a", "f"], [False, False]),
        (["b", "c"], [True, True]),
        (["b", "d"], [True, False]),
    ]
    assert {row["prompt"] for row in lines(train / "steps.jsonl")} == {"q"}
    assert sorted(short(lines(train / "sft.jsonl"))) == [("answer b/c", "yes"), ("grow", "b"), ("grow b", "c")]
    assert sorted(short(lines(train / "preference.jsonl"))) == [("grow", "b", "a"), ("grow b", "c", "d")]
    assert lines(train / "sft.jsonl")[0] == {
        "prompt": [{"role": "user", "content": "grow"}],
        "completion": [{"role": "assistant", "content": "b"}],
    }


def test_a_merged_thought_labels_all_thoughts_before_it() -> None:
    tree = ThoughtTree(State(question="q"))
    first, second, third = (tree.add(tree.root, Thought(parts={"thought": text})) for text in "abc")
    end = tree.add(first, Thought(parts={"thought": "d"}))
    tree.link(second, end, Thought(parts={"thought": "e"}))
    assert _labels(tree, {end.id: True, third.id: False}) == {0: True, 1: True, 2: True, 3: False, 4: True}
    assert _labels(tree, {end.id: False}) == {0: False, 1: False, 2: False, 4: False}


def test_prompts_that_a_tree_lacks_are_rendered(letters: Any, run: Run, tmp_path: Path) -> None:
    folder = run("runs", letters, TABLE, **TREE)
    export([folder], tmp_path / "before", letters, held_out=0)
    tree = folder / "trees" / "0-0.json"
    data = json.loads(tree.read_text())
    del data["texts"], data["calls"]
    tree.write_text(json.dumps(data))
    export([folder], tmp_path / "after", letters, held_out=0)
    before, after = (lines(tmp_path / name / "train" / "sft.jsonl") for name in ("before", "after"))
    assert after == [row for row in before if row["completion"][0]["content"] != "yes"]  # the answer is no thought
    assert len(after) == 2


@pytest.mark.parametrize("space", ["", " "])
def test_thoughts_of_one_message_are_one_text(space: str, run: Run, tmp_path: Path) -> None:
    table = {"So": [f"{space}x", f"{space}y"], "So x": [" z", " z"], "So y": [" z", " z"]}
    table |= {"So x z": [" yes"], "So y z": [" no"]}
    folder = run("runs", Story, table, search=BFS(thoughts=2, breadth=2, aggregate="vote"), evaluator="random")
    export([folder], tmp_path / "out", Story, held_out=0)
    assert short(lines(tmp_path / "out" / "train" / "sft.jsonl")) == [("tell", "So x z yes")]
    assert short(lines(tmp_path / "out" / "train" / "preference.jsonl")) == [("tell", "So x z yes", "So y z no")]


def test_pairs_hold_each_text_of_a_question_once(run: Run, tmp_path: Path) -> None:
    samples = ["1 yes", "2 no", "1 yes", "2 no", "3 yes"]
    table = {"add q": samples, "add r": ["4 no"] * 5}
    folder = run("runs", Sums, table, ["q", "r", "q"], search=SelfConsistency(samples=5), repeats=2)
    counts = export([folder, folder, Path(f"{folder}/")], tmp_path / "out", Sums, held_out=0)
    assert counts == {"train/preference.jsonl": 1, "train/sft.jsonl": 2}  # whole solutions have no labelled steps
    assert short(lines(tmp_path / "out" / "train" / "sft.jsonl")) == [("add q", "1 yes"), ("add q", "3 yes")]
    assert short(lines(tmp_path / "out" / "train" / "preference.jsonl")) == [("add q", "1 yes", "2 no")]


@pytest.mark.parametrize(("verdict", "right"), [("verified", ["1 9", "2 yes"]), ("examples passed", ["2 yes"])])
def test_a_verified_answer_is_right_if_it_was_verified_as_a_whole(
    verdict: str, right: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sums, "verdict", verdict)
    monkeypatch.setattr(Sums, "verify", lambda self, question, answer: answer == "9")
    folder = run("runs", Sums, {"add q": ["1 9", "2 yes", "3 no"]}, search=SelfConsistency(samples=3))
    export([folder], tmp_path / "out", Sums, held_out=0)
    assert [text for _, text in short(lines(tmp_path / "out" / "train" / "sft.jsonl"))] == right


def test_a_finished_text_without_an_answer_is_wrong(run: Run, tmp_path: Path) -> None:
    folder = run("runs", Sums, {"add q": ["1 yes", "nothing"]}, search=SelfConsistency(samples=2))
    export([folder], tmp_path / "out", Sums, held_out=0)
    assert short(lines(tmp_path / "out" / "train" / "preference.jsonl")) == [("add q", "1 yes", "nothing")]


def test_repeats_of_a_question_make_pairs(run: Run, tmp_path: Path, scripted: Any) -> None:
    texts = iter(["1 yes", "2 no"])

    class Alternating(dict[str, Any]):
        def get(self, prompt: str, default: Any = None) -> Any:
            return next(texts)

    folder = run("runs", Sums, Alternating(), search=ChainOfThought(), repeats=2, concurrency=1)
    export([folder], tmp_path / "out", Sums, held_out=0)
    assert short(lines(tmp_path / "out" / "train" / "preference.jsonl")) == [("add q", "1 yes", "2 no")]


def test_a_question_is_held_out_in_every_run(run: Run, tmp_path: Path) -> None:
    questions = [f"number {i}" for i in range(60)]
    first = run("first", Sums, {f"add {one}": "1 yes" for one in questions}, questions, search="cot")
    later = [f" {one}  " for one in questions[::-1][:30]]
    second = run("second", Sums, {f"add {one.strip()}": "2 yes" for one in later}, later, search="cot")
    counts = export([first, second], tmp_path / "both", Sums, held_out=0.5)
    sides = [
        {prompt for prompt, _ in short(lines(tmp_path / "both" / side / "sft.jsonl"))} for side in ("train", "held_out")
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 60
    assert sum(counts.values()) == 90
    assert 20 <= len(sides[1]) <= 40
    export([second], tmp_path / "alone", Sums, held_out=0.2)
    fewer = {prompt for prompt, _ in short(lines(tmp_path / "alone" / "held_out" / "sft.jsonl"))}
    assert fewer < sides[1]


def test_thinking_is_apart_and_truncated_texts_are_left_out(run: Run, tmp_path: Path, scripted: Any) -> None:
    parts = (Part("thinking", "Hm."), Part("exact", "1 yes"))
    texts = [scripted.completion("1 yes", parts=parts), scripted.completion("2 and yes", reason="length")]
    folder = run("runs", Sums, {"add q": texts}, search=SelfConsistency(samples=2))
    export([folder], tmp_path / "out", Sums, held_out=0)
    (row,) = lines(tmp_path / "out" / "train" / "sft.jsonl")
    assert row["completion"] == [{"role": "assistant", "content": "1 yes", "reasoning_content": "Hm."}]


def test_nothing_is_left_of_an_export_that_fails(run: Run, tmp_path: Path) -> None:
    good, bad = (run(name, Sums, {"add q": "1 yes"}, search="cot") for name in ("good", "bad"))
    (bad / "trees" / "0-0.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TotError, match=r"0-0\.json can't be read .*; restore the file, or leave .*bad out"):
        export([good, bad], tmp_path / "out", Sums)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("task", "text", "options", "message"),
    [
        (Sums, "1 no", {}, "no right text in .*runs: evaluate more questions or samples"),
        (Broken, "1 yes", {}, "no right text in .*runs"),
        (Sums, "1 yes", {"held_out": 1.0}, "held_out is 1.0: give a share"),
        (Sums, "1 yes", {"folders": []}, "0 tasks to export"),
        (Sums, "1 yes", {"out": "runs"}, "runs exists: give another folder"),
        (Sums, "1 yes", {"task": None}, "names the task '.*Sums', which is not installed"),
    ],
)
def test_what_can_not_be_exported(
    task: Any, text: str, options: dict[str, Any], message: str, run: Run, tmp_path: Path
) -> None:
    folder = run("runs", task, {"add q": text}, search="cot")
    options = {"folders": [folder], "task": task, **options, "out": tmp_path / options.get("out", "out")}
    with pytest.raises(TotError, match=message):
        export(**options)
    assert not (tmp_path / "out").exists()


def test_folders_must_be_finished_and_of_one_task(letters: Any, run: Run, tmp_path: Path) -> None:
    first, second = run("a", Sums, {"add q": "1 yes"}, search="cot"), run("b", letters, TABLE, **TREE)
    with pytest.raises(TotError, match=r"2 tasks to export \(.*Letters, .*Sums\): give folders of one task"):
        export([first, second], tmp_path / "out", Sums)
    (first / "results.json").unlink()
    with pytest.raises(TotError, match="a is not finished: continue the evaluation with --resume"):
        export([first], tmp_path / "out", Sums)
    with pytest.raises(TotError, match="is not the folder of an evaluation"):
        export([tmp_path], tmp_path / "out", Sums)


def test_the_command_exports_plans_that_no_model_wrote(tot: Any, tmp_path: Path) -> None:
    problem = """(define (problem p) (:domain blocksworld-4ops) (:objects a b)
(:init (handempty) (ontable a) (on b a) (clear b)) (:goal (and (on a b))))"""
    (tmp_path / "x.jsonl").write_text(json.dumps({"pddl": problem}) + "\n")
    search = ("--model", "none", "--search", "best-first", "--generator", "enumerate:prior=uniform")
    assert tot("eval", "blocksworld", "--data", "x.jsonl", *search, "--out", "runs")[0] == 0
    status, out, err = tot("export", "runs", "--out", "data", "--held-out", "0")
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["data/train/sft.jsonl", "1", "lines"],
        ["data/train/steps.jsonl", "1", "lines"],
    ]
    ((_, plan),) = short(lines(tmp_path / "data" / "train" / "sft.jsonl"))
    (steps,) = lines(tmp_path / "data" / "train" / "steps.jsonl")
    assert all(f" {step}" in plan for step in steps["completions"])
    assert (len(steps["completions"]), steps["labels"]) == (4, [True] * 4)
    status, out, err = tot("export", "runs", "--out", "data")
    assert (status, out, err) == (2, "", "tot: data exists: give another folder\n")
