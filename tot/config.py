"""SearchConfig: how questions are searched: the model, what decodes on it, the search and its parts, the budget."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tot.decoders.budget import Budget
from tot.decoders.decoder import (
    METHODS,
    REMOTE,
    Decoder,
    checked_options,
    find_decoder,
    find_method,
    load_decoder,
)
from tot.decoders.errors import ModelError, OptionError, readable, unknown
from tot.decoders.methods.method import Method
from tot.decoders.models.model_names import Quantize, find_model, has_chat_template, warn_of_no_template
from tot.decoders.remote.decoder import RemoteDecoder
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.request import Purpose
from tot.llm.filters import FILTERS, filters_of
from tot.registry import SEARCHES, load_task, named, parts_of
from tot.running import in_daemon_thread
from tot.search.base import Search
from tot.task.checked import user_code
from tot.task.task import Task

_SECRET = re.compile(r"(?i)(?:^|[_-])(?:key|secret|password|credentials?|auth|authorization|token)\s*=")
_USER_IN_URL = re.compile(r"//[^/@\s]*@")
_OF_ENGINE = ("tokenizer", "dtype", "device", "kv_budget", "quantize")
"""Options that are the engine's, whatever decodes on it."""


def _short(dtype: Any) -> Any:
    """The short name of a number format. Raises OptionError for an unknown one."""
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(str(dtype).removeprefix("torch."), dtype)
    if short not in ("auto", "bf16", "fp16", "fp32"):
        raise OptionError(f"dtype {dtype!r} is not known: choose auto, bf16, fp16 or fp32")
    return short


def _pairs(options: Sequence[Any]) -> dict[str, str]:
    """Options from name=value texts. Raises OptionError for one that can't be read."""
    split = [str(option).partition("=") for option in options]
    for option, (name, equals, _) in zip(options, split, strict=True):
        if not (name.strip() and equals) or name.strip() in _OF_ENGINE:
            raise OptionError(f"--decoder-option {option!r} can't be read: write NAME=VALUE, such as k=4")
    return {name.strip(): value.strip() for name, _, value in split}


