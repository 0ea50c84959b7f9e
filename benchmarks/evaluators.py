"""AUROC of state evaluators, for `python -m benchmarks quality`.

Evaluators judge the pieces of solutions in an evaluation's folder, whose scores are known. Only the evaluators' own
requests are decoded.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.table import Table

from benchmarks.harness import Bench, Cells, Measured, timed
from benchmarks.leaves import read_leaves
from tot.decoders.budget import Meter
from tot.evaluation.config import EvaluationRun
from tot.evaluation.estimate import Estimate, estimate
from tot.evaluation.folder import read_samples
from tot.evaluators.base import Evaluator, judge
from tot.llm.backend import Backend
from tot.llm.context import Context
from tot.llm.decoders import open_decoders
from tot.running import run_to_end
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.tree.thought import SampledText, State, Thought
from tot.tree.tree import Node, ThoughtTree

Use = Literal["prune", "weigh", "neither"]
PRUNE = 0.65
"""AUROC of unfinished solutions from which pruning half way beats a vote at equal tokens (docs, scores.md)."""
WEIGH = 0.5
"""AUROC of whole solutions above which weights improve a vote: chance."""
_AT_ONCE = 16
"""Questions whose pieces are judged concurrently."""
_PARAGRAPH = re.compile(r"\s*\S.*?(?:\n\s*\n\s*|\Z)", re.DOTALL)
Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


@dataclass(frozen=True)
class Judged:
    """A piece that one or more solutions share, with its value from an evaluator."""

    depth: int
    along: float
    """Fraction of the solutions' length up to and including this piece; 1 for a final piece."""
    truth: float
    """Mean score of the solutions that contain this piece."""
    value: float
    """The evaluator's value of the solution up to this piece."""


PLACES: dict[str, Callable[[Judged], bool]] = {
    "all": lambda piece: True,
    "first pieces": lambda piece: piece.depth == 1,
    "half way": lambda piece: abs(piece.along - 0.5) < 0.17,
    "before the end": lambda piece: piece.along < 1,
    "ends": lambda piece: piece.along == 1,
}
_VERDICTS: dict[Use, str] = {
    "prune": "good enough to prune by",
    "weigh": "good enough to weigh votes, too noisy to prune by",
    "neither": "not shown to be good enough to prune by or to weigh votes",
}


@dataclass(frozen=True)
class Solutions:
    """A question and its answer messages."""

    root: State
    messages: tuple[tuple[list[tuple[Hashable, SampledText]], float], ...]
    """Of each message, its pieces and its score. A piece has a key, which is equal for pieces that messages share."""


def judge_pieces(
    bench: Bench, work: EvaluationRun, folder: Path, evaluators: Mapping[str, Evaluator], most: int
) -> None:
    """Measure each evaluator's AUROC over the pieces of a question, on at most `most` questions."""
    with ExitStack() as stack:
        decoders = open_decoders(work.config.model, stack)
        tokenizer = getattr(decoders["generate"], "tokenizer", None)
        decode = None if tokenizer is None else tokenizer.backend_tokenizer.decode  # as the engine decodes its texts
        every = [solutions(folder, sample, work.task, decode) for sample in islice(read_samples(folder), most)]
        batches = [every[start : start + _AT_ONCE] for start in range(0, len(every), _AT_ONCE)]

        def ask(evaluator: Evaluator, batch: Sequence[Solutions]) -> Measured:
            meter = Meter()
            judging = judged(batch, work.task, evaluator, Backend(decoders, meter))
            seconds, found = timed(lambda: run_to_end(judging))
            pieces = [[asdict(one) for one in each] for each in found]
            return {"seconds": seconds, "tokens": meter.usage.new_tokens, "pieces": pieces}

        cells = bench.compare(
            "evaluators",
            {name: partial(ask, evaluator) for name, evaluator in evaluators.items()},
            batches,
            _table,
        )
        bench.show(
            f"An evaluator is good enough to prune by if the interval of its AUROC before the end begins at {PRUNE} or "
            f"above. It is good enough to weigh votes if the interval at the end begins above {WEIGH}.",
            *(f"{name}: {verdict(_judged(cells, name))}" for name in cells.sides),
        )


def _judged(cells: Cells, name: str) -> list[list[Judged]]:
    """Return the pieces of each question, as one evaluator judged them."""
    return [[Judged(**one) for one in each] for batch in cells.of(name).values() for each in batch["pieces"]]


def _table(cells: Cells) -> Table:
    title = "pairs of a question's pieces of which the better one is valued more (AUROC), with 95% intervals"
    rows = Table("evaluator", *PLACES, "new tokens a piece", "seconds", title=title)
    for name in cells.sides:
        questions = _judged(cells, name)
        tokens, seconds = (sum(batch[key] for batch in cells.of(name).values()) for key in ("tokens", "seconds"))
        found = [auroc(questions, place) for place in PLACES.values()]
        shares = ["" if one is None else f"{one.format('.2f')}, {count} questions" for one, count in found]
        rows.add_row(name, *shares, f"{tokens / max(1, sum(map(len, questions))):.0f}", f"{seconds:.1f}")
    return rows


