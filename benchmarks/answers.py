"""The benchmark `answers`: right answers against seconds per question, of llama.cpp, vLLM and tot on the same rows.

Each side answers one question at a time, with an empty cache; the sides take turns. All get the same prompt, and the
task reads and scores all answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from rich.console import Console
from rich.table import Table

from benchmarks import peer_process as peer
from benchmarks.engines import local_decoders, searched
from benchmarks.harness import SECONDS, Bench, Cells, Measured, SideError, times
from benchmarks.peers import settled
from benchmarks.ways import WaysOptions, compared, read_ways
from tot.decoders.decoder import REMOTE, LocalDecoder
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import OptionError, TotError, validated
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.decoders.request import Message
from tot.decoders.thinking import split
from tot.evaluation.config import EvaluationRun
from tot.evaluation.questions import Question, Questions
from tot.llm.decoders import open_decoders
from tot.search.votes import count
from tot.task.checked import CheckedTask
from tot.task.world import HasAnswer
from tot.tree.thought import Thought

VOTING = (
    "llama.cpp: peer=llama",
    "llama.cpp, 5 votes: peer=llama; samples=5",
    "vLLM, 5 votes: peer=vllm; samples=5",
    "tot, one answer: search=cot",
    "tot, 5 votes: search=self-consistency:samples=5,weighted=true",
    "tot, until sure:",
)
"""The default ways for a task whose default search is a vote. The last one is that search."""
SEARCHING = ("llama.cpp: peer=llama", "vLLM: peer=vllm", "tot, one answer: search=cot", "tot, search:")
"""The default ways for other tasks, such as programs. The last one is the task's default search."""
TITLE = "answers, one question at a time"
_TRIAL_TOKENS = 48
"""Tokens of the texts that choose a setting."""


class Options(WaysOptions):
    """Compare right answers and seconds per question with llama.cpp and vLLM, one question at a time."""

    extends: ClassVar = "limit"
    way: list[str] = Field(
        [],
        description="A way to answer, as 'NAME: option=value; option=value', with options of tot eval, or peer=llama "
        "or peer=vllm with samples=N and file=PRECISION. Repeat for more; each is compared with the first. By default "
        "one answer, votes and searches of each program.",
    )
    llama: peer.LlamaPython = peer.LLAMA_PYTHON
    vllm: peer.VLLMPython = peer.VLLM_PYTHON


