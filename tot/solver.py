"""solve() and asolve(): a task, a question, a model and a search in; a Solution out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from tot.checkpoint import Checkpoint
from tot.decoders.budget import Budget, Meter
from tot.decoders.errors import OptionError, unknown
from tot.decoders.protocol import REMOTE, Decoder
from tot.decoders.remote.decoder import RemoteDecoder
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.request import Purpose, Usage
from tot.evaluators.model import StateEvaluator
from tot.filters import filters_of
from tot.generators.base import ThoughtGenerator
from tot.registry import load_task, parts_of
from tot.search import Search
from tot.search.backends import Backend, DecoderSpec
from tot.search.session import Problem, Watcher
from tot.task import Task
from tot.tree import ThoughtTree

if TYPE_CHECKING:
    from tot.report.profiling import Profile

_T = TypeVar("_T")
_OF_ENGINE = ("tokenizer", "dtype", "device", "kv_budget", "quantize")
"""Options that are the engine's, whatever decodes on it."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a search came to."""

    answer: Any | None
    """Text; a list of actions for a planning task. None where not even the best state holds one."""
    solved: bool
    """True only where the task itself verified the answer."""
    value: float | None
    """The best state's value on the task's scale."""
    tree: ThoughtTree = field(repr=False)
    usage: Usage
    calls: int
    """Samples asked of a decoder."""
    parse_failures: int
    """Replies that could not be read."""
    rejected: int
    """Thoughts that were not legal, or led back to where their path had been."""
    stopped: str | None
    """Why the search ended without what it was after, or early ("no goal among 40 thoughts", "interrupted", "budget:
    tokens (512 of 500)"), or None."""
    filters: Mapping[str, float] = field(default_factory=dict)
    """What narrowed the tokens that were drawn: top_k, top_p, min_p."""
    choices: Mapping[Purpose, str] = field(default_factory=dict)
    """What the decoder `auto` chose, in words, by purpose."""

    def to_json(self) -> dict[str, Any]:
        """The run as it is saved: the result and the tree, with a format version."""
        return {
            "format": "tot.run",
            "version": 2,
            **self.summary(),
            "calls": self.calls,
            "parse_failures": self.parse_failures,
            "rejected": self.rejected,
            "stopped": self.stopped,
            "filters": dict(self.filters),
            "tree": self.tree.to_json(),
        }

    def summary(self) -> dict[str, Any]:
        """Answer, solved, value and usage."""
        usage = {name: getattr(self.usage, name) for name in self.usage.__slots__}
        return {"answer": self.answer, "solved": self.solved, "value": self.value, "usage": usage}


def solve(
    task: Task | type[Task] | str,
    question: str,
    *,
    model: str | Path | Any | None = "smollm2-135m",
    decoder: DecoderSpec = "ar",
    search: Search | str | None = None,
    generator: ThoughtGenerator | str | None = None,
    evaluator: StateEvaluator | str | None = None,
    budget: Budget | None = None,
    max_tokens: int | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    problem_id: str | None = None,
    hooks: object | None = None,
    trace: Checkpoint | None = None,
    reproducible: bool = False,
    watch: Watcher | None = None,
    profile: Profile | None = None,
    **model_options: Any,
) -> Solution:
    """Solve one question. Works in a script and inside a running event loop (Jupyter).

    `search`, `generator` and `evaluator` are objects or names with options ("mcts:iterations=20"); None takes the
    task's own; search="rap" sets all three. `model` None is no model, for searches that ask none. `decoder` is a
    method's name, a decoder object, which then has its own model, or one or the other by purpose ({"generate": ...,
    "evaluate": ..., "answer": ...}): names share one engine, and a purpose left out is decoded by "ar" there, or, where
    only objects are given, by the one that generates. `max_tokens` caps every decoded text. `top_k`, `top_p` and
    `min_p` narrow what is drawn, by default as the model's own generation_config does; a task's template may say
    otherwise. `hooks` watch and steer the search (see `tot.search.hooks`). `trace` writes every step down, and takes a
    killed run up again. `reproducible` computes in float32, and `fastcot` with a fixed window: the same tree whatever
    else is packed with it, and when resumed. `profile` is filled with where the time went on the engine, other
    searches' there among it. `model_options` go to `load_decoder` (tokenizer, dtype, device, kv_budget, and the
    decoder's own). A model that is named stays open for the next call; `close_models()` gives its memory back. Ctrl-C
    ends the search with the best answer so far.
    Raises TotError for whatever the caller can put right.
    """
    return run_to_end(
        asolve(
            task,
            question,
            model=model,
            decoder=decoder,
            search=search,
            generator=generator,
            evaluator=evaluator,
            budget=budget,
            max_tokens=max_tokens,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            problem_id=problem_id,
            hooks=hooks,
            trace=trace,
            reproducible=reproducible,
            watch=watch,
            profile=profile,
            keep_best=True,
            **model_options,
        )
    )