def solutions(folder: Path, sample: Mapping[str, Any], task: Task, decode: Decode | None) -> Solutions:
    """Return a sample's messages from an evaluation's folder, split into the thoughts of their paths.

    A message of a single thought is split into paragraphs, as `Continue` does. With `decode`, its tokens are split too.
    """
    tree, leaves = read_leaves(folder, sample, task)
    messages = []
    for leaf, (_, right) in leaves.items():
        pieces: list[tuple[Hashable, SampledText]] = [(node.id, _drawn(node)) for node in tree.path(tree[leaf])[1:]]
        if len(pieces) == 1:
            pieces = [((leaf, i), piece) for i, piece in enumerate(pieces_of(pieces[0][1], decode))]
        messages.append((pieces, right))
    return Solutions(tree.state(tree.root), tuple(messages))


def _drawn(node: Node) -> SampledText:
    assert node.thought is not None
    return next(iter(node.thought.drawn.values()), SampledText(text=node.thought.text, tokens=()))


def pieces_of(message: SampledText, decode: Decode | None) -> list[SampledText]:
    """Split a message into paragraphs; without `decode`, their tokens are left out."""
    tokens = message.tokens if decode is not None else ()
    ends = [len(decode(tokens[: i + 1])) for i in range(len(tokens))] if decode is not None else []
    paragraphs, begin = [], 0
    for paragraph in _PARAGRAPH.finditer(message.text):
        end = bisect_right(ends, paragraph.end())
        paragraphs.append(
            SampledText(text=paragraph[0], tokens=tokens[begin:end], logprobs=message.logprobs[begin:end])
        )
        begin = end
    return paragraphs


async def judged(
    questions: Sequence[Solutions], task: Task, evaluator: Evaluator, backend: Backend
) -> list[list[Judged]]:
    """Judge every piece, depth by depth, on a tree that holds nothing deeper, as in a search."""
    checked, name = CheckedTask(task), task.thought[-1]

    async def of(question: Solutions) -> list[Judged]:
        tree = ThoughtTree(question.root)
        context = Context(checked, tree, backend).to("evaluate")
        nodes: dict[Hashable, Node] = {}
        ends, pieces_judged = [tree.root] * len(question.messages), list[Judged]()
        for depth in range(max((len(pieces) for pieces, _ in question.messages), default=0)):
            messages: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
            """By node: the score and the number of pieces of each message that contains it."""
            for i, (pieces, right) in enumerate(question.messages):
                if depth < len(pieces):
                    key, piece = pieces[depth]
                    if key not in nodes:
                        drawn = {name: piece} if piece.tokens else {}
                        nodes[key] = tree.add(ends[i], Thought(parts={name: piece.text}, drawn=drawn))
                    ends[i] = nodes[key]
                    messages[ends[i].id].append((right, len(pieces)))
            values = await judge(context, evaluator, [tree[node] for node in messages])
            for containing, one in zip(messages.values(), values, strict=True):
                if one.value is not None:
                    right, length = map(fmean, zip(*containing, strict=True))
                    pieces_judged.append(Judged(depth + 1, (depth + 1) / length, right, one.value))
        return pieces_judged

    return await asyncio.gather(*map(of, questions))


def auroc(questions: Sequence[Sequence[Judged]], place: Callable[[Judged], bool]) -> tuple[Estimate | None, int]:
    """Return the mean AUROC over the questions with pieces of different truth, and their number; None for no such."""
    aurocs = [concordance([(one.truth, one.value) for one in pieces if place(one)]) for pieces in questions]
    known = [share for share in aurocs if share is not None]
    return estimate(known) if known else None, len(known)


def verdict(questions: Sequence[Sequence[Judged]]) -> str:
    """Return the use that an evaluator's AUROC allows, and the two AUROCs that decide it."""
    found = [auroc(questions, PLACES[place])[0] for place in ("before the end", "ends")]
    unfinished, whole = ("not known" if one is None else one.format(".2f") for one in found)
    use = use_of(*(None if one is None else one.low for one in found))
    return f"{_VERDICTS[use]} (AUROC before the end {unfinished}, at the end {whole})"


def use_of(unfinished: float | None, whole: float | None) -> Use:
    """Return the use that the lower bounds of an evaluator's AUROC allow, of unfinished and of whole solutions."""
    if unfinished is not None and unfinished >= PRUNE:
        return "prune"
    return "weigh" if whole is not None and whole > WEIGH else "neither"


def concordance(judged: Sequence[tuple[float, float]]) -> float | None:
    """Return the share of pairs of different truth that the values rank correctly, from (truth, value) pairs.

    Ties count half. If truths are 0 and 1, this is the AUROC. None if all truths are equal.
    """
    pairs = [(a, b) for true, a in judged for truth, b in judged if true > truth]
    return fmean((a > b) + (a == b) / 2 for a, b in pairs) if pairs else None
