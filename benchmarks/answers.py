"""The benchmark `answers`: right answers against seconds per question, of llama.cpp, vLLM and tot on the same rows.

Each side answers one question at a time, with an empty cache; the sides take turns. llama.cpp and vLLM decode the same
prompts for the same searches (one answer, or a vote), and the task reads and scores all answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from tot.config import SearchConfig
from tot.decoders.decoder import REMOTE, LocalDecoder
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import OptionError, TotError, validated
from tot.decoders.machine import describe
from tot.decoders.models.loading import resolve_device
from tot.decoders.request import Completion, Request, Usage
from tot.evaluation.config import EvaluationRun
from tot.evaluation.questions import Question, Questions
from tot.llm.decoders import open_decoders
from tot.llm.models import Model, Models
from tot.task.checked import CheckedTask
from tot.task.task import Task

VOTING = (
    "llama.cpp: peer=llama",
    "llama.cpp, 5 votes: peer=llama; samples=5",
    "vLLM, 5 votes: peer=vllm; samples=5",
    "tot, one answer: search=cot",
    "tot, 5 votes: search=self-consistency:samples=5,weighted=true",
    "tot, until sure:",
)
"""The default ways for a task whose default search samples whole solutions. The last one is that search."""
SEARCHING = ("llama.cpp: peer=llama", "vLLM: peer=vllm", "tot, one answer: search=cot", "tot, search:")
"""The default ways for other tasks, such as programs. The last one is the task's default search."""
TITLE = "answers, one question at a time"
_TRIAL_TOKENS = 48
"""Tokens of the texts that choose a setting."""
_CONTEXT = 8192
"""Tokens of a prompt and its samples."""


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
        answering = open_peers(asked, base, peers, questions[0], bench, stack) if peers else {}
        for name, work in works.items():
            answering[name] = partial(_solved, work.task, work.config, local_decoders(work.config, stack))
        if not answering:
            raise SideError("no way can run: install a peer with `make peers`, or add a way of tot, such as search=cot")
        cells = bench.compare(
            TITLE,
            {name: partial(settled, answering[name]) for name in ways if name in answering},
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
    return EvaluationRun.of({**asked.rows, **local, **options})


def default_ways(base: EvaluationRun) -> tuple[str, ...]:
    """Return the ways that suit the task's default search."""
    return SEARCHING if getattr(base.parts["search"], "aggregate", "best") == "best" else VOTING


def _solved(task: Task, config: SearchConfig, decoders: Sequence[LocalDecoder], question: Question) -> Measured:
    seconds, solution = searched(decoders, task, question.text, config)
    spent = {"seconds": seconds, "tokens": solution.usage.new_tokens}
    answer = {"answer": solution.answer, "certainty": solution.certainty}
    score = CheckedTask(task).score(solution.answer, question.reference)
    return {**spent, **answer, "index": question.index, "score": score}


class PeerDecoder:
    """A decoder whose texts llama.cpp or vLLM samples, from the token ids of our model."""

    def __init__(self, process: peer.PeerProcess, codec: TextCodec, ends: Sequence[int]) -> None:
        self._process, self._codec, self._ends = process, codec, list(ends)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample the requests one after another. Raises SideError if a text ends at a string, or the peer fails."""
        return [completion for request in requests for completion in self._sample(request)]

    def _sample(self, request: Request) -> Iterator[Completion]:
        sampling = request.sampling
        if sampling.stop:
            raise SideError(
                f"a text ends at the string {sampling.stop[0]!r}, and peers end texts at tokens: use a model with a "
                "chat template"
            )
        options = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_k", "top_p", "min_p")}
        prompt = self._codec.encode_prompt(request.prompt)
        options |= {"ends": self._ends, "seed": sampling.seed % 2**31}
        for tokens in self._process.complete(prompt, sampling.n, **options)["samples"]:
            ended = tokens[-1] in self._ends
            usage = Usage(prompt_tokens=len(prompt), new_tokens=len(tokens))
            text = self._codec.decode(tokens[:-1] if ended else tokens)
            yield Completion(text, tuple(tokens), 0.0, "eos" if ended else "length", usage)


def open_peers(
    asked: Options,
    base: EvaluationRun,
    ways: Mapping[str, PeerWay],
    first: Question,
    bench: Bench,
    stack: ExitStack,
) -> dict[str, Callable[[Question], Measured]]:
    """Return a function for each available peer that answers a question. Ways with equal settings share a process."""
    decoder = open_decoders(base.config.model, stack)["generate"]
    if not isinstance(decoder, LocalDecoder):
        bench.say(f"{' and '.join(ways)}: left out, peers get the token ids of a local model, and --model has none")
        return {}
    codec, filters = decoder.engine.codec, base.config.filters_for(base.task)["generate"]

    def start(way: PeerWay, setting: peer.Setting, own: ExitStack) -> peer.PeerProcess:
        if way.peer == "vllm":
            return peer.vllm_process(asked.model, asked.vllm, own, setting, context=_CONTEXT)
        return peer.llama_process(asked.model, asked.llama, own, setting, cells=_CONTEXT)

    def config(way: PeerWay, process: peer.PeerProcess, ends: Sequence[int]) -> SearchConfig:
        """Return the options of one answer or a vote of whole solutions."""
        search = "cot" if way.samples == 1 else f"self-consistency:samples={way.samples}"
        models = Models.of(Model(decoder=PeerDecoder(process, codec, ends)))
        return work_of(asked, {"search": search}).config.model_copy(update={"model": models, **filters})

    def trial(way: PeerWay, setting: peer.Setting) -> dict[str, float]:
        with ExitStack() as own:
            options = config(way, start(way, setting, own), ())
            for tokens in (1, _TRIAL_TOKENS):
                seconds, _ = searched([], base.task, first.text, options.model_copy(update={"max_tokens": tokens}))
            return {"": seconds}

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
            asking[name] = partial(_solved, base.task, config(way, processes[key], sorted(codec.end_ids)), [])
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