async def asolve(
    task: Task | type[Task] | str,
    question: str,
    *,
    model: str | Path | Any | None = "smollm2-135m",
    decoder: DecoderSpec = "ar",
    search: Search | str | None = None,
    generator: ThoughtGenerator | str | None = None,
    evaluator: StateEvaluator | str | None = None,
    budget: Budget | None = None,
    max_tokens: int | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    problem_id: str | None = None,
    hooks: object | None = None,
    trace: Checkpoint | None = None,
    reproducible: bool = False,
    watch: Watcher | None = None,
    profile: Profile | None = None,
    keep_best: bool = False,
    **model_options: Any,
) -> Solution:
    """`solve` as a coroutine: many at once on one decoder object share its forward passes.

    Cancelling it raises CancelledError, or with `keep_best` ends it with the best answer so far.
    """
    task = load_task(task)
    parts = parts_of(task, search, generator, evaluator)
    if budget is not None and not isinstance(budget, Budget):
        raise OptionError(f"budget={budget!r}: give a Budget, such as Budget(tokens=500)")
    by_purpose(decoder)  # what can't be asked, and a question that can't be, are refused before a model is loaded
    task.start(question)
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    filters = filters_of(None if runs_elsewhere(decoder) else model_of(decoder, model), given)
    if reproducible:
        model_options = exact(decoder, model_options)
    if profile is not None and (model is None or runs_elsewhere(decoder)):
        from tot.report.profiling import NO_ENGINE

        raise OptionError(NO_ENGINE)
    with ExitStack() as stack:
        decoders = await asyncio.to_thread(open_decoders, decoder, model, model_options, stack)
        if profile is not None:
            stack.enter_context(profile.recording(decoders.values()))
        problem = Problem(
            task,
            question,
            Backend(decoders),
            meter=Meter(budget),
            **parts,
            seed=seed,
            problem_id=problem_id,
            max_tokens=max_tokens,
            filters=filters,
            watch=watch,
            hooks=hooks,
            trace=trace,
        )
        answer = None
        try:
            await problem.run()
            answer = await problem.answer()
        except asyncio.CancelledError:
            if not keep_best:
                raise
            problem.stopped = "interrupted"
        return replace(conclude(problem, answer), choices=_choices(decoders))


def conclude(problem: Problem, answer: Any | None = None) -> Solution:
    """The solution as things stand: without an answer of its own, what the best state's text says."""
    growth, task, tree = problem.growth, problem.task, problem.tree
    if answer is None:
        answer = growth.answer_at(growth.best)
    # A task whose states hold their answers, and that reads none from text, has none here.
    reads = type(task).answer_at is Task.answer_at or type(task).parse_answer is not Task.parse_answer
    if answer is None and growth.best.thought is not None and reads:
        answer = task.parse_answer(tree.state(growth.best).text)
    tree.choose(growth.best)
    nodes = list(tree)
    return Solution(
        answer=answer,
        solved=answer is not None and growth.verify(answer),
        value=growth.best.value,
        tree=tree,
        usage=problem.meter.total,
        calls=problem.calls,
        parse_failures=sum(node.parse_failures for node in nodes),
        rejected=sum(node.rejected for node in nodes),
        stopped=problem.stopped or growth.stopped,
        filters=problem.filters,
    )


def exact(decoder: DecoderSpec, options: dict[str, Any]) -> dict[str, Any]:
    """Model options with float32, and a window for FastCoT that doesn't follow what is packed beside a request.

    Raises OptionError where something else was asked for, or a server computes.
    """
    from tot.decoders.methods.fastcot import FIXED, Buffers

    chosen = by_purpose(decoder).values()
    if any(map(_is_remote, chosen)):
        raise OptionError(
            "reproducible runs compute in float32 here, and what a server computes is its own affair: leave "
            "reproducible out, or take a decoder other than openai"
        )
    for each in chosen:
        found = str(getattr(getattr(each, "model", None), "dtype", "torch.float32"))
        if found != "torch.float32":
            raise OptionError(f"reproducible runs compute in float32, and this decoder's model is in {found}")
        drafter = getattr(each, "drafter", None)
        if isinstance(drafter, Buffers) and drafter.window is None:
            raise OptionError(
                "this decoder's window, and so its answers, follow what is packed beside a request: for reproducible "
                f"runs give it one, such as window={FIXED}"
            )
    if not any(isinstance(each, str) for each in chosen):
        return options
    if options.get("dtype", "auto") not in ("auto", "fp32", "float32"):
        raise OptionError(f"reproducible runs compute in float32: leave dtype={options['dtype']!r} out")
    if options.get("quantize") is not None:
        raise OptionError(f"reproducible runs compute in float32: leave quantize={options['quantize']!r} out")
    if "fastcot" in chosen and options.get("window") is None:
        options = {**options, "window": FIXED}
    return {**options, "dtype": "fp32"}


