"""The options of a search, as command lines take them and as files keep them: one model, from which flags are made.

Knows nothing of how a question is searched; what an option means is written where it is used.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, Field
from typer.models import OptionInfo

from tot.decoders.decoder import METHODS, REMOTE
from tot.decoders.errors import OptionError, unknown

if TYPE_CHECKING:
    from tot.config import SearchConfig
    from tot.task import Task


class SearchOptions(BaseModel):
    """How questions are searched, with which model: what `tot solve` and `tot eval` have in common."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    model: Annotated[
        str, typer.Option(help="A name (tot models), a hub id, a folder or a .gguf file; none for no model.")
    ] = "smollm2-135m"
    decoder: Annotated[str, typer.Option(help="A decoder, or purpose=decoder pairs (generate, evaluate, answer).")] = (
        "ar"
    )
    decoder_option: Annotated[
        list[str],
        typer.Option(help="An option of the decoder, as name=value: k=4, k_config=2,2,1, draft=early-exit:6."),
    ] = []
    search: Annotated[
        str | None,
        typer.Option(
            help="bfs, dfs, best-first, mcts, rap, cot, self-consistency or best-of-n, with options after a colon: "
            "mcts:iterations=20,exploration=2. The task's own by default, as for the next two."
        ),
    ] = None
    generator: Annotated[
        str | None, typer.Option(help="Where thoughts come from: sample, propose or enumerate, with options likewise.")
    ] = None
    evaluator: Annotated[
        str | None,
        typer.Option(
            help="How states are valued: likelihood, value, classify, vote, heuristic, prior, confidence, random or "
            "reward-model, with options likewise."
        ),
    ] = None
    thoughts: Annotated[int | None, typer.Option(help="Thoughts proposed after each state (n).")] = None
    breadth: Annotated[int | None, typer.Option(help="States kept at each level (b).")] = None
    depth: Annotated[int | None, typer.Option(help="Depth of the tree (T); the task's own by default.")] = None
    max_tokens: Annotated[int | None, Field(ge=1), typer.Option(help="Most new tokens of any text.")] = None
    temperature: Annotated[
        float | None, Field(ge=0), typer.Option(help="Temperature of the thoughts, 0.7 by default; the papers use 1.")
    ] = None
    top_k: Annotated[
        int | None, Field(ge=0), typer.Option(help="Draw from the k likeliest tokens; by default as the model says.")
    ] = None
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the fewest tokens that hold this share; by default likewise.")
    ] = None
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens below this share of the likeliest; by default likewise.")
    ] = None
    seed: Annotated[int, Field(ge=0), typer.Option(help="Seed of the run.")] = 0
    budget_tokens: Annotated[int | None, Field(ge=0), typer.Option(help="Stop after so many new tokens.")] = None
    budget_forwards: Annotated[int | None, Field(ge=0), typer.Option(help="Stop after so many forward passes.")] = None
    budget_seconds: Annotated[float | None, Field(ge=0), typer.Option(help="Stop after so many seconds of search.")] = (
        None
    )
    budget_nodes: Annotated[int | None, Field(ge=0), typer.Option(help="Stop after so many thoughts.")] = None
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"], typer.Option(help="auto: bf16 where the machine computes in it.")
    ] = "auto"
    quantize: Annotated[
        Literal["none", "int8", "int8-dynamic"],
        typer.Option(help="Weights in eight bits; int8-dynamic: their inputs as well. For Llama-like models on CPUs."),
    ] = "none"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    kv_budget: Annotated[str | None, typer.Option(help="Store of keys and values, in tokens or bytes (1.5GiB).")] = None
    reproducible: Annotated[bool, typer.Option(help="Compute in float32: the same tree every time.")] = False

    @property
    def model_name(self) -> str | None:
        """None for no model."""
        return None if self.model == "none" else self.model

    @property
    def decoders(self) -> str | dict[Any, str]:
        """The decoder's name, or names by purpose. Raises OptionError for those that aren't known or can't be read."""
        if "=" not in self.decoder:
            return _decoder(self.decoder)
        pairs = [pair.partition("=") for pair in self.decoder.split(",")]
        if not all(equals and name for _, equals, name in pairs):
            raise OptionError(f"--decoder {self.decoder!r} can't be read: write generate=NAME,evaluate=NAME")
        return {purpose.strip(): _decoder(name.strip()) for purpose, _, name in pairs}

    @property
    def model_options(self) -> dict[str, Any]:
        """What `load_decoder` is given besides names. Raises OptionError for a pair that can't be read."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "kv_budget": self.kv_budget}
        options["quantize"] = None if self.quantize == "none" else self.quantize
        return {**options, **pairs(self.decoder_option)}

    @property
    def budget(self) -> dict[str, float | None]:
        """The fields of a Budget."""
        return {name: getattr(self, f"budget_{name}") for name in ("tokens", "forwards", "seconds", "nodes")}

    @property
    def filters(self) -> dict[str, float | None]:
        """Which tokens may be drawn, by name; None is the model's own."""
        return {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    def config(self, task: Task) -> SearchConfig:
        """What they mean for a task. Raises OptionError for what is not known."""
        from tot.config import SearchConfig

        same = {name: getattr(self, name) for name in ("max_tokens", "top_k", "top_p", "min_p", "seed", "reproducible")}
        asked = {"model": self.model_name, "decoder": self.decoders, "budget": self.budget, **self.parts(task)}
        return SearchConfig(**asked, **same, model_options=self.model_options)

    def parts(self, task: Task) -> dict[str, Any]:
        """The search, the generator and the evaluator, by kind. Raises OptionError."""
        from tot.registry import parts_of

        named = {name: getattr(self, name) for name in ("search", "generator", "evaluator")}
        search_options = {name: getattr(self, name) for name in ("thoughts", "breadth", "depth")}
        generator_options = {"temperature": self.temperature}
        return parts_of(task, **named, search_options=search_options, generator_options=generator_options)


def _decoder(name: str) -> str:
    if name not in (*METHODS, *REMOTE):
        raise OptionError(unknown("decoder", name, (*METHODS, *REMOTE)))
    return name


def pairs(options: list[str]) -> dict[str, str]:
    """name=value texts as a mapping."""
    split = [option.partition("=") for option in options]
    for option, (name, equals, _) in zip(options, split, strict=True):
        if not (name.strip() and equals) or name.strip() in ("dtype", "device", "kv_budget", "quantize", "tokenizer"):
            raise OptionError(f"--decoder-option {option!r} can't be read: write NAME=VALUE, such as k=4")
    return {name.strip(): value.strip() for name, _, value in split}


def takes(model: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command that has an option for each field of `model` that says so, in place of its parameter `given`.

    `given` is a mapping of those that are on the command line; the others' defaults are the model's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        flags = _flags(model)

        @functools.wraps(command)
        def run(context: typer.Context, **values: Any) -> None:
            given = {name: values.pop(name) for name in flags}
            command(context, given={name: value for name, value in given.items() if is_given(context, name)}, **values)

        parameters: list[inspect.Parameter] = []
        for name, parameter in signature.parameters.items():
            parameters += flags.values() if name == "given" else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def is_given(context: typer.Context, name: str) -> bool:
    """True for what stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _flags(model: type[BaseModel]) -> dict[str, inspect.Parameter]:
    """The model's own options, then those of the model that it extends."""
    flags = {}
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] not in model.__annotations__):
        option = next((copy(each) for each in field.metadata if isinstance(each, OptionInfo)), None)
        if option is not None:
            option.min = next((each.ge for each in field.metadata if isinstance(each, Ge)), None)  # type: ignore[assignment]
            flags[name] = inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None if field.is_required() else field.default,
                annotation=Annotated[field.annotation, option],
            )
    return flags