class SearchConfig(BaseModel):
    """How to search: the model, its decoder, the search and its parts, sampling and budget.

    `solve`, `evaluate`, the command line, YAML files, results folders and checkpoints all use these fields. Parts are
    texts ("mcts:iterations=20") or objects; `to_json` writes texts, which `of` reads again.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), coerce_numbers_to_str=True
    )

    model: Any = Field(
        "smollm2-135m",
        description="A name (tot models), a hub id, a folder or a .gguf file; none for no model.",
    )
    """Or a loaded model. A named model stays open for the next call; `close_models()` releases its memory."""
    decoder: Any = Field("auto", description="A decoder, or purpose=decoder pairs (generate, evaluate, answer).")
    """A method's name, a decoder object, which has its own model, or a mapping from purpose to either. Names share one
    engine. A purpose left out uses "auto" there; with objects alone, the decoder that generates."""
    model_options: dict[str, Any] = Field(
        {},
        description="An option of the decoder, as name=value: k=4, k_config=2,2,1, draft=early-exit:6.",
        json_schema_extra={"flag": "--decoder-option"},
    )
    """The decoder's own options, and the tokenizer of a loaded model."""
    dtype: Annotated[Literal["auto", "bf16", "fp16", "fp32"], BeforeValidator(_short)] = Field(
        "auto", description="auto: bf16 where the machine computes in it."
    )
    quantize: Quantize = Field(
        "auto",
        description="gguf: weights as a .gguf file has them, in four to eight bits. int8-dynamic: in eight. Inputs are "
        "rounded to eight bits. For Llama-like models on CPUs. auto: gguf for such a file, where no dtype is given.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    kv_budget: str | None = Field(None, description="Size of the key-value cache, in tokens or bytes (1.5GiB).")
    search: Any = Field(
        None,
        description="bfs, dfs, best-first, mcts, rap, refine, act, cot, self-consistency or best-of-n, with "
        "options after a colon: mcts:iterations=20,exploration=2. The task's own by default, as for the next two.",
    )
    generator: Any = Field(
        None, description="Where thoughts come from: sample, continue, propose or enumerate, with options likewise."
    )
    evaluator: Any = Field(
        None,
        description="How states are valued: likelihood, value, classify, vote, heuristic, prior, confidence, logprob, "
        "agreement, random or reward-model, with options likewise.",
    )
    tools: tuple[Any, ...] = Field(
        (),
        description="A function that the model may call: calculator, or path/to/file.py:name; once for each.",
        json_schema_extra={"flag": "--tool"},
    )
    """Functions with type hints, or their names."""
    prompts: Literal["papers", "chat"] | None = Field(
        None,
        description="papers: few-shot prompts; chat: as a chat model is asked, in its own words. By default chat for "
        "models with a chat template.",
    )
    """None takes few-shot prompts where the task has no others, or the search or the decoder needs them (RAP, FastCoT,
    PDOS)."""
    thoughts: int | None = Field(None, description="Thoughts proposed after each state (n).")
    breadth: int | None = Field(None, description="States kept at each level (b).")
    depth: int | None = Field(None, description="Depth of the tree (T); the task's own by default.")
    max_tokens: int | None = Field(None, ge=1, description="Most new tokens of any text.")
    temperature: float | None = Field(
        None, ge=0, description="Temperature of the thoughts, 0.7 by default; the papers use 1."
    )
    top_k: int | None = Field(
        None, description="Sample from the k likeliest tokens; by default as the model's generation_config says."
    )
    top_p: float | None = Field(
        None, description="Sample from the fewest tokens that hold this share; by default likewise."
    )
    min_p: float | None = Field(
        None, description="Leave out tokens below this share of the likeliest; by default likewise."
    )
    seed: int = Field(0, description="Seed of the run.")
    budget: Budget | None = None
    """Limits of a search; a search that reaches one returns its best so far."""
    reproducible: bool = Field(False, description="Compute in float32: the same tree every time.")
    """In float32 "ar" replaces "auto", whose choices depend on the clock."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        """Read the spellings of flags and files: decoder_option and tool as lists, budget_tokens, model "none"."""
        if not isinstance(given, Mapping):
            return given
        found = dict(given)
        limits = {name: found.pop(f"budget_{name}") for name in Budget.model_fields if f"budget_{name}" in found}
        if limits:
            found["budget"] = limits
        if found.get("model") == "none":
            found["model"] = None
        options = found.pop("decoder_option", None) or found.get("model_options")
        if isinstance(options, str | list | tuple):
            found["model_options"] = _pairs([options] if isinstance(options, str) else options)
        tools = found.pop("tool", None) or found.get("tools") or ()
        return {**found, "tools": (tools,) if isinstance(tools, str) else tuple(tools)}

    @classmethod
    def of(cls, config: SearchConfig | None, options: Mapping[str, Any]) -> Self:
        """`config` with some options changed; unknown names are the decoder's options. Raises OptionError."""
        known = {name: value for name, value in options.items() if name in cls.names()}
        others = {name: value for name, value in options.items() if name not in known}
        base = {} if config is None else dict(config)
        try:
            made = cls(**{**base, **known})
        except ValidationError as error:
            raise OptionError(readable(error)) from None
        return made.model_copy(update={"model_options": {**made.model_options, **others}}) if others else made

    @classmethod
    def names(cls) -> set[str]:
        """The names of options, in Python, in files and as flags."""
        return {*cls.model_fields, "decoder_option", "tool", *(f"budget_{name}" for name in Budget.model_fields)}

    def to_json(self, secrets: bool = False) -> dict[str, Any]:
        """Write the options as JSON data, objects by name; keys and passwords only with `secrets`."""
        options = [f"{name}={as_text(value)}" for name, value in self.model_options.items() if name != "tokenizer"]
        if not secrets:
            options = [_USER_IN_URL.sub("//", option) for option in options if not _SECRET.search(option)]
        tools = [getattr(tool, "__name__", str(tool)) for tool in self.tools]
        budget = {f"budget_{name}": limit for name, limit in (self.budget or Budget()).model_dump().items()}
        parts = {name: as_text(getattr(self, name)) for name in ("decoder", "search", "generator", "evaluator")}
        special = {"model", "model_options", "tools", "budget", *parts}
        others = {name: getattr(self, name) for name in type(self).model_fields if name not in special}
        found = {
            "model": as_text(self.asked_model) or "none",
            **parts,
            "decoder_option": options,
            "tool": tools or None,
        }
        return {name: value for name, value in {**found, **others, **budget}.items() if value is not None}

    @property
    def loading(self) -> dict[str, Any]:
        """The options of `load_decoder` that differ from its defaults."""
        given = {name: getattr(self, name) for name in ("dtype", "device", "kv_budget", "quantize")}
        return {name: value for name, value in given.items() if value not in (None, "auto")} | self.model_options

    def suited(self, task: Task | type[Task] | str) -> Task:
        """The task, with the prompts that were chosen, or that suit the model.

        Raises OptionError for a task or prompts that are not known, TaskError for a file that can't be run.
        """
        found = load_task(task)
        if self.prompts is not None:
            return found.in_chat() if self.prompts == "chat" else found.in_papers()
        if found.prompts == "chat" or not found.chat:
            return found
        search = named(found.search if self.search is None else self.search, SEARCHES)
        few_shot = isinstance(search, Search) and search.few_shot
        return found.in_chat() if not few_shot and self._chats() else found

    def _chats(self) -> bool:
        """Whether messages are put into a chat format where thoughts come from, and no method needs other prompts."""
        chosen = {purpose: _made(each) for purpose, each in self.decoders.items()}
        names = {each for each in chosen.values() if isinstance(each, str) and each not in REMOTE}
        if any(find_method(name).few_shot for name in names):
            return False
        asked = chosen["generate"]
        if not isinstance(asked, str):
            if getattr(getattr(asked, "tokenizer", None), "chat_template", "") is None:
                warn_of_no_template()
            return bool(getattr(asked, "chats", False))
        if asked in REMOTE:
            return bool(self.model_options.get("api", "chat") == "chat")
        if self.model is None:
            return False
        if not isinstance(self.model, str | Path):
            chats = getattr(self.model_options.get("tokenizer"), "chat_template", None) is not None
        else:
            try:
                chats = has_chat_template(self.model)
            except (OSError, ModelError):  # it is said when the model is loaded
                return False
        if not chats:
            warn_of_no_template()
        return chats

    def parts(self, task: Task) -> dict[str, Any]:
        """The search, the generator and the evaluator, by kind. Raises OptionError for what is not known."""
        return parts_of(
            task,
            *(self.search, self.generator, self.evaluator),
            tools=self.tools,
            search_options={name: getattr(self, name) for name in ("thoughts", "breadth", "depth")},
            generator_options={"temperature": self.temperature},
        )

    @property
    def decoders(self) -> dict[Purpose, str | Decoder]:
        """What each purpose is asked of. Raises OptionError for what is no purpose, or no decoder."""
        purposes: tuple[Purpose, ...] = get_args(Purpose)
        given: Any = self.decoder
        if isinstance(given, str) and "=" in given:
            given = _by_purpose(given)
        elif not isinstance(given, Mapping):
            given = dict.fromkeys(purposes, given)
        for purpose, each in given.items():
            if purpose not in purposes:
                raise OptionError(unknown("purpose", str(purpose), purposes))
            if isinstance(each, str) and ".py:" not in each and each not in (*METHODS, *REMOTE):
                raise OptionError(unknown("decoder", each, (*METHODS, *REMOTE)))
            if isinstance(each, type):
                raise OptionError(f"decoder={each.__name__} is a class: give an object of it, {each.__name__}(...)")
            if not isinstance(each, str) and not callable(getattr(each, "generate", None)):
                raise OptionError(
                    f"decoder={each!r} has no method 'generate': give a name, such as ar, or an object whose "
                    "generate(requests) returns a list of completions, request.sampling.n for each request"
                )
        if not given or any(isinstance(each, str) for each in given.values()):
            return {**dict.fromkeys(purposes, "auto"), **given}
        return {**dict.fromkeys(purposes, given.get("generate", next(iter(given.values())))), **given}

    @property
    def asked_model(self) -> Any:
        """The model, or its name, wherever it runs: that of the names, else the first decoder object's that has one."""
        chosen = self.decoders.values()
        if any(isinstance(each, str) for each in chosen):
            return self.model
        models = (getattr(each, "model", None) for each in sorted(chosen, key=_is_remote))
        return next((found for found in models if found is not None), None)

    @property
    def weights(self) -> Any:
        """The same; None where no model runs here, all being asked of servers."""
        return None if all(map(_is_remote, self.decoders.values())) else self.asked_model

    def filters_for(self, task: Task) -> dict[str, float]:
        """Which tokens are drawn from: as given, for the rest as the model says, else, of a model that runs here, as
        the task does. Raises OptionError."""
        default = {} if self.weights is None else task.filters
        return filters_of(self.weights, {name: getattr(self, name) for name in FILTERS}, default)

    def exact(self) -> SearchConfig:
        """The same; where it is to be reproducible, in float32, by "ar" for "auto", which follows the clock.

        Raises OptionError where something else was asked for then, or a server computes.
        """
        if not self.reproducible:
            return self
        chosen = self.decoders.values()
        if any(map(_is_remote, chosen)):
            raise OptionError(
                "reproducible runs compute in float32 here, and what a server computes is its own affair: leave "
                "reproducible out, or take a decoder other than openai"
            )
        for each in chosen:
            found = str(getattr(getattr(each, "model", None), "dtype", "torch.float32"))
            if found != "torch.float32":
                raise OptionError(f"reproducible runs compute in float32, and this decoder's model is in {found}")
        if not any(isinstance(each, str) for each in chosen):
            return self
        if self.dtype not in ("auto", "fp32"):
            raise OptionError(f"reproducible runs compute in float32: leave dtype={self.dtype!r} out")
        if self.quantize not in ("auto", "none"):
            raise OptionError(f"reproducible runs compute in float32: leave quantize={self.quantize!r} out")
        decoder: Any = {purpose: "ar" if each == "auto" else each for purpose, each in self.decoders.items()}
        if isinstance(self.decoder, str) and "=" not in self.decoder:
            decoder = decoder["generate"]
        return self.model_copy(update={"decoder": decoder, "dtype": "fp32"})

    async def aopen(self, stack: ExitStack) -> dict[Purpose, Decoder]:
        """`open` in a thread. If this is cancelled, nothing waits for the model, which is closed once it is loaded."""
        own = ExitStack()
        opening = in_daemon_thread(partial(self.open, own), "tot-load")
        try:
            decoders = await asyncio.wrap_future(opening)
        except BaseException:
            opening.add_done_callback(lambda _: own.close())
            raise
        stack.enter_context(own)
        return decoders

    def open(self, stack: ExitStack) -> dict[Purpose, Decoder]:
        """A decoder for each purpose; those made here share one engine, which the stack closes, as it does connections.

        Raises TotError for a model or an option that can't be had.
        """
        chosen, options = {purpose: _made(each) for purpose, each in self.decoders.items()}, self.loading
        names = {purpose: each for purpose, each in chosen.items() if isinstance(each, str)}
        objects = {purpose: each for purpose, each in chosen.items() if not isinstance(each, str)}
        if options and not names:
            raise OptionError(f"{', '.join(options)}: a decoder object has its model already; leave these out")
        if self.model is None and options:
            known = {*_OF_ENGINE, *(option for name in names.values() for option in _options_of(name))}
            if other := [option for option in options if option not in known]:  # a file may keep those of a model
                raise OptionError(unknown("option", other[0], {*type(self).model_fields, *known}))
        if self.model is None or not names:
            return objects
        first, *others = sorted(dict.fromkeys(names.values()), key=lambda name: name in REMOTE)
        own = {name: _options_of(name) for name in (first, *others)}
        # The first gets what is nobody's own, too: it refuses what it doesn't know.
        ours = {option: value for option, value in options.items() if not any(option in own[name] for name in others)}
        where: dict[str, Any] = {"model": self.model}
        given = ours | _of(own[first], options)
        if first not in REMOTE:
            shared = {option: given.pop(option) for option in _OF_ENGINE if option in given}
            checked_options(first, given)  # what is wrong is said before a model is loaded, or torch
            if isinstance(self.model, str | Path):
                find_model(self.model)
            from tot.decoders.engine.open_models import shared_engine

            where = {"engine": stack.enter_context(shared_engine(self.model, **shared))}
        made: dict[str, Any] = {first: stack.enter_context(load_decoder(first, **where, **given))}
        for name in others:
            where = {"model": self.model} if name in REMOTE else {"engine": made[first].engine}
            made[name] = stack.enter_context(load_decoder(name, **where, **_of(own[name], options)))
        return {**objects, **{purpose: made[name] for purpose, name in names.items()}}


def _by_purpose(text: str) -> dict[str, str]:
    """Decoders by purpose from "generate=seed,evaluate=ar". Raises OptionError."""
    given = [pair.partition("=") for pair in text.split(",")]
    if not all(equals and name for _, equals, name in given):
        raise OptionError(f"--decoder {text!r} can't be read: write generate=NAME,evaluate=NAME")
    return {purpose.strip(): name.strip() for purpose, _, name in given}


def as_text(part: Any) -> str | None:
    """A part as text: names as they are, pairs as flags spell them, objects by their class and options."""
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        return ",".join(f"{name}={as_text(value)}" for name, value in part.items())
    if isinstance(part, list | tuple):
        return ",".join(map(str, part))
    if isinstance(part, Path | int | float):
        return str(part)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(part)) if isinstance(part, BaseModel) else type(part).__name__


def _is_remote(decoder: str | Decoder) -> bool:
    return decoder in REMOTE if isinstance(decoder, str) else isinstance(decoder, RemoteDecoder)


def _made(decoder: str | Decoder) -> str | Decoder:
    """A decoder of one's own that a name stands for; names of decoding methods as they are."""
    if not isinstance(decoder, str) or decoder in REMOTE or isinstance(found := find_decoder(decoder), Method):
        return decoder
    with user_code(f"decoder {decoder}"):
        made: Decoder = found() if isinstance(found, type) else found
    if not callable(getattr(made, "generate", None)):
        raise OptionError(f"decoder {decoder} has no method 'generate': give a class whose objects have one")
    return made


def _options_of(name: str) -> set[str]:
    return set(RemoteOptions.model_fields if name in REMOTE else find_method(name).options.model_fields)


def _of(names: set[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}
