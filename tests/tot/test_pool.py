"""The samples in an evaluation's folder, and the tables of their measures."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from tot import Task, evaluate
from tot.decoders import Completion, Request, TotError, Usage
from tot.decoders.errors import OptionError, TaskError
from tot.evaluation.pool import pools
from tot.tree.thought import State

VOTE = "self-consistency:samples=4"


class Letter(Task):
    """The answer is the first letter of the text; "b" is half right, and "c" can't be scored."""

    templates: ClassVar = {"thought": "{{ question }}", "chain": "{{ question }}", "other": "other {{ question }}"}
    sampling: ClassVar = {"chain": {"max_tokens": 8}}
    scored: ClassVar[list[str]] = []

    def parse_answer(self, text: str) -> str | None:
        return next((letter.lower() for letter in text if letter.isalpha()), None)

    def score(self, answer: str | None, reference: Any) -> float:
        self.scored.append(f"{answer} {threading.current_thread().name[:7]}")
        if answer == "c":
            raise ZeroDivisionError("c")
        return {reference: 1.0, "b": 0.5}.get(answer, 0.0)


class Drafts(Task):
    """Every thought is a draft, which is an answer by itself."""

    templates: ClassVar[dict[str, str]] = {"thought": "{{ question }}", "answer": "{{ question }}"}
    sampling: ClassVar[dict[str, Any]] = {"thought": {"max_tokens": 4}}

    def answer_at(self, state: State) -> str | None:
        return state.thoughts[-1].text if state.thoughts and state.thoughts[-1].text != "none" else None


class Asked(Task):
    """A solution is one thought, after which the model is asked for the answer."""

    templates: ClassVar = {"thought": "{{ question }}", "answer": "answer {{ thoughts[-1].thought }}"}


class WithLogprobs:
    """A decoder with known texts by prompt, one a sample, and the log-probability of each of their 5 tokens."""

    def __init__(self, replies: dict[str, list[tuple[str, float]]]) -> None:
        self.replies = replies

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [
            Completion(text, (1,) * 5, 5 * logprob, "eos", Usage(new_tokens=5), logprobs=(logprob,) * 5)
            for request in requests
            for text, logprob in self.replies[request.prompt[-1].content][: request.sampling.n]  # type: ignore[union-attr]
        ]


@pytest.fixture
def run(scripted: Any, tmp_path: Path) -> Any:
    """Evaluate questions with the reference "a" into a folder: run("out", {"which?": ["a", "b"]}, search=...)."""

    def evaluated(name: str, replies: Any, task: Any = Letter, search: str = VOTE, **options: Any) -> Path:
        rows = tmp_path / f"{name}.jsonl"
        questions = options.pop("questions", list(replies))
        rows.write_text("".join(json.dumps({"question": text, "answer": "a"}) + "\n" for text in questions))
        decoder = options.pop("decoder", None) or scripted(replies)
        evaluate(task, rows, out=tmp_path / name, decoder=decoder, search=search, **options)
        return tmp_path / name

    return evaluated


def answers(folder: Path, task: Any = Letter) -> list[list[tuple[Any, float]]]:
    return [[(one.answer, one.score) for one in pool] for _, pool in pools(folder, task)]


# -- reading ----------------------------------------------------------------------------------------------------


def test_samples_are_in_the_order_in_which_they_were_drawn(run: Any) -> None:
    decoder = WithLogprobs({"q": [("A", -1.0), ("b", -2.0)], "other q": [("1", -3.0), ("a.", -0.5)]})
    search = f"{VOTE},solutions=chain+other,weighted=true"
    folder = run("out", {}, search=search, questions=["q"], decoder=decoder, evaluator="logprob")
    ((sample, pool),) = pools(folder, Letter)
    assert (sample["id"], sample["question"], sample["answer"]) == ("0-0", "q", "a")
    assert [(one.answer, one.key, one.score, one.source, one.tokens, one.logprob) for one in pool] == [
        ("a", "a", 1.0, "chain", 5, -1.0),
        (None, None, 0.0, "other", 5, -3.0),
        ("b", "b", 0.5, "chain", 5, -2.0),
        ("a", "a", 1.0, "other", 5, -0.5),
    ]
    assert [one.value for one in pool] == pytest.approx([0.36788, 0.04979, 0.13534, 0.60653], abs=1e-5)


def test_each_distinct_answer_is_scored_once_in_the_pool_of_threads(run: Any, caplog: Any) -> None:
    folder = run("out", {"q": ["a", "c", "a", "C"]})
    Letter.scored.clear()
    assert answers(folder) == [[("a", 1.0), ("c", 0.0), ("a", 1.0), ("c", 0.0)]]
    assert sorted(Letter.scored) == ["a sandbox", "c sandbox"]
    assert "sample 0-0: an answer counts as wrong: Letter.score raised ZeroDivisionError" in caplog.text


