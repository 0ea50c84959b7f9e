"""The benchmark `answers`: right answers against seconds per question, of llama.cpp, vLLM and tot on the same rows.

Each side answers one question at a time, with an empty cache; the sides take turns. All get the same prompt, and the
task reads and scores all answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines import SideError, local_decoders, searched
from benchmarks.harness import Bench, Measured, Measurements, Side
from benchmarks.options import AnswersOptions, read_ways
from benchmarks.peers.asking import PeerWay, Reader, ask, fastest_setting, open_peer
from benchmarks.peers.peers import settled
from benchmarks.peers.settings import Setting
from benchmarks.peers.worker import PeerWorker
from tot.decoders.decoder import REMOTE, LocalDecoder
from tot.decoders.errors import TotError, validated
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.evaluation.estimate import estimate, paired
from tot.evaluation.options import EvaluationRun
from tot.evaluation.questions import Question, Questions
from tot.task.checked import CheckedTask

VOTING = (
    "llama.cpp: peer=llama",
    "llama.cpp, 5 votes: peer=llama; samples=5",
    "vLLM, 5 votes: peer=vllm; samples=5",
    "tot, one answer: search=cot",
    "tot, 5 votes: search=self-consistency:samples=5,weighted=true",
    "tot, until sure:",
)
"""The default ways for a task whose default search is a vote. The last one is that search."""
SEARCHING = (
    "llama.cpp: peer=llama",
    "vLLM: peer=vllm",
    "tot, one answer: search=cot",
    "tot, search:",
)
"""The default ways for other tasks, such as programs. The last one is the task's default search."""
TITLE = "answers, one question at a time"


def run(asked: AnswersOptions, console: Console) -> None:
    """Run the benchmark and print its table.

    Raises OptionError for invalid ways, and SideError if no side is available or one failed.
    """
    base = _work(asked, {})
    asked = asked.model_copy(update={"way": asked.way or _default_ways(asked, base), "escalate": None})
    ways = read_ways(asked.way)
    peers = {name: validated(PeerWay, way, f"--way {name}") for name, way in ways.items() if "peer" in way}
    works = {name: _work(asked, way) for name, way in ways.items() if name not in peers}
    rows = Questions(base.task, base.options.data, asked.limit, asked.offset)
    _, bad = rows.survey()
    questions = [row for row in rows if isinstance(row, Question)]
    with ExitStack() as stack:
        bench = Bench(asked, console, describe(resolve_device("auto")))
        if bad:
            bench.say(f"{len(bad)} rows have no valid question: {bad[0].place} {bad[0].reason}")
        bench.numbers.get(TITLE, {}).get("failed", {}).clear()  # a resumed run tries these again
        opened = _open_peers(asked, base, peers, questions, bench, stack) if peers else {}
        for name, work in works.items():
            opened[name] = partial(_solved, work, local_decoders(work.config, stack))
        sides = [
            settled(Side(name, partial(_graded, opened[name], CheckedTask(base.task))))
            for name in ways
            if name in opened
        ]
        if not sides:
            raise SideError("no way can run: install a peer with `make peers`, or add a way of tot, such as search=cot")
        results = bench.compare(
            TITLE,
            sides,
            lambda _, turn: questions[turn],
            rounds=len(questions),
            warm_up=lambda _: questions[0],
            failing=True,
            table=partial(table, names=list(ways), title=f"{asked.task}, {asked.model}: {TITLE}"),
        )
        if asked.picture is not None:
            _plot(results, list(ways), asked.picture)
        if results.failed:
            raise SideError(
                f"{' and '.join(name for name in ways if name in results.failed)} failed; the finished answers are kept"
                + (": run the same command again to resume" if asked.out else "")
            )


def _work(asked: AnswersOptions, options: Mapping[str, Any]) -> EvaluationRun:
    """Return the run of one of tot's ways. Every question computes its prompts, except on a model server."""
    local = {} if options.get("decoder") in REMOTE else {"prefix_cache": False}
    return EvaluationRun.read({**asked.rows, **local, **options})


