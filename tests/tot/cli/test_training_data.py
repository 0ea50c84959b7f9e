"""Training data from trees: the rows of each format, how right was decided, and what trl and datasets accept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tot import BFS, Continue, Propose, SelfConsistency, Task, Thought, ThoughtTree, evaluate, solve
from tot.decoders.request import Part
from tot.tree.calls import Call

FORMATS = ("sft", "preferences", "steps")
GROWN = {"grow": ["a", "b"], "grow a": ["e", "f"], "grow b": ["c", "d"], "answer b/d": "4", "answer b/c": "5"}
"""Two levels of thoughts; the answer is right after b and d only."""
WHOLE: dict[str, Any] = {
    "search": BFS(thoughts=2, breadth=4, select="all", aggregate="majority"),
    "evaluator": "random",
}
MESSAGE = (
    "{% block user %}{{ question }}{% endblock %}{% block assistant %}"
    "{% for t in thoughts %}{{ t.step }}{% endfor %}{{ step | default('') }}{% endblock %}"
)


class Message(Task):
    """One message, in pieces; the answer is its last word."""

    thought = ("step",)
    depth = 3
    templates: ClassVar = {"step": MESSAGE, "chain": MESSAGE}

    def parse_answer(self, text: str) -> str | None:
        return text.split()[-1]

    def verify(self, question: str, answer: Any) -> bool:
        return bool(answer == "7.")


@pytest.fixture
def rows(tot: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Export runs with `tot report`, and read the rows."""

    def export(form: str, *runs: Path | str) -> list[dict[str, Any]]:
        task = ("--task", f"{tmp_path}/tasks.py:Letters")
        status, out, err = tot("report", *map(str, runs), "--format", form, "--out", "data.jsonl", *task)
        assert (status, err) == (0, "")
        lines = (tmp_path / "data.jsonl").read_text().removesuffix("\n").split("\n")
        assert f", rows: {len(lines)}, trees: " in out
        return [json.loads(line) for line in lines]

    return export


@pytest.fixture
def evaluated(letters: Any, scripted: Any, tmp_path: Path) -> Path:
    """The folder of an evaluation of two questions, whose references are 4 and 9."""
    (tmp_path / "q.jsonl").write_text('{"question": "x", "answer": "4"}\n{"question": "y", "answer": "9"}\n')
    (tmp_path / "tasks.py").write_text(
        f"from tot import Task\nclass Letters(Task):\n    templates = {dict(letters.templates)!r}\n    depth = 3\n"
    )
    evaluate(
        f"{tmp_path}/tasks.py:Letters", tmp_path / "q.jsonl", decoder=scripted(GROWN), out=tmp_path / "runs", **WHOLE
    )
    return tmp_path / "runs"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def ids(tree: ThoughtTree) -> dict[str, int]:
    return {node.thought.text: node.id for node in tree if node.thought}


# -- rows ---------------------------------------------------------------------------------------------------------


def test_right_replies_are_conversations_with_the_prompts_that_the_model_got(rows: Any, evaluated: Path) -> None:
    found = rows("sft", evaluated)
    number = ids(ThoughtTree.load(evaluated / "trees" / "0-0.json"))
    b, d = number["b"], number["d"]
    assert [(row["prompt"], row["completion"], row["provenance"]["nodes"]) for row in found] == [
        (user("grow"), said("b"), [b]),
        (user("grow b"), said("d"), [d]),
        (user("answer b/d"), said("4"), [d]),
    ]
    about = {"question": "0", "tree": str(evaluated / "trees" / "0-0.json"), "right": "reference", "nodes": [b]}
    task = f"{evaluated.parent}/tasks.py:Letters"
    assert found[0]["provenance"] == {"task": task, "model": "none", **about}


def test_preferences_pair_a_right_and_a_wrong_reply_to_one_prompt(rows: Any, evaluated: Path) -> None:
    found = rows("preferences", evaluated)
    number = ids(ThoughtTree.load(evaluated / "trees" / "0-0.json"))
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in found] == [
        (user("grow"), said("b"), said("a")),
        (user("grow b"), said("d"), said("c")),
    ]
    nodes = [(row["provenance"]["nodes"], row["provenance"]["rejected_nodes"]) for row in found]
    assert nodes == [([number["b"]], [number["a"]]), ([number["d"]], [number["c"]])]


