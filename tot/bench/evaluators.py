"""How well state evaluators tell right from wrong: for `tot bench quality`.

They judge the pieces of solutions that an evaluation's folder holds, of which it is known how they end, so nothing is
decoded but what they ask themselves.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from tot.bench.harness import Bench, Measured, Measurements, Side, timed
from tot.decoders.budget import Meter
from tot.evaluation.estimate import bootstrap, told_apart
from tot.evaluation.folder import read_samples
from tot.evaluation.leaves import read_leaves
from tot.evaluation.options import EvaluationRun as Work
from tot.evaluators.base import Evaluator
from tot.evaluators.base import judge as judge_nodes
from tot.llm.backend import Backend
from tot.llm.context import Context
from tot.running import run_to_end
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.tree.thought import Drawn, State, Thought
from tot.tree.tree import Node, ThoughtTree

_AT_ONCE = 16
"""Questions whose pieces are judged side by side."""


@dataclass(frozen=True)
class Judged:
    """A piece of solutions: the share of those that it is a part of that end right, and how an evaluator values it as
    far as here."""

    depth: int
    along: float
    """How far on the way to those ends; 1 is an end."""
    truth: float
    value: float


@dataclass(frozen=True)
class Solutions:
    """A question and the messages that answer it: the pieces of each, with what tells those that messages share, and
    how right it is."""

    root: State
    messages: tuple[tuple[list[tuple[Hashable, Drawn]], float], ...]


def judge(bench: Bench, work: Work, folder: Path, evaluators: Mapping[str, Evaluator], most: int) -> None:
    """How well evaluators tell pieces that end right from those that don't, within a question; of `most` questions."""
    with ExitStack() as stack:
        decoders = work.config.open(stack)
        tokenizer = getattr(decoders["generate"], "tokenizer", None)
        exact = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        decode = None if tokenizer is None else partial(tokenizer.decode, **exact)
        samples = islice(read_samples(folder), most)
        given = [solutions(folder, sample, work.task, decode) for sample in samples]
        batches = [given[start : start + _AT_ONCE] for start in range(0, len(given), _AT_ONCE)]

        def ask(evaluator: Evaluator, batch: Sequence[Solutions]) -> Measured:
            meter = Meter()
            asking = judged(batch, work.task, evaluator, Backend(decoders, meter))
            seconds, found = timed(lambda: run_to_end(asking))
            pieces = [[asdict(one) for one in each] for each in found]
            return {"seconds": seconds, "tokens": meter.usage.new_tokens, "pieces": pieces}

        bench.compare(
            "evaluators",
            [Side(name, partial(ask, evaluator)) for name, evaluator in evaluators.items()],
            lambda _, turn: batches[turn],
            rounds=len(batches),
            table=_table,
        )


def _table(results: Measurements) -> Table:
    rows = Table("evaluator", *PLACES, "new tokens a piece", "seconds", title=_TELLING)
    for name in results.sides:
        done = results.of(name).values()
        found = [[Judged(**one) for one in each] for took in done for each in took["pieces"]]
        tokens, seconds = (sum(took[what] for took in done) for what in ("tokens", "seconds"))
        shares = [told(found, place) for place in PLACES.values()]
        rows.add_row(name, *shares, f"{tokens / max(1, sum(map(len, found))):.0f}", f"{seconds:.1f}")
    return rows


_TELLING = "pairs of a question's pieces of which the better one is valued more (AUROC), with 95% intervals"
PLACES: dict[str, Callable[[Judged], bool]] = {
    "all": lambda piece: True,
    "first pieces": lambda piece: piece.depth == 1,
    "half way": lambda piece: abs(piece.along - 0.5) < 0.17,
    "ends": lambda piece: piece.along == 1,
}
_PARAGRAPH = re.compile(r"\s*\S.*?(?:\n\s*\n\s*|\Z)", re.DOTALL)


def solutions(
    folder: Path, sample: Mapping[str, Any], task: Task, decode: Callable[[Sequence[int]], str] | None
) -> Solutions:
    """The messages that an evaluation's folder holds of a sample, in the pieces that they grew by; whole ones cut as
    `Continue` cuts them, with `decode`, which tells what tokens spell, their tokens as well."""
    tree, found = read_leaves(folder, sample, task)
    messages = []
    for leaf, (_, right) in found.items():
        pieces: list[tuple[Hashable, Drawn]] = [(node.id, _drawn(node)) for node in tree.path(tree[leaf])[1:]]
        if len(pieces) == 1:
            pieces = [((leaf, i), piece) for i, piece in enumerate(pieces_of(pieces[0][1], decode))]
        messages.append((pieces, right))
    return Solutions(tree.state(tree.root), tuple(messages))


def _drawn(node: Node) -> Drawn:
    assert node.thought is not None
    return next(iter(node.thought.drawn.values()), Drawn(text=node.thought.text, tokens=()))


def pieces_of(message: Drawn, decode: Callable[[Sequence[int]], str] | None) -> list[Drawn]:
    """A message's paragraphs, as they were drawn."""
    tokens = message.tokens if decode is not None else ()
    ends = [len(decode(tokens[: i + 1])) for i in range(len(tokens))] if decode is not None else []
    found, begin = [], 0
    for paragraph in _PARAGRAPH.finditer(message.text):
        end = bisect_right(ends, paragraph.end())
        found.append(Drawn(text=paragraph[0], tokens=tokens[begin:end], logprobs=message.logprobs[begin:end]))
        begin = end
    return found


async def judged(
    questions: Sequence[Solutions], task: Task, evaluator: Evaluator, backend: Backend
) -> list[list[Judged]]:
    """Every piece, judged when those at its depth are all that there is, as a search would."""
    checked = CheckedTask(task)

    async def of(question: Solutions) -> list[Judged]:
        tree = ThoughtTree(question.root)
        context = Context(checked, tree, backend).to("evaluate")
        grown: dict[Hashable, Node] = {}
        ends, found = [tree.root] * len(question.messages), list[Judged]()
        for depth in range(max((len(pieces) for pieces, _ in question.messages), default=0)):
            through: dict[int, list[tuple[float, int]]] = {}  # by node, the ends of messages that it is a part of
            for i, (pieces, right) in enumerate(question.messages):
                if depth < len(pieces):
                    key, piece = pieces[depth]
                    if key not in grown:
                        drawn = {task.thought[-1]: piece} if piece.tokens else {}
                        grown[key] = tree.add(ends[i], Thought(parts={task.thought[-1]: piece.text}, drawn=drawn))
                    ends[i] = grown[key]
                    through.setdefault(ends[i].id, []).append((right, len(pieces)))
            values = await judge_nodes(context, evaluator, [tree[node] for node in through])
            for ended, one in zip(through.values(), values, strict=True):
                if one.value is not None:
                    right, far = map(fmean, zip(*ended, strict=True))
                    found.append(Judged(depth + 1, (depth + 1) / far, right, one.value))
        return found

    return await asyncio.gather(*map(of, questions))


def told(questions: Sequence[Sequence[Judged]], place: Callable[[Judged], bool]) -> str:
    """The mean over questions of the share of pairs, of different truth, that values put in the right order; ties are
    worth half. Empty where no question has such pairs."""
    found = [told_apart([(one.truth, one.value) for one in pieces if place(one)]) for pieces in questions]
    shares = [share for share in found if share is not None]
    return f"{bootstrap(shares).format('.2f')}, {len(shares)} questions" if shares else ""