def _default_ways(asked: AnswersOptions, base: EvaluationRun) -> list[str]:
    votes = getattr(base.parts["search"], "aggregate", "best") != "best"
    ways = list(VOTING if votes else SEARCHING)
    if asked.escalate is not None:
        name, _, options = ways[-1].partition(":")
        ways.append(f"{name}, then a larger model:{options}; escalate={asked.escalate}")
    return ways


def _open_peers(
    asked: AnswersOptions,
    base: EvaluationRun,
    ways: Mapping[str, PeerWay],
    questions: Sequence[Question],
    bench: Bench,
    stack: ExitStack,
) -> dict[str, Any]:
    """Return a function for each available peer that asks a question. Ways with equal settings share a process."""
    try:
        reader = Reader.of(base, base.config.open(stack)["generate"])
    except SideError as error:
        bench.say(f"{' and '.join(ways)}: left out, {error}")
        return {}
    prompts = [reader.prompt(one.text) for one in questions]
    workers: dict[Any, PeerWorker] = {}
    settings: dict[str, Any] = bench.numbers.setdefault("settings", {})
    asking = {}
    for name, way in ways.items():
        try:
            if name not in settings:
                bench.say(f"{name}: trials …")
                settings[name] = fastest_setting(asked, way, reader, prompts[0], bench.say)
            setting = Setting(*settings[name])
            key = way.peer, setting
            if key not in workers:
                workers[key] = open_peer(asked, way, setting, reader, max(map(len, prompts)), stack)
        except TotError as error:
            bench.say(f"{name} is left out: {error}")
        else:
            bench.say(f"{name}: {', '.join(filter(None, (workers[key].about, setting.label)))}")
            asking[name] = partial(_asked, workers[key], reader, way.samples)
    return asking


def _asked(worker: PeerWorker, reader: Reader, samples: int, question: Question) -> Measured:
    return ask(worker, reader, samples, question.text, question.index)


def _solved(work: EvaluationRun, decoders: Sequence[LocalDecoder], question: Question) -> Measured:
    seconds, solution = searched(decoders, work.task, question.text, work.config)
    spent = {"seconds": seconds, "tokens": solution.usage.new_tokens}
    return {**spent, "answer": solution.answer, "certainty": solution.certainty}


def _graded(answering: Any, task: CheckedTask, question: Question) -> Measured:
    measured = answering(question)
    return {**measured, "index": question.index, "score": task.score(measured["answer"], question.reference)}


def _answers(results: Measurements, names: Sequence[str]) -> dict[str, dict[int, Measured]]:
    """Return the answers of each side by question, in the order of `names`."""
    found = {name: results.of(name) for name in names}
    return {name: cells for name, cells in found.items() if cells}


def table(results: Measurements, names: Sequence[str], title: str) -> Table:
    """Build a table with one row per side: right answers, seconds and tokens, compared with the first side."""
    answers = _answers(results, names)
    first = next(iter(answers), "")  # every side may have failed
    head = ["questions", "right", f"minus {first}", "seconds: median", "mean", f"of {first}'s seconds", "new tokens"]
    rows = Table("", *head, title=f"{title}, with 95% intervals; differences question by question")
    for name, cells in answers.items():
        pairs = [(cell, answers[first][i]) for i, cell in cells.items() if i in answers[first]]
        differences = [cell["score"] - other["score"] for cell, other in pairs]
        seconds = [cell["seconds"] for cell in cells.values()]
        rows.add_row(
            name,
            str(len(cells)),
            estimate([cell["score"] for cell in cells.values()]).format(),
            paired(differences).format("+.1%") if name != first and pairs else "",
            f"{median(seconds):.1f}",
            f"{fmean(seconds):.1f}",
            f"{sum(c['seconds'] for c, _ in pairs) / sum(o['seconds'] for _, o in pairs):.2f}x" if pairs else "",
            f"{fmean(cell['tokens'] for cell in cells.values()):.0f}",
        )
    return rows


def _plot(results: Measurements, names: Sequence[str], picture: Path) -> None:
    from tot.report.plots import accuracies, save

    points = {}
    for name, cells in _answers(results, names).items():
        right = estimate([cell["score"] for cell in cells.values()])
        points[name] = fmean(cell["seconds"] for cell in cells.values()), right.mean, right.low, right.high
    save(accuracies(points, "seconds per question"), picture)
