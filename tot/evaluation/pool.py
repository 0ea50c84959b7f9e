"""The samples of an evaluation: every whole solution that its searches drew, with its answer and its score."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from statistics import fmean
from typing import Any

from tot.config import SearchConfig
from tot.decoders.errors import OptionError, TaskError
from tot.decoders.models.loading import open_model
from tot.evaluation.folder import read_config, read_samples
from tot.evaluation.results import tokens_of
from tot.llm.decoders import identity_of
from tot.registry import load_task, refuse_code
from tot.sandbox import pool
from tot.search.calibration import Calibration, calibrations_for, general
from tot.search.votes import source_of
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.task.world import HasScores
from tot.tree.tree import Node, ThoughtTree

log = logging.getLogger(__name__)
_TOGETHER = 50
"""Number of questions whose answers are scored together."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One solution of a question: a whole solution that a search drew, or the result of a search over thoughts."""

    answer: Any | None
    """The answer as the task reads it; None without one."""
    key: Hashable | None
    """The answer in canonical form: equal answers compare equal. None without an answer."""
    score: float
    """The task's score; 0 without an answer, and if the task can't score it."""
    source: str
    """The template that wrote it, as in `source_of`; empty for the result of a search over thoughts."""
    tokens: int
    """New tokens of all calls about it."""
    value: float | None
    """From the run's state evaluator; None if the run did not evaluate it."""
    logprob: float | None
    """The mean log-probability (nats) of its sampled tokens; None if unknown."""


def pools(folder: Path, task: Task | type[Task] | str | None = None) -> Iterator[tuple[dict[str, Any], list[Sample]]]:
    """Yield the samples of each question in an evaluation's folder, finished or not, in the order of the rows.

    Yields pairs of a line of samples.jsonl, the first repeat's, and the samples of all repeats, in the order in which
    they were drawn. Of a search over thoughts, and if the folder has no trees, the only sample is the final answer. A
    search that failed before its first thought has no samples. Trees are read one at a time.

    Args:
        folder: The folder of `tot eval`.
        task: The task that reads and scores the answers; by default the folder's.

    Raises:
        OptionError: The folder is not an evaluation's, or names a task that is not installed.
        TaskError: A sample or a tree is missing or damaged, or the task can't read the answers.
    """
    config = read_config(folder)
    if task is None:
        task = config.get("task", "")
        refuse_code({"task": task}, folder / "config.yaml")
    checked = CheckedTask(load_task(task).with_prompts(config.get("prompts")))
    read = _drawn if any((folder / "trees").glob("*.json")) else _final
    by_row = sorted(read_samples(folder), key=lambda sample: (sample["index"], sample["repeat"]))
    groups = (list(group) for _, group in groupby(by_row, key=lambda sample: sample["index"]))
    while some := list(islice(groups, _TOGETHER)):
        drawn = [
            _keyed(group[0], [one for sample in group for one in read(folder, sample, checked)], checked)
            for group in some
        ]
        yield from zip((group[0] for group in some), _scored([group[0] for group in some], drawn, checked), strict=True)


def model_in(folder: Path) -> str | None:
    """Return the identity of the model of an evaluation, as `identity_of`; None if it is not found on this machine."""
    config = read_config(folder)
    if ".py:" in str(config.get("decoder")):  # no code that a folder names is run
        return None
    try:
        run = SearchConfig.of(None, {name: config[name] for name in ("model", "decoder", "prompts") if name in config})
        model = run.model.weights.get("generate")
        return None if model is None else identity_of(open_model(model))
    except OptionError:  # also of a decoder object, whose name is no decoder's
        return None


def calibration_in(folder: Path, task: Task | type[Task] | str | None = None) -> Calibration:
    """Return the shipped calibration for an evaluation; the general one if it has none."""
    loaded, model = load_task(task or read_config(folder)["task"]), model_in(folder)
    return next((one for one in calibrations_for(loaded, None) if one.model == model), general())


def _final(folder: Path, sample: Mapping[str, Any], checked: CheckedTask) -> list[Sample]:
    """Return the final answer of a search as its only sample."""
    return [Sample(checked.restored(sample.get("answer")), None, sample["score"], "", tokens_of(sample), None, None)]


def _drawn(folder: Path, sample: Mapping[str, Any], checked: CheckedTask) -> list[Sample]:
    """Return the whole solutions of a search with the score NaN, or else its final answer."""
    path = folder / "trees" / f"{sample['id']}.json"
    if sample["error"] is not None and not path.exists():
        return []
    try:
        tree = ThoughtTree.load(path)
    except TaskError as error:
        remedy = f"delete the line of {sample['id']} in samples.jsonl, then continue the evaluation with --resume"
        raise TaskError(f"{error}; {remedy}") from None
    nodes = list(tree)[1:]
    if not nodes or not all(node.terminal and node.depth == 1 for node in nodes):
        return _final(folder, sample, checked)
    drawn = [_solution(tree, node, checked) for node in nodes if not node.pruned]
    # A text that could not be read is no node: its call and its tokens are the root's.
    unread = [call.template for call in tree.calls.get(0, ()) if call.purpose in ("generate", "escalate")]
    tokens = tree.root.usage.new_tokens // max(1, len(unread))
    return drawn + [Sample(None, None, 0.0, name, tokens, None, None) for name in unread]


def _solution(tree: ThoughtTree, node: Node, checked: CheckedTask) -> Sample:
    assert node.thought is not None  # only the root has none
    node.thought = checked.typed(node.thought) or node.thought
    answer = checked.answer_at(tree.state(node))
    if answer is None and node.answer is not None:  # the model was asked for it
        answer = checked.read("answer", node.answer)
    logprobs = [logprob for part in node.thought.drawn.values() for logprob in part.logprobs]
    mean = fmean(logprobs) if logprobs else None
    return Sample(answer, None, math.nan, source_of(node), node.usage.new_tokens, node.value, mean)


def _keyed(sample: Mapping[str, Any], drawn: Sequence[Sample], checked: CheckedTask) -> list[Sample]:
    """Return samples with their keys."""
    answers = [one.answer for one in drawn if one.answer is not None]
    keys = iter(checked.elect(sample["question"], answers, [1.0] * len(answers))[0] if answers else [])
    return [one if one.answer is None else replace(one, key=next(keys)) for one in drawn]


def _scored(
    rows: Sequence[Mapping[str, Any]], pools: Sequence[Sequence[Sample]], checked: CheckedTask
) -> list[list[Sample]]:
    """Return the pools of some rows with scores. Each distinct answer without a score is scored once."""
    known = [{one.key: one.score for one in drawn if not math.isnan(one.score)} for drawn in pools]
    unscored = {
        (i, one.key): one.answer
        for i, drawn in enumerate(pools)
        for one in drawn
        if one.key is not None and one.key not in known[i]
    }

    def score(place: tuple[int, Hashable], answer: Any) -> float:
        try:
            return checked.score(answer, rows[place[0]].get("reference"))
        except TaskError as error:
            log.warning("sample %s: an answer counts as wrong: %s", rows[place[0]]["id"], error)
            return 0.0

    if isinstance(checked.task, HasScores):
        found = checked.scores([(answer, rows[i].get("reference")) for (i, _), answer in unscored.items()])
    else:
        found = list(pool().map(score, unscored, unscored.values()))
    for (i, key), one in zip(unscored, found, strict=True):
        known[i][key] = one
    return [
        [replace(one, score=0.0 if one.key is None else scores[one.key]) for one in drawn]
        for drawn, scores in zip(pools, known, strict=True)
    ]