def test_a_step_is_right_if_a_right_solution_follows_it(rows: Any, evaluated: Path) -> None:
    found = rows("steps", evaluated)
    labels = {(row["prompt"], *row["completions"]): row["labels"] for row in found}
    assert labels == {
        ("x", "a", "e"): [False, False],
        ("x", "a", "f"): [False, False],
        ("x", "b", "c"): [True, False],
        ("x", "b", "d"): [True, True],
        **{("y", *path): [False, False] for path in ("ae", "af", "bc", "bd")},
    }


def test_pieces_of_a_message_are_one_reply(rows: Any, scripted: Any, tmp_path: Path) -> None:
    stop = scripted.completion
    decoder = scripted(
        {
            "why": [stop("Step 1:\n\n", "stop"), stop("No.\n\n", "stop")],
            "Step 1:\n\n": stop("Yes.\n\n", "stop"),
            "Step 1:\n\nYes.\n\n": ["So 7.", "So 8."],
            "No.\n\n": ["So 9.", "So 9."],
        }
    )
    search = BFS(thoughts=2, breadth=4, select="all", aggregate="majority")
    tree = solve(
        Message(), "why", decoder=decoder, search=search, generator=Continue(temperature=1.0), evaluator="random"
    ).tree
    tree.save(tmp_path / "tree.json")
    (sft,) = rows("sft", "tree.json")
    assert (sft["prompt"], sft["completion"]) == (user("why"), said("Step 1:\n\nYes.\n\nSo 7."))
    pairs = rows("preferences", "tree.json")
    assert {row["chosen"][0]["content"] for row in pairs} == {"Step 1:\n\nYes.\n\nSo 7."}
    assert {row["rejected"][0]["content"] for row in pairs} == {"Step 1:\n\nYes.\n\nSo 8.", "No.\n\nSo 9."}
    steps = {tuple(row["completions"]): row["labels"] for row in rows("steps", "tree.json")}
    assert steps == {
        ("Step 1:\n\nYes.", "So 7."): [True, True],
        ("Step 1:\n\nYes.", "So 8."): [True, False],
        ("No.", "So 9."): [False, False],
    }
    assert sft["provenance"]["right"] == "verified"


def test_a_reply_is_the_text_that_a_model_sampled_in_pieces(rows: Any, tiny: Any, tmp_path: Path) -> None:
    class Sampled(Message):
        depth = 4

        def answer_at(self, state: Any) -> str | None:
            return state.message[-1] if len(state.thoughts) == 3 else None

        def verify(self, question: str, answer: Any) -> bool:
            return ord(answer) % 2 == 0

    search = BFS(thoughts=2, breadth=8, select="all", aggregate="majority")
    options: dict[str, Any] = {"generator": Continue(temperature=1.0, tokens=6), "evaluator": "random"}
    tree = solve(Sampled(), "why", decoder=tiny(), search=search, **options).tree
    tree.save(tmp_path / "tree.json")
    ends = [node for node in tree if node.depth == 3]
    written = {
        verified: {tree.state(one).message.strip() for one in ends if one.verified == verified}
        for verified in (True, False)
    }
    found = rows("preferences", "tree.json")
    assert {row["chosen"][0]["content"] for row in found} == written[True] != set()
    assert {row["rejected"][0]["content"] for row in found} == written[False] != set()
    assert {tuple(row["provenance"]["nodes"]) for row in found} == {
        tuple(one.id for one in tree.path(end)[1:]) for end in ends if end.verified
    }


def test_whole_solutions_are_paired_and_equal_ones_are_one_row(rows: Any, scripted: Any, tmp_path: Path) -> None:
    decoder = scripted({"why": ["So 7.", "So 8.", "So 7.", "So 9.", "So 6."]})
    search = SelfConsistency(samples=5, solutions=("chain",))
    solve(Message(), "why", decoder=decoder, search=search, until=None).tree.save(tmp_path / "tree.json")
    found = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows("preferences", "tree.json")]
    assert sorted(found) == [("So 7.", "So 6."), ("So 7.", "So 8."), ("So 7.", "So 9.")]
    assert len(rows("sft", "tree.json")) == 1