def runs_elsewhere(decoder: DecoderSpec) -> bool:
    """True where no model runs here: all is asked of a server."""
    return all(map(_is_remote, by_purpose(decoder).values()))


def model_of(decoder: DecoderSpec, model: Any) -> Any:
    """The model of what is named; of objects alone, the first that has one here."""
    chosen = by_purpose(decoder).values()
    if any(isinstance(each, str) for each in chosen):
        return model
    models = (getattr(each, "model", None) for each in sorted(chosen, key=_is_remote))
    return next((found for found in models if found is not None), None)


def by_purpose(decoder: DecoderSpec) -> dict[Purpose, str | Decoder]:
    """What each purpose is asked of. Raises OptionError for a purpose that isn't one, and for what is no decoder."""
    purposes: tuple[Purpose, ...] = get_args(Purpose)
    given: Mapping[Purpose, str | Decoder] = (
        decoder if isinstance(decoder, Mapping) else dict.fromkeys(purposes, decoder)
    )
    for purpose, each in given.items():
        if purpose not in purposes:
            raise OptionError(unknown("purpose", str(purpose), purposes))
        if isinstance(each, type):
            raise OptionError(f"decoder={each.__name__} is a class: give an object of it, {each.__name__}(...)")
        if not isinstance(each, str) and not callable(getattr(each, "generate", None)):
            raise OptionError(
                f"decoder={each!r} has no method 'generate': give a name, such as ar, or an object whose "
                "generate(requests) returns a list of completions, request.sampling.n for each request"
            )
    if not given or any(isinstance(each, str) for each in given.values()):
        return {**dict.fromkeys(purposes, "ar"), **given}
    return {**dict.fromkeys(purposes, given.get("generate", next(iter(given.values())))), **given}


def open_decoders(
    decoder: DecoderSpec, model: Any, options: dict[str, Any], stack: ExitStack
) -> dict[Purpose, Decoder]:
    """A decoder for each purpose; those made here share one engine, which the stack closes, as it does connections."""
    chosen = by_purpose(decoder)
    names = {purpose: each for purpose, each in chosen.items() if isinstance(each, str)}
    objects = {purpose: each for purpose, each in chosen.items() if not isinstance(each, str)}
    if options and not names:
        raise OptionError(f"{', '.join(options)}: a decoder object has its model already; leave these out")
    if model is None or not names:
        return objects
    from tot.decoders.decoder import checked_options, load_decoder
    from tot.decoders.open_models import shared_engine

    first, *others = sorted(dict.fromkeys(names.values()), key=lambda name: name in REMOTE)
    own = {name: _options_of(name) for name in (first, *others)}
    # The first gets what is nobody's own, too: it refuses what it doesn't know.
    ours = {option: value for option, value in options.items() if not any(option in own[name] for name in others)}
    where: dict[str, Any] = {"model": model}
    given = ours | _of(own[first], options)
    if first not in REMOTE:
        shared = {option: given.pop(option) for option in _OF_ENGINE if option in given}
        checked_options(first, given)  # what is wrong is said before a model is loaded
        where = {"engine": stack.enter_context(shared_engine(model, **shared))}
    made: dict[str, Any] = {first: stack.enter_context(load_decoder(first, **where, **given))}
    for name in others:
        where = {"model": model} if name in REMOTE else {"engine": made[first].engine}
        made[name] = stack.enter_context(load_decoder(name, **where, **_of(own[name], options)))
    return {**objects, **{purpose: made[name] for purpose, name in names.items()}}


def _choices(decoders: Mapping[Purpose, Decoder]) -> dict[Purpose, str]:
    from tot.decoders.decoder import LocalDecoder

    return {
        purpose: decoder.choices[purpose]
        for purpose, decoder in decoders.items()
        if isinstance(decoder, LocalDecoder) and purpose in decoder.choices
    }


def _is_remote(decoder: str | Decoder) -> bool:
    return decoder in REMOTE if isinstance(decoder, str) else isinstance(decoder, RemoteDecoder)


def _options_of(name: str) -> set[str]:
    from tot.decoders.decoder import METHODS

    if name in REMOTE:
        return set(RemoteOptions.model_fields)
    return set(METHODS[name].options.model_fields) if name in METHODS else set()


def _of(names: set[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def run_to_end(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run to the end, in a thread of its own where this one has an event loop running."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    result: Future[_T] = Future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def work() -> None:
        try:
            result.set_result(loop.run_until_complete(task))
        except BaseException as error:  # handed to the caller's thread  # noqa: BLE001
            result.set_exception(error)
        finally:
            loop.close()

    threading.Thread(target=work, name="tot-solve", daemon=True).start()
    try:
        return result.result()
    except KeyboardInterrupt:
        loop.call_soon_threadsafe(task.cancel)
        return result.result()
