"""solve(), asolve() and astream(): solve one question of a task with a model and a search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack

from tot.answers import Leader
from tot.config import SearchConfig
from tot.decoders.budget import Budget
from tot.decoders.decoder import Decoder
from tot.decoders.errors import OptionError, unknown
from tot.decoders.request import Effort, ThinkingOptions, Usage
from tot.evaluators.base import Evaluator
from tot.generators.base import Generator
from tot.llm.decoders import open_decoders_in_thread
from tot.llm.models import Model
from tot.run import Run, Watcher
from tot.running import run_to_end
from tot.search.base import Search
from tot.search.calibration import calibrations_for
from tot.search.checkpoint import Checkpoint
from tot.solution import Solution
from tot.task.checked import CheckedTask
from tot.task.task import Task
from tot.tree.tree import ThoughtTree

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    OneModel: TypeAlias = Model | str | Path | PreTrainedModel | Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class SearchEvent:
    """An event of a running search. Its properties are as of the moment when they are read."""

    run: Run

    @property
    def tree(self) -> ThoughtTree:
        return self.run.tree

    @property
    def leader(self) -> Leader | None:
        """The answer that the search would give without further calls, and its certainty; None without an answer."""
        return self.run.answers.leading()

    @property
    def usage(self) -> Usage:
        return self.run.meter.total

    @property
    def seconds(self) -> float:
        """Seconds since the start of the search."""
        return self.run.meter.seconds


class SearchStarted(SearchEvent):
    """The model is loaded, and the tree has its root."""


class SearchStep(SearchEvent):
    """Steps of the search have ended: the tree has new thoughts or values."""


@dataclass(frozen=True, slots=True)
class SearchFinished(SearchEvent):
    """The search has ended."""

    solution: Solution


class SolveOptions(TypedDict, total=False):
    """The keywords of `solve`. They override the fields of its `config`, and have the same defaults.

    None is the default, too, except for `model`.
    """

    model: OneModel | Mapping[str, OneModel] | None
    """A Model, a name or path, a loaded model, a function from text to text (plain or async), None for no model, or a
    mapping from purpose (generate, evaluate, answer, escalate) to these."""
    decoder: str | Decoder | Mapping[str, str | Decoder] | None
    """Fills `Model.decoder`: a name, an object, or a mapping from purpose to either."""
    dtype: Literal["auto", "bf16", "fp32"] | None
    """Fills `Model.engine.dtype`."""
    tokenizer: Any
    """Fills `Model.tokenizer`, for a loaded model."""
    search: str | Search | None
    """The search, as text ("mcts:iterations=20") or object; the default is the task's own."""
    generator: str | Generator | None
    """The thought generator, likewise."""
    evaluator: str | Evaluator | None
    """The state evaluator, likewise."""
    tools: Sequence[str | Callable[..., Any]] | None
    """Functions with type hints that the model can call, or their names."""
    prompts: Literal["papers", "chat"] | None
    """"chat" for prompts in the model's chat format, "papers" for few-shot prompts; by default what suits the model,
    the search and the decoder."""
    max_tokens: int | None
    """Maximum number of new tokens per text."""
    thinking: ThinkingOptions | Effort | int | str | None
    """How a model that thinks may think before a text, 4,096 tokens by default: "off", "low", "medium", "high", a
    number of tokens, or `ThinkingOptions`."""
    temperature: float | None
    """Sampling temperature of thoughts, 0.7 by default."""
    budget: Budget | Mapping[str, float] | None
    """Limits (tokens, seconds, nodes, forwards). A search that reaches one returns its best answer so far."""
    seed: int | None
    """Seed of the run, 0 by default."""
    reproducible: bool | None
    """Compute in float32, for the same tree every time."""
    hooks: object | None
    """Functions that watch and steer the search (see `tot.search.hooks`)."""
    checkpoint: Checkpoint | None
    """Records every step, and resumes a killed run."""


def solve(
    task: Task | type[Task] | str,
    question: str,
    config: SearchConfig | None = None,
    **options: Unpack[SolveOptions],
) -> Solution:
    """Solve one question. Works in a script and inside a running event loop (Jupyter).

    Ctrl-C ends the search with the best answer so far.

    Args:
        task: A task, its class, its name, or "path/to/file.py:ClassName".
        question: The question, as text.
        config: All options of the run.
        **options: The keywords of `SolveOptions`.

    Raises:
        TotError: An error that the caller can fix, such as an unknown keyword.
    """
    return run_to_end(_search(task, question, config, options, keep_best=True))


async def asolve(
    task: Task | type[Task] | str,
    question: str,
    config: SearchConfig | None = None,
    **options: Unpack[SolveOptions],
) -> Solution:
    """Solve one question, as a coroutine. Concurrent calls with one decoder object share its forward passes.

    It takes the arguments of `solve`. Cancelling it raises CancelledError.
    """
    return await _search(task, question, config, options)


async def astream(
    task: Task | type[Task] | str,
    question: str,
    config: SearchConfig | None = None,
    **options: Unpack[SolveOptions],
) -> AsyncGenerator[SearchStarted | SearchStep | SearchFinished, None]:
    """Solve one question, and yield SearchStarted, a SearchStep after every step, and SearchFinished.

    It takes the arguments of `solve`. Closing or cancelling the iterator cancels the search.
    """
    runs = asyncio.Queue[Run | None]()
    searching = asyncio.create_task(_search(task, question, config, options, watch=runs.put_nowait))
    searching.add_done_callback(lambda _: runs.put_nowait(None))
    last: Run | None = None
    try:
        while run := await runs.get():
            yield SearchStarted(run) if last is None else SearchStep(run)
            last = run
        solution = searching.result()
        assert last is not None  # a search that ends has started
        yield SearchFinished(last, solution)
    finally:
        searching.cancel()
        await asyncio.wait([searching])


def _search(
    task: Task | type[Task] | str, question: str, config: SearchConfig | None, options: SolveOptions, **about: Any
) -> Coroutine[Any, Any, Solution]:
    """Return the search of the arguments of `solve`. Raises OptionError with the nearest known name of a keyword."""
    for name in options:
        if name not in (known := SolveOptions.__annotations__):
            raise OptionError(
                f"{unknown('option', name, known)}; options of a decoder or an engine are fields of Model, others of "
                "SearchConfig"
            )
    of_config = {
        name: value
        for name, value in options.items()
        if name in SearchConfig.names() and (value is not None or name == "model")
    }
    about |= {name: options.get(name) for name in ("hooks", "checkpoint")}
    return run_search(task, question, SearchConfig.of(config, of_config), **about)


async def run_search(
    task: Task | type[Task] | str,
    question: str,
    config: SearchConfig,
    *,
    hooks: object | None = None,
    checkpoint: Checkpoint | None = None,
    watch: Watcher | None = None,
    keep_best: bool = False,
) -> Solution:
    """Solve one question with these options.

    `watch` is called with the run at the start and after every step. Cancelling this raises CancelledError; with
    `keep_best`, it returns the best answer so far instead.
    """
    config = config.exact()
    task = config.suited(task)
    parts, filters = config.parts(task), config.filters_for(task)
    CheckedTask(task).start(question)  # reject an invalid question before a model is loaded
    if config.calibration is not None:
        calibrations_for(task, config.calibration)
    with ExitStack() as stack:
        decoders = await open_decoders_in_thread(config.model, stack)
        run = Run(task, question, config, decoders, parts, filters, hooks=hooks, checkpoint=checkpoint, watch=watch)
        return await run.solve(keep_best)