class PeerWay(BaseModel):
    """One way to ask a peer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer: Literal["llama", "vllm"]
    samples: int = Field(1, ge=1)
    """Answers that vote. A single one is decoded greedily."""
    file: tuple[str, ...] = ()
    """Precisions that llama.cpp tries besides the model's own file."""

    @field_validator("file", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print its table.

    Raises OptionError for invalid ways, and SideError if no side is available or one failed.
    """
    base = work_of(asked, {})
    ways = read_ways(asked.way or default_ways(base))
    peers = {name: validated(PeerWay, way, f"--way {name}") for name, way in ways.items() if "peer" in way}
    works = {name: work_of(asked, way) for name, way in ways.items() if name not in peers}
    for name, way in peers.items():
        if way.peer == "vllm" and way.file:
            raise OptionError(f"--way {name}: file={way.file[0]} is for peer=llama, vLLM gets --model")
    rows = Questions(base.task, base.options.data, asked.limit, asked.offset)
    _, bad = rows.survey()
    questions = [row for row in rows if isinstance(row, Question)]
    with ExitStack() as stack:
        bench = Bench(asked, console, describe(resolve_device("auto")))
        if bad:
            bench.say(f"{len(bad)} rows have no valid question: {bad[0].place} {bad[0].reason}")
        answering = open_peers(asked, base, peers, questions, bench, stack) if peers else {}
        for name, work in works.items():
            answering[name] = partial(_solved, work, local_decoders(work.config, stack))
        if not answering:
            raise SideError("no way can run: install a peer with `make peers`, or add a way of tot, such as search=cot")

        def graded(name: str, question: Question) -> Measured:
            measured = answering[name](question)
            score = CheckedTask(base.task).score(measured["answer"], question.reference)
            return {**measured, "index": question.index, "score": score}

        cells = bench.compare(
            TITLE,
            {name: partial(settled, partial(graded, name)) for name in ways if name in answering},
            questions,
            partial(table, names=list(ways), title=f"{asked.task}, {asked.model}: {TITLE}"),
            warm_up=True,
        )
        if cells.failed:
            names = " and ".join(name for name in ways if name in cells.failed)
            again = ": run the same command again to resume" if asked.out else ""
            raise SideError(f"{names} failed; the finished answers are kept{again}")


def work_of(asked: Options, options: Mapping[str, Any]) -> EvaluationRun:
    """Return the run of one of tot's ways. Every question computes its prompts, except on a model server."""
    local = {} if options.get("decoder") in REMOTE else {"prefix_cache": False}
    return EvaluationRun.read({**asked.rows, **local, **options})


def default_ways(base: EvaluationRun) -> tuple[str, ...]:
    """Return the ways that suit the task's default search."""
    return SEARCHING if getattr(base.parts["search"], "aggregate", "best") == "best" else VOTING


def _solved(work: EvaluationRun, decoders: Sequence[LocalDecoder], question: Question) -> Measured:
    seconds, solution = searched(decoders, work.task, question.text, work.config)
    spent = {"seconds": seconds, "tokens": solution.usage.new_tokens}
    return {**spent, "answer": solution.answer, "certainty": solution.certainty}


@dataclass(frozen=True)
class Reader:
    """Prompts of a task as token ids, and the answers in sampled tokens."""

    task: CheckedTask
    codec: TextCodec
    template: str
    sampling: Mapping[str, Any]
    """Options of a peer's sampler, with the temperature of votes."""

    @classmethod
    def of(cls, work: EvaluationRun, decoder: Any) -> Reader:
        """Return the reader of a run's whole solutions. Raises SideError if peers cannot write them."""
        task = work.task
        template = "chain" if "chain" in task.prompts else task.thought[0]
        if template != "chain" and not (len(task.thought) == 1 and isinstance(task, HasAnswer)):
            raise SideError(f"task {work.name} asks for a solution in several prompts, and peers get one")
        options = {"max_tokens": 128, **task.sampling.get(template, {})}
        if options.get("stop") or (template in task.triggers and task.prompts.kind == "papers"):
            raise SideError(
                f"the prompt {template!r} of task {work.name} ends texts at strings, and peers end them at tokens: use "
                "a model with a chat template"
            )
        if not isinstance(decoder, LocalDecoder):
            raise SideError("peers get the token ids of a local model, and --model has none")
        temperature = getattr(work.parts["generator"], "temperature", 0.7)
        codec = decoder.engine.codec
        sampling = {"temperature": temperature, **work.config.filters_for(task)["generate"], **options}
        return cls(CheckedTask(task), codec, template, sampling | {"ends": sorted(codec.end_ids)})

    def _messages(self, question: str) -> tuple[Message, ...]:
        return self.task.prompt(self.template, self.task.start(question))

    def prompt(self, question: str) -> list[int]:
        """Return the token ids of a question's prompt."""
        return self.codec.encode_prompt(self._messages(question))

    def answer(self, question: str, tokens: Sequence[int]) -> Any | None:
        """Return the answer in a sampled text, or None."""
        ended = bool(tokens) and tokens[-1] in self.codec.end_ids
        decoded = self.codec.decode(tokens[:-1] if ended else tokens)
        text: str | None = split(decoded, self.codec.awaits(self._messages(question)))[1].strip() or None
        if text is not None and self.template in self.task.thought:
            text = self.task.parse_thought(self.template, text)
        if text is None:
            return None
        thought = Thought(parts={self.template: text}, truncated=not ended)
        return self.task.answer_at(self.task.start(question).then(thought))

    def vote(self, question: str, answers: Sequence[Any]) -> Any | None:
        """Return the answer that a majority elects; the first one wins a tie."""
        given = [answer for answer in answers if answer is not None]
        return given[count(self.task, question, given, [1.0] * len(given))[1][0]] if given else None

    def ask(self, process: peer.PeerProcess, samples: int, question: Question) -> Measured:
        """Ask a question. Return the seconds, the number of new tokens and the answer. Raises SideError."""
        options = {**self.sampling, "seed": question.index} | ({"temperature": 0.0} if samples == 1 else {})
        reply = process.complete(self.prompt(question.text), samples, **options)
        answer = self.vote(question.text, [self.answer(question.text, tokens) for tokens in reply["samples"]])
        return {"seconds": reply["seconds"], "tokens": sum(map(len, reply["samples"])), "answer": answer}


def open_peers(
    asked: Options,
    base: EvaluationRun,
    ways: Mapping[str, PeerWay],
    questions: Sequence[Question],
    bench: Bench,
    stack: ExitStack,
) -> dict[str, Callable[[Question], Measured]]:
    """Return a function for each available peer that asks a question. Ways with equal settings share a process."""
    try:
        reader = Reader.of(base, open_decoders(base.config.model, stack)["generate"])
    except SideError as error:
        bench.say(f"{' and '.join(ways)}: left out, {error}")
        return {}
    prompts = [reader.prompt(one.text) for one in questions]

    def start(way: PeerWay, setting: peer.Setting, own: ExitStack) -> peer.PeerProcess:
        room = max(map(len, prompts)) + way.samples * int(reader.sampling["max_tokens"])
        if way.peer == "vllm":
            return peer.vllm_process(asked.model, asked.vllm, own, setting, context=room)
        return peer.llama_process(asked.model, asked.llama, own, setting, cells=room)

    def trial(way: PeerWay, setting: peer.Setting) -> dict[str, float]:
        options = {**reader.sampling, "ends": []} | ({"temperature": 0.0} if way.samples == 1 else {})
        with ExitStack() as own:
            process = start(way, setting, own)
            for tokens in (1, _TRIAL_TOKENS):
                reply = process.complete(prompts[0], way.samples, **{**options, "max_tokens": tokens})
            return {"": reply["seconds"]}

    processes: dict[Any, peer.PeerProcess] = {}
    settings: dict[str, Any] = bench.numbers.setdefault("settings", {})
    asking: dict[str, Callable[[Question], Measured]] = {}
    for name, way in ways.items():
        stages = (way.file or peer.EXACT, peer.FLASH) if way.peer == "llama" else (peer.BOUND,)
        try:
            if name not in settings:
                bench.say(f"{name}: trials …")
                (settings[name],) = peer.fastest((*stages, peer.LOOKUP), partial(trial, way), bench.say)
            key = way.peer, tuple(settings[name])
            if key not in processes:
                processes[key] = start(way, key[1], stack)
        except TotError as error:
            bench.say(f"{name} is left out: {error}")
        else:
            bench.say(f"{name}: {', '.join((processes[key].about, *key[1]))}")
            asking[name] = partial(reader.ask, processes[key], way.samples)
    return asking


def table(cells: Cells, names: Sequence[str], title: str) -> Table:
    """Build a table with one row per side: right answers, seconds and tokens, compared with the first side."""
    answers = {name: found for name in names if (found := cells.of(name))}
    first = next(iter(answers), "")  # every side may have failed
    head = ["questions", "right", f"minus {first}", "seconds: median", "mean", f"of {first}'s seconds"]
    head += ["faster, by question", "new tokens"]
    rows = Table("", *head, title=f"{title}, with 95% intervals; differences question by question")
    scores = {name: {i: cell["score"] for i, cell in found.items()} for name, found in answers.items()}
    for (name, found), right in zip(answers.items(), compared(scores), strict=True):
        pairs = [(cell["seconds"], answers[first][i]["seconds"]) for i, cell in found.items() if i in answers[first]]
        seconds = [cell["seconds"] for cell in found.values()]
        rows.add_row(
            name,
            str(len(found)),
            *right,
            f"{median(seconds):.1f}",
            f"{fmean(seconds):.1f}",
            f"{sum(ours for ours, _ in pairs) / sum(other for _, other in pairs):.2f}x" if pairs else "",
            times(cells.ratios(SECONDS, name, first)) if name != first else "",
            f"{fmean(cell['tokens'] for cell in found.values()):.0f}",
        )
    return rows