def test_listed_and_ranked_thoughts_are_replies_of_their_own(
    rows: Any, letters: Any, scripted: Any, tmp_path: Path
) -> None:
    class Listed(letters):  # type: ignore[misc]
        templates = letters.templates | {"propose": "list"}
        depth = 2

        def answer_at(self, state: Any) -> str | None:
            return state.thoughts[-1].text if state.thoughts else None

        def verify(self, question: str, answer: Any) -> bool:
            return bool(answer == "b")

        def is_terminal(self, state: Any) -> bool:
            return bool(state.thoughts)

    search = BFS(thoughts=2, breadth=2)
    options: dict[str, Any] = {"search": search, "generator": Propose(), "evaluator": "random"}
    solve(Listed, "Q", decoder=scripted({"list": "1. a\n2. b"}), **options).tree.save(tmp_path / "tree.json")
    (pair,) = rows("preferences", "tree.json")
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == (user("list"), said("b"), said("a"))


def test_only_what_was_solved_by_the_command_line_names_task_and_model(rows: Any, tot: Any, tmp_path: Path) -> None:
    unguided = ["--model", "none", "--generator", "enumerate:prior=random", "--evaluator", "random"]
    assert tot("solve", "game24", "1 1 4 8", *unguided, "--out", "run.json")[0] == 0
    found = rows("steps", "run.json")
    assert {row["prompt"] for row in found} == {"1 1 4 8"}
    assert any(all(row["labels"]) for row in found)
    about = {name: found[0]["provenance"][name] for name in ("task", "model", "question", "tree", "right")}
    assert about == {"task": "game24", "model": "none", "question": "run", "tree": "run.json", "right": "verified"}


def test_an_answer_without_thoughts_is_a_reply_without_steps(rows: Any, refused: Any, tot: Any, tmp_path: Path) -> None:
    tree = verified("x")
    call = tree.calls[1][0].model_copy(update={"purpose": "answer", "template": "answer"})
    only = ThoughtTree(tree.state(tree.root))
    only.root.terminal = only.root.verified = True
    only.asked({0: [call]})
    only.save(tmp_path / "tree.json")
    (row,) = rows("sft", "tree.json")
    assert (row["completion"], row["provenance"]["nodes"]) == (said("x"), [0])
    assert "no row" in refused(tot("report", "tree.json", "--format", "steps", "--out", "data.jsonl"))


def test_a_reply_with_guessed_tokens_is_left_out(tot: Any, refused: Any, tmp_path: Path) -> None:
    tree = verified("x")
    tree.calls[1] = [tree.calls[1][0].model_copy(update={"parts": (Part("approximate", "x", 1),)})]
    tree.save(tmp_path / "tree.json")
    assert "no row" in refused(tot("report", "tree.json", "--format", "sft", "--out", "data.jsonl"))


def test_text_of_a_tree_stays_text(rows: Any, tmp_path: Path) -> None:
    text = '"}\n{"prompt": "\u2028 \0 <|im_end|> \ud800'
    tree = ThoughtTree.from_json(verified("x").to_json())
    tree[1].thought = Thought(parts={"thought": text})
    tree.calls[1] = [tree.calls[1][0].model_copy(update={"output": text})]
    tree.save(tmp_path / "tree.json")
    (row,) = rows("sft", "tree.json")
    assert row["completion"] == said(text.replace("\ud800", "?"))


# -- unjudged trees and bad input ---------------------------------------------------------------------------------


def verified(text: str, right: bool = True) -> ThoughtTree:
    """A tree with one thought and its call."""
    from tot import State
    from tot.decoders import Message

    tree = ThoughtTree(State(question="q"))
    node = tree.add(tree.root, Thought(parts={"thought": text}), terminal=True, verified=right)
    call = Call(purpose="generate", template="thought", prompt=(Message(role="user", content="q?"),), output=text)
    tree.asked({node.id: [call]})
    return tree


@pytest.mark.parametrize("form", FORMATS)
def test_an_unverified_tree_gives_no_row_and_no_file(tot: Any, refused: Any, tmp_path: Path, form: str) -> None:
    verified("x", right=False).save(tmp_path / "tree.json")
    (tmp_path / "data.jsonl").write_text("before")
    message = refused(tot("report", "tree.json", "--format", form, "--out", "data.jsonl"))
    counts = "rows: 0, trees: 1, without a verified or scored solution: 1"
    assert message.startswith(f"no row of format {form} ({counts}): give a folder of `tot eval`, ")
    assert (tmp_path / "data.jsonl").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"tree.json", "data.jsonl"}


