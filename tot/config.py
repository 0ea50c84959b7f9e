"""SearchConfig: the options of a run: model, decoder, search, generator, evaluator, sampling and budget."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tot.decoders.budget import Budget
from tot.decoders.decoder import Decoder, LocalDecoder
from tot.decoders.errors import OptionError, readable, unknown
from tot.decoders.machine import MAX_THREADS
from tot.decoders.models.model_names import Quantize
from tot.decoders.request import Purpose
from tot.llm.decoders import (
    OF_ENGINE,
    decoders_by_purpose,
    first_and_escalate,
    instantiate,
    is_remote,
    models_by_purpose,
    need_few_shot,
    open_decoders,
    uses_chat_format,
)
from tot.llm.filters import FILTERS, filters_of
from tot.registry import SEARCHES, load_task, named, parts_of, spec_of
from tot.running import LOADING, in_daemon_thread
from tot.search.base import Search
from tot.task.task import Task

_SECRET = re.compile(r"(?i)(?:^|[_-])(?:key|secret|password|credentials?|auth|authorization|token)\s*=")
_SECRET_VALUE = re.compile(r"(?i)((?:[:,]|[_-])(?:key|secret|password|credentials?|auth|authorization|token)=)[^,]*")
_USER_IN_URL = re.compile(r"//[^/@\s]*@")


def _short(dtype: Any) -> Any:
    """Return the short name of a dtype. Raises OptionError if it is unknown."""
    short = {"float32": "fp32", "bfloat16": "bf16"}.get(str(dtype).removeprefix("torch."), dtype)
    if short not in ("auto", "bf16", "fp32"):
        raise OptionError(unknown("dtype", str(dtype).removeprefix("torch."), ("auto", "bf16", "fp32")))
    return short


def _pairs(options: Sequence[Any]) -> dict[str, str]:
    """Parse options from name=value texts. Raises OptionError if one is invalid."""
    split = [str(option).partition("=") for option in options]
    for option, (name, equals, _) in zip(options, split, strict=True):
        if not (name.strip() and equals) or name.strip() in OF_ENGINE:
            raise OptionError(f"--decoder-option {option!r} can't be read: write NAME=VALUE, such as k=4")
    return {name.strip(): value.strip() for name, _, value in split}


class SearchConfig(BaseModel):
    """Options of a run: model, decoder, search, generator, evaluator, sampling and budget.

    `solve`, `evaluate`, the command line, YAML files, results folders and checkpoints use these fields. The search, the
    generator and the evaluator are texts ("mcts:iterations=20") or objects. `to_json` writes texts that `of` reads.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=(), coerce_numbers_to_str=True
    )

    model: Any = Field(
        "smollm2-135m",
        description="A name (tot models), a hub id, a folder or a .gguf file; none for no model; or purpose=model "
        "pairs (generate, evaluate, answer, escalate).",
    )
    """A name, a path, a loaded model, a function from text to text (plain or async), or a mapping from purpose to
    these. Named models stay loaded for the next call; `close_models()` frees them.

    A purpose that is missing in a mapping uses the model of "generate"; "escalate" sets `escalate`."""
    escalate: Any = Field(
        None, description="A second, larger model, which the search asks where the first is not sure; none for none."
    )
    decoder: Any = Field(
        "auto",
        description="A decoder (path/to/file.py:Name:option=value for yours), or purpose=decoder pairs (generate, "
        "evaluate, answer, escalate).",
    )
    """The name of a method, a decoder object with its own model, or a mapping from purpose to either.

    Each named model has one engine, which its named decoders share. A missing purpose uses "auto"; if all decoders are
    objects, it uses the decoder of "generate". For "escalate", `escalate` names the model, unless its decoder is an
    object."""
    model_options: dict[str, Any] = Field(
        {},
        description="Option of the decoder, as name=value: k=4, k_config=2,2,1, draft=small.gguf.",
        json_schema_extra={"flag": "--decoder-option"},
    )
    """Options of the decoder, and `tokenizer` for a loaded model."""
    dtype: Annotated[Literal["auto", "bf16", "fp32"], BeforeValidator(_short)] = Field(
        "auto", description="auto: bf16 if the machine supports it."
    )
    quantize: Quantize = Field(
        "auto",
        description="gguf: 4- to 8-bit weights, as stored in a .gguf file, and inputs rounded to 8 bits, on a CPU. "
        "none: floating point. auto: gguf for a .gguf file, unless a dtype is given.",
    )
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N.")
    kv_budget: str | None = Field(None, description="Size of the key-value cache, in tokens or bytes (1.5GiB).")
    threads: int | None = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="Number of threads on the CPU; by default all processors that the process may use, at most "
        "OMP_NUM_THREADS.",
    )
    prefix_cache: bool = Field(
        True,
        description="Keep computed prompts in the cache folder, so that later runs start sooner.",
    )
    search: Any = Field(
        None,
        description="bfs, dfs, best-first, mcts, rap, ab-mcts, refine, act, cot, self-consistency or "
        "best-of-n, with options after a colon: mcts:iterations=20,exploration=2. The default of search, generator and "
        "evaluator is the task's own.",
    )
    generator: Any = Field(
        None, description="Thought generator: sample, continue, propose or enumerate, with options like --search."
    )
    evaluator: Any = Field(
        None,
        description="State evaluator: likelihood, value, classify, vote, heuristic, prior, confidence, logprob, "
        "measured or random, with options like --search.",
    )
    tools: tuple[Any, ...] = Field(
        (),
        description="Function that the model can call: calculator, or path/to/file.py:name. Repeat for more functions.",
        json_schema_extra={"flag": "--tool"},
    )
    """Functions with type hints, or their names."""
    prompts: Literal["papers", "chat"] | None = Field(
        None,
        description="papers: our few-shot prompts, in the papers' form. chat: prompts in the model's chat format. The "
        "default is chat for models with a chat template.",
    )
    """None uses few-shot prompts if the task has no others, or if the search or the decoder needs them (RAP, FastCoT,
    PDOS)."""
    thoughts: int | None = Field(None, description="Number of thoughts per state (n).")
    breadth: int | None = Field(None, description="Number of states to keep at each level (b).")
    depth: int | None = Field(
        None,
        description="Depth of the tree (T): T - 1 levels of thoughts, then the answer. The default is the task's own.",
    )
    until: float | None = Field(
        None,
        description="Stop a vote when the probability that its leader stays ahead reaches this: self-consistency, bfs "
        "and mcts with votes.",
    )
    max_tokens: int | None = Field(None, ge=1, description="Maximum number of new tokens per text.")
    temperature: float | None = Field(
        None, ge=0, description="Sampling temperature of thoughts, 0.7 by default; the papers use 1."
    )
    top_k: int | None = Field(
        None, description="Sample from the k most likely tokens; the default is the model's generation_config."
    )
    top_p: float | None = Field(
        None, description="Sample from the smallest set of tokens with this total probability; same default."
    )
    min_p: float | None = Field(
        None, description="Exclude tokens below this fraction of the top probability; same default."
    )
    certainty: str | None = Field(
        None,
        description="File with your own certainty curves, as written by tot calibrate; by default the shipped one.",
    )
    seed: int = Field(0, description="Seed of the run.")
    budget: Budget | None = None
    """Limits of a search. A search that reaches one returns its best answer so far."""
    reproducible: bool = Field(False, description="Compute in float32: the same tree every time.")
    """It also replaces the decoder "auto", whose choices depend on timing, by "ar"."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        """Convert the spellings of flags and files: decoder_option and tool as lists, budget_tokens."""
        if not isinstance(given, Mapping):
            return given
        fields = first_and_escalate(given)
        limits = {name: fields.pop(f"budget_{name}") for name in Budget.model_fields if f"budget_{name}" in fields}
        if limits:
            fields["budget"] = {**dict(fields.get("budget") or {}), **limits}
        options = fields.pop("decoder_option", None) or fields.get("model_options")
        if isinstance(options, str | list | tuple):
            fields["model_options"] = _pairs([options] if isinstance(options, str) else options)
        tools = fields.pop("tool", None) or fields.get("tools") or ()
        return {**fields, "tools": (tools,) if isinstance(tools, str) else tuple(tools)}

    @classmethod
    def of(cls, config: SearchConfig | None, options: Mapping[str, Any]) -> Self:
        """Return `config` with some options changed. Unknown names become decoder options. Raises OptionError."""
        if type(config) is cls and not options:
            return config
        known = {name: value for name, value in options.items() if name in cls.names()}
        others = {name: value for name, value in options.items() if name not in known}
        base = {} if config is None else {name: getattr(config, name) for name in cls.model_fields}
        try:
            merged = cls(**{**base, **first_and_escalate(known)})
        except ValidationError as error:
            raise OptionError(readable(error)) from None
        return merged.model_copy(update={"model_options": {**merged.model_options, **others}}) if others else merged

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of all options, in Python, in files and as flags."""
        budget = (f"budget_{name}" for name in Budget.model_fields)
        return {*cls.model_fields, "decoder_option", "tool", *budget}

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return state | {"__dict__": {name: one for name, one in vars(self).items() if name != "decoders"}}

    def to_json(self, secrets: bool = False) -> dict[str, Any]:
        """Return the options as JSON data, objects by name. Keys and passwords are included only with `secrets`."""
        options = [f"{name}={as_text(value)}" for name, value in self.model_options.items() if name != "tokenizer"]
        if not secrets:
            options = [_USER_IN_URL.sub("//", option) for option in options if not _SECRET.search(option)]
        tools = [getattr(tool, "__name__", str(tool)) for tool in self.tools]
        budget = {f"budget_{name}": limit for name, limit in (self.budget or Budget()).model_dump().items()}
        parts = {name: as_text(getattr(self, name)) for name in ("decoder", "search", "generator", "evaluator")}
        if parts["decoder"] and not secrets:
            parts["decoder"] = _SECRET_VALUE.sub(r"\1***", parts["decoder"])
        special = {"model", "escalate", "model_options", "tools", "budget", *parts}
        others = {name: getattr(self, name) for name in type(self).model_fields if name not in special}
        named_options = {
            "model": as_text(self._model) or "none",
            "escalate": as_text(self.escalate),
            **parts,
            "decoder_option": options,
            "tool": tools or None,
        }
        return {name: value for name, value in {**named_options, **others, **budget}.items() if value is not None}

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `load_decoder` that differ from its defaults."""
        given = {name: getattr(self, name) for name in ("dtype", "device", "kv_budget", "quantize", "threads")}
        options = {name: value for name, value in given.items() if value not in (None, "auto")}
        return options | ({} if self.prefix_cache else {"prefix_cache": False}) | self.model_options

    def suited(self, task: Task | type[Task] | str) -> Task:
        """Return the task with the chosen prompts, or else the prompts that suit the model.

        Raises OptionError if the task or the prompts are unknown, TaskError if a task file can't be run.
        """
        loaded = load_task(task)
        if self.prompts is not None:
            return loaded.with_prompts(self.prompts)
        if loaded.prompts.kind == "chat" or not loaded.chat:
            return loaded
        search = named(loaded.search if self.search is None else self.search, SEARCHES)
        few_shot = isinstance(search, Search) and search.few_shot
        return loaded.with_prompts("chat") if not few_shot and self._uses_chat_format() else loaded

    def _uses_chat_format(self) -> bool:
        """Return whether the generating model uses a chat format and no decoding method needs few-shot prompts.

        Raises OptionError if the model of "escalate" differs in that: the prompts are the same for both.
        """
        decoders = self.decoders
        purposes: tuple[Purpose, ...] = ("generate", "escalate")
        chats, large = (
            uses_chat_format(decoders[one], self.models.get(one), self.model_options) if one in decoders else None
            for one in purposes
        )
        if (chats or large) and need_few_shot(decoders.values()):
            return False
        if None not in (chats, large) and chats != large:
            raise OptionError(
                f"the model of {'generate' if large else 'escalate'} has no chat format, and the other has one: choose "
                "the prompts of both, --prompts papers or --prompts chat"
            )
        return bool(chats)

    def parts(self, task: Task) -> dict[str, Any]:
        """Return the search, the generator and the evaluator, by kind. Raises OptionError if one is unknown."""
        parts = parts_of(
            task,
            *(self.search, self.generator, self.evaluator),
            tools=self.tools,
            search_options={name: getattr(self, name) for name in ("thoughts", "breadth", "depth", "until")},
            generator_options={"temperature": self.temperature},
        )
        if "escalate" in self.decoders:
            _check_escalation(parts["search"], parts["generator"])
        return parts

    @cached_property
    def decoders(self) -> dict[Purpose, str | Decoder]:
        """The decoder of each purpose. Raises OptionError for an unknown purpose or decoder.

        A user's decoder is created once for all purposes, and again by another process that receives this config.
        """
        created = {one: instantiate(one) for one in {one for one in self._named.values() if isinstance(one, str)}}
        return {purpose: created[one] if isinstance(one, str) else one for purpose, one in self._named.items()}

    @property
    def _named(self) -> dict[Purpose, str | Decoder]:
        return decoders_by_purpose(self.decoder, self.escalate is not None)

    @property
    def models(self) -> dict[Purpose, Any]:
        """The model, or its name, of each purpose with a named decoder. Raises OptionError if one is missing."""
        return models_by_purpose(self.decoders, self.model, self.escalate)

    @property
    def _model(self) -> Any:
        """`model` if a decoder is named, otherwise the model of the first decoder object that has one."""
        if any(isinstance(one, str) for one in self._named.values()):
            return self.model
        chosen = sorted(self._named.values(), key=is_remote)
        return next((model for one in chosen if (model := getattr(one, "model", None)) is not None), None)

    @property
    def weights(self) -> dict[Purpose, Any]:
        """The local model, or its name, of each purpose that has one."""
        models: dict[Purpose, Any] = self.models
        local = {purpose: one for purpose, one in self.decoders.items() if not is_remote(one)}
        found = {purpose: models[purpose] if purpose in models else _weights_of(one) for purpose, one in local.items()}
        return {purpose: model for purpose, model in found.items() if model is not None}

    def filters_for(self, task: Task) -> dict[Purpose, dict[str, float]]:
        """Return the sampling filters for a task by purpose: of the model that generates, and of "escalate".

        Sources in order: these options, the model's generation_config, and, for a local model, the task. Raises
        OptionError.
        """
        given = {name: getattr(self, name) for name in FILTERS}
        purposes: tuple[Purpose, ...] = ("generate", "escalate")
        models = {purpose: self.weights.get(purpose) for purpose in purposes if purpose in self.decoders}
        return {
            purpose: filters_of(model, given, {} if model is None else task.filters)
            for purpose, model in models.items()
        }

    def exact(self) -> SearchConfig:
        """Return this config; if it is reproducible, with float32, and "ar" instead of "auto".

        Raises OptionError if another option contradicts that, or if a decoder is remote.
        """
        if not self.reproducible:
            return self
        chosen = self.decoders.values()
        if any(map(is_remote, chosen)):
            raise OptionError(
                "reproducible runs need a local model in float32, but the decoder is remote: leave reproducible out, "
                "or use a decoder other than openai"
            )
        for one in chosen:
            model = one.engine.loaded if isinstance(one, LocalDecoder) else getattr(one, "model", None)
            dtype = str(getattr(model, "dtype", "float32")).removeprefix("torch.")
            if dtype != "float32":
                raise OptionError(f"reproducible runs compute in float32, but this decoder's model is in {dtype}")
        if not any(isinstance(one, str) for one in chosen):
            return self
        if self.dtype not in ("auto", "fp32"):
            raise OptionError(f"reproducible runs compute in float32: leave dtype={self.dtype!r} out")
        if self.quantize not in ("auto", "none"):
            raise OptionError(f"reproducible runs compute in float32: leave quantize={self.quantize!r} out")
        decoder: Any = {purpose: "ar" if one == "auto" else one for purpose, one in self.decoders.items()}
        if isinstance(self.decoder, str) and "=" not in self.decoder:
            decoder = decoder["generate"]
        return self.of(self, {"decoder": decoder, "dtype": "fp32"})

    async def aopen(self, stack: ExitStack) -> dict[Purpose, Decoder]:
        """`open` in a thread. If this is cancelled, nothing waits for the model, which is closed once it is loaded."""
        own = ExitStack()
        opening = in_daemon_thread(partial(self.open, own), LOADING)
        try:
            decoders = await asyncio.wrap_future(opening)
        except BaseException:
            opening.add_done_callback(lambda _: own.close())
            raise
        stack.enter_context(own)
        return decoders

    def open(self, stack: ExitStack) -> dict[Purpose, Decoder]:
        """Create the decoder of each purpose. `stack` closes the engines, one for each local model, and connections.

        Raises TotError if a model can't be loaded or an option is invalid.
        """
        fields = type(self).model_fields
        return open_decoders(self.decoders, self.models, self.loading, fields, stack)


def _weights_of(decoder: Any) -> Any:
    """Return the model of a decoder object, or its name if the engine runs without a transformers module."""
    if isinstance(decoder, LocalDecoder) and decoder.engine.loaded.module is None:
        return decoder.engine.loaded.name
    return getattr(decoder, "model", None)


def as_text(part: Any) -> str | None:
    """Return a part as text: names unchanged, pairs as in flags, objects as `of` reads them, or else by class."""
    if part is None or isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        return ",".join(f"{name}={as_text(value) or 'none'}" for name, value in part.items())
    if isinstance(part, list | tuple):
        return ",".join(map(str, part))
    if isinstance(part, Path | int | float):
        return str(part)
    if not isinstance(part, BaseModel):
        return type(part).__name__
    return spec_of(part) or re.sub(r" at 0x[0-9a-f]+", "", repr(part))


def _check_escalation(search: Any, generator: Any) -> None:
    """Reject a second model that the built-in search and generator never ask. User-defined parts are not checked."""
    if all(type(part).__module__.startswith("tot.") for part in (search, generator)) and not search.asks_second_model:
        raise OptionError(
            f"escalate has no effect: {type(search).__name__} asks only one model; choose "
            "search='self-consistency:samples=8,until=0.95' or search='ab-mcts', or leave escalate out"
        )