def test_a_text_that_could_not_be_read_is_a_sample_without_an_answer(run: Any) -> None:
    folder = run("out", {"q": ["a", "", "1", ""], "r": ["", "", "", ""]})
    ((_, pool), (_, empty)) = pools(folder, Letter)
    assert [(one.answer, one.tokens) for one in pool] == [("a", 5), (None, 5), (None, 5), (None, 5)]
    assert [(one.answer, one.score, one.tokens) for one in empty] == [(None, 0.0, 20)]  # the search's result


def test_repeats_of_a_question_are_one_pool(run: Any) -> None:
    folder = run("out", {"q": ["a", "b"], "r": ["b", "b"]}, search="self-consistency:samples=2", repeats=2)
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(lines[i] for i in (3, 1, 2, 0)))  # an unfinished run has no order
    assert [sample["id"] for sample, _ in pools(folder, Letter)] == ["0-0", "1-0"]
    assert answers(folder) == [[("a", 1.0), ("b", 0.5)] * 2, [("b", 0.5)] * 4]


def test_a_search_over_thoughts_is_one_sample(run: Any) -> None:
    options = {"search": "bfs:thoughts=3,breadth=3,depth=2", "task": Drafts, "evaluator": "random"}
    folder = run("out", {"q": ["a", "b", "none"]}, **options)
    ((sample, pool),) = pools(folder, Drafts)
    assert [(one.answer, one.score, one.tokens) for one in pool] == [(sample["answer"], sample["score"], 20)]


def test_only_independent_solutions_that_count_are_samples(run: Any) -> None:
    """Samples of a first model are pruned once a second one has answered; a refined solution is not independent."""
    folder = run("out", {"q": ["a", "b", "b", "a"]})
    path = folder / "trees" / "0-0.json"
    tree = json.loads(path.read_text())
    tree["nodes"][1]["pruned"] = True
    path.write_text(json.dumps(tree))
    assert answers(folder) == [[("b", 0.5), ("b", 0.5), ("a", 1.0)]]
    tree["nodes"][2] |= {"parent": 1, "depth": 2}
    path.write_text(json.dumps(tree))
    assert answers(folder) == [[("a", 1.0)]]


def test_an_answer_that_the_model_was_asked_for_is_read_from_the_tree(run: Any) -> None:
    replies = {"q": ["one", "two"], "answer one": "a", "answer two": "b"}
    folder = run("out", replies, task=Asked, search="self-consistency:samples=2", questions=["q"])
    assert answers(folder, Asked) == [[("a", 1.0), ("b", 0.0)]]


def test_without_trees_the_final_answer_is_the_only_sample(run: Any) -> None:
    folder = run("out", {"q": ["b", "b", "b", "a"]})
    shutil.rmtree(folder / "trees")
    Letter.scored.clear()
    ((_, pool),) = pools(folder, Letter)
    assert [(one.answer, one.score, one.tokens) for one in pool] == [("b", 0.5, 20)]
    assert Letter.scored == []


def test_a_missing_or_damaged_tree_is_named_with_a_remedy(run: Any) -> None:
    folder = run("out", {"q": ["a"] * 4, "r": ["a"] * 4})
    tree = folder / "trees" / "1-0.json"
    for text in (tree.read_text()[:100], None):
        tree.unlink() if text is None else tree.write_text(text)
        with pytest.raises(TaskError, match=r"1-0\.json can't be read as JSON: .*; delete the line of 1-0 in samples"):
            next(pools(folder, Letter))


def test_a_failed_search_has_the_samples_of_its_tree_or_none(run: Any) -> None:
    folder = run("out", {"q": ["c", "c", "a", "c"], "r": ["a"] * 4})  # the vote of the first can't be scored
    assert [sample["error"] is None for sample, _ in pools(folder, Letter)] == [False, True]
    (folder / "trees" / "1-0.json").rename(folder / "trees" / "0-0.json")
    lines = (folder / "samples.jsonl").read_text().splitlines()
    failed = [json.dumps({**json.loads(line), "error": "OSError: x"}) + "\n" for line in lines]
    (folder / "samples.jsonl").write_text("".join(failed))
    assert answers(folder) == [[("a", 1.0)] * 4, []]


def test_a_task_that_a_folder_names_is_not_run(run: Any, tmp_path: Path) -> None:
    folder = run("out", {"q": ["a"] * 4})
    with pytest.raises(OptionError, match=r"names the task '.*:Letter', which is not installed, so it is not run"):
        next(pools(folder))
    with pytest.raises(TotError, match=r"is not the folder of an evaluation"):
        next(pools(tmp_path))


# -- tables -----------------------------------------------------------------------------------------------------

NUMBERS = {"Ada": "1121", "Bo": "5223", "Cy": "3333"}
"""The answers of four samples by question; 1, 2 and 3 are right."""