def test_each_run_gets_its_page(tot: Any, tmp_path: Path) -> None:
    verified("x").save(tmp_path / "a.json")
    verified("y").save(tmp_path / "b.json")
    assert tot("report", "a.json", "b.json") == (0, "report: a.html\nreport: b.html\n", "")
    assert all("<html" in (tmp_path / page).read_text() for page in ("a.html", "b.html"))


def test_unverified_trees_are_skipped_and_counted(tot: Any, tmp_path: Path) -> None:
    verified("x").save(tmp_path / "a.json")
    verified("y", right=False).save(tmp_path / "b.json")
    status, out, _ = tot("report", "a.json", "b.json", "--format", "sft", "--out", "data.jsonl")
    counts = "rows: 1, trees: 2, without a verified or scored solution: 1"
    assert (status, out) == (0, f"report: data.jsonl, {counts}\n")


def test_a_score_between_0_and_1_is_neither_right_nor_wrong(
    tot: Any, refused: Any, evaluated: Path, tmp_path: Path
) -> None:
    task = tmp_path / "tasks.py"
    task.write_text(task.read_text() + "    def score(self, answer, reference):\n        return 0.5\n")
    named = ("--task", f"{task}:Letters")
    message = refused(tot("report", str(evaluated), "--format", "steps", "--out", "data.jsonl", *named))
    assert "(rows: 0, trees: 2, without a verified or scored solution: 2)" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a.json", "--format", "dpo", "--out", "d.jsonl"), "'dpo' is not one of 'sft', 'preferences', 'steps'"),
        (("a.json", "--format", "sft"), "--format sft writes JSON lines, not a page: give --out FILE.jsonl"),
        (("a.json", "--format", "sft", "--out", "d.html"), "not d.html: give --out FILE.jsonl"),
        (
            ("a.json", "a.json", "--out", "x.html"),
            "--out x.html is for one run, not 2: leave --out out, or give one run",
        ),
        (("a.json", "b.json", "--format", "sft", "--out", "d.jsonl"), "b.json does not exist"),
        (("a.json", "bad.json", "--format", "sft", "--out", "d.jsonl"), "bad.json can't be read as JSON"),
        (("a.json", ".", "--format", "sft", "--out", "d.jsonl"), ". is not the folder of an evaluation"),
        (("a.json", "--format", "sft", "--out", "no/d.jsonl"), "no/d.jsonl can't be written"),
    ],
)
def test_bad_input_is_refused_and_leaves_no_file(
    tot: Any, refused: Any, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    verified("x").save(tmp_path / "a.json")
    (tmp_path / "bad.json").write_text('{"format"')
    assert message in refused(tot("report", *arguments))
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "bad.json"}


def test_a_damaged_tree_of_an_evaluation_is_named(tot: Any, refused: Any, evaluated: Path) -> None:
    (evaluated / "trees" / "1-0.json").write_text('{"format"')
    message = refused(
        tot(
            "report",
            str(evaluated),
            "--format",
            "sft",
            "--out",
            "data.jsonl",
            "--task",
            f"{evaluated.parent}/tasks.py:Letters",
        )
    )
    assert "1-0.json can't be read as JSON" in message
    assert not (evaluated.parent / "data.jsonl").exists()


# -- consumers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_datasets_loads_every_format(rows: Any, evaluated: Path, tmp_path: Path, form: str) -> None:
    from datasets import load_dataset

    verified("x").save(tmp_path / "tree.json")
    written = rows(form, evaluated, "tree.json")
    loaded = load_dataset("json", data_files=str(tmp_path / "data.jsonl"), cache_dir=str(tmp_path / "cache"))["train"]
    assert loaded.to_list() == written


@pytest.mark.training
def test_trl_trains_on_conversations_and_preferences(rows: Any, evaluated: Path, tmp_path: Path, tiny: Any) -> None:
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    found = {form: Dataset.from_list(rows(form, evaluated)) for form in FORMATS}
    decoder = tiny()
    decoder.close()
    decoder.engine.loaded.model.save_pretrained(tmp_path / "model")
    decoder.engine.loaded.tokenizer.save_pretrained(tmp_path / "model")
    kinds: Any = {"sft": (SFTTrainer, SFTConfig), "preferences": (DPOTrainer, DPOConfig)}
    for form, (trainer, config) in kinds.items():
        options = config(output_dir=str(tmp_path / form), max_steps=1, report_to=[], use_cpu=True, bf16=False)
        trained = trainer(model=str(tmp_path / "model"), args=options, train_dataset=found[form]).train()
        assert trained.training_loss > 0