class Numbers:
    """A decoder that answers questions about the names with their numbers, in 5 tokens."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [
            Completion(f"It is.\n\n#### {number}", (), 0.0, "eos", Usage(new_tokens=5))
            for request in requests
            for number in next(some for name, some in NUMBERS.items() if name in str(request.prompt))[
                : request.sampling.n
            ]
        ]


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Write evaluations of three questions: "plain" has one answer of each, and "votes" four samples."""
    monkeypatch.setenv("COLUMNS", "160")
    rows = [{"question": f"{name} is?", "answer": f"#### {i}"} for i, name in enumerate(NUMBERS, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, search in (("plain", "cot"), ("votes", VOTE)):
        options: dict[str, Any] = {"search": search, "prompts": "chat", "decoder": Numbers()}
        evaluate("gsm8k", tmp_path / "rows.jsonl", out=tmp_path / name, **options)
    return tmp_path


def cells(out: str, name: str) -> list[str]:
    """Return the cells of the row with this name."""
    rows = [[cell.strip() for cell in re.split("[│┃]", line)] for line in out.splitlines()]
    (row,) = (row for row in rows if row[1:2] == [name])
    return row[2:-1]


@pytest.mark.usefixtures("folders")
def test_measures_follow_the_comparison(tot: Any) -> None:
    """Plainly, 2 of 3 are right, and of the samples 3/4, 2/4 and 4/4."""
    status, out, err = tot("eval", "--compare", "plain", "votes")
    assert (status, err) == (0, "")
    assert cells(out, "plain")[0].startswith("66.7% (20.8% to 93.9%)")
    assert "plain: 3 questions" not in out
    assert "votes: 3 questions, 4 samples each" in out
    assert [cells(out, name)[0][:5] for name in ("maj@1", "maj@4", "pass@1", "pass@2")] == [
        "75.0%",
        "100.0",
        "75.0%",
        "94.4%",  # the second question has no right sample in 1 of 6 pairs
    ]
    assert cells(out, "pass^4") == ["33.3% (6.1% to 79.2%)", "-33.3% (-85.6% to +45.6%)", "20", cells(out, "maj@4")[3]]
    assert [cells(out, name)[2] for name in ("maj@1", "maj@2", "until 0.95")] == [
        "5",
        "10",
        "20",
    ]  # by the general calibration, four equal votes are not sure
    assert [bool(cells(out, name)[3]) for name in ("maj@2", "maj@4", "until 0.95")] == [False, True, False]
    assert "weighted@" not in out  # neither values nor log-probabilities are known
    assert "best@" not in out


@pytest.mark.usefixtures("folders")
def test_one_folder_is_compared_with_its_own_score(tot: Any) -> None:
    for arguments in (["votes"], ["votes", "./votes"]):
        status, out, err = tot("eval", "--compare", *arguments)
        assert (status, err) == (0, "")
        assert (cells(out, "maj@4")[1], cells(out, "maj@1")[1][:6]) == ("+0.0% (-55.4% to +55.4%)", "-25.0%")
        assert "what differs" not in out
    status, out, err = tot("eval", "--compare", "plain")
    assert (status, out) == (2, "")
    assert err == (
        "tot: plain has one sample a question: name another folder to compare it with, or evaluate with --search "
        "self-consistency:samples=8 or --repeats 8\n"
    )


def test_a_killed_run_counts_its_finished_questions(tot: Any, folders: Path) -> None:
    lines = (folders / "votes" / "samples.jsonl").read_text().splitlines(keepends=True)
    (folders / "votes" / "samples.jsonl").write_text(lines[2] + lines[0] + lines[1][:40])
    status, out, _ = tot("eval", "--compare", "plain", "votes")
    assert (status, cells(out, "maj@1")[0][:5]) == (0, "87.5%")
    assert "votes: 2 questions, 4 samples each" in out
    (folders / "votes" / "trees" / "2-0.json").unlink()
    status, out, err = tot("eval", "--compare", "plain", "votes")
    assert (status, "common questions: 2" in out) == (2, True)
    assert "votes/trees/2-0.json can't be read as JSON" in err


def test_questions_with_fewer_samples_are_counted_in_the_caption(tot: Any, folders: Path) -> None:
    path = folders / "votes" / "trees" / "2-0.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "nodes": tree["nodes"][:3], "calls": {}}))
    _, out, _ = tot("eval", "--compare", "votes")
    assert "1 questions have fewer samples, and count with all of them" in out
    assert [cells(out, name)[2] for name in ("maj@2", "maj@4")] == ["10", "17"]


def test_a_task_from_a_file_is_named_on_the_command_line(tot: Any, folders: Path) -> None:
    (folders / "mine.py").write_text("from tot.tasks import GSM8K\n\nclass Mine(GSM8K):\n    pass\n")
    for name in ("plain", "votes"):
        path = folders / name / "config.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "task": "mine.py:Mine"}))
    status, out, err = tot("eval", "--compare", "plain", "votes")
    assert (status, "maj@" in out, "common questions: 3" in out) == (0, False, True)
    assert re.match(r"tot: no measures of samples: votes/config\.yaml names the task 'mine\.py:Mine', which", err)
    assert tot("eval", "--compare", "votes")[0] == 2
    status, out, err = tot("eval", "--compare", "plain", "votes", "--task", "mine.py:Mine")
    assert (status, cells(out, "maj@1")[0][:5], err) == (0, "75.0%", "")
