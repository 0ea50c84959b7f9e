"""SearchConfig: the options of a run, from Python, flags and files: models, search, sampling and budget."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, JsonValue, ValidationError, model_validator

from tot.decoders.budget import Budget
from tot.decoders.decoder import REMOTE
from tot.decoders.errors import OptionError, readable, unknown
from tot.decoders.models.engine_options import EngineOptions
from tot.decoders.request import Purpose, Thinking, ThinkingOptions
from tot.llm.decoders import FILTERS, filters_of, uses_chat_format
from tot.llm.models import ALWAYS, Models, by_purpose, is_remote, option_names, value_text
from tot.registry import SEARCHES, load_task, named, parts_of, spec_of
from tot.search.base import Search
from tot.task.task import Task

_SECRET = re.compile(r"(?i)(?:^|[_-])(?:key|secret|password|credentials?|auth|authorization|token)\s*=")
_SECRET_VALUE = re.compile(r"(?i)((?:[:,]|[_-])(?:key|secret|password|credentials?|auth|authorization|token)=)[^,]*")
_USER_IN_URL = re.compile(r"//[^/@\s]*@")


class ModelFlags(EngineOptions):
    """Models as flags, and as entries of YAML files and saved runs: all have one engine and one set of options."""

    model: str | None = Field(
        "smollm2-135m",
        description="A name (tot models), a hub id, a folder or a .gguf file; none for no model; or purpose=model "
        "pairs (generate, evaluate, answer, escalate).",
    )
    escalate: str | None = Field(
        None, description="A second, larger model, which the search asks where the first is not sure; none for none."
    )
    decoder: str = Field(
        "auto",
        description="A decoder (path/to/file.py:Name:option=value for yours), or purpose=decoder pairs (generate, "
        "evaluate, answer, escalate).",
    )
    decoder_option: list[str] = Field(
        [], description="Option of the decoder, as name=value: k=4, k_config=2,2,1, draft=small.gguf."
    )


class SearchConfig(BaseModel):
    """Options of a run: models, search, generator, evaluator, sampling and budget.

    `solve`, `evaluate`, the command line, YAML files, results folders and checkpoints use these fields. The search, the
    generator and the evaluator are texts ("mcts:iterations=20") or objects. `to_json` writes texts that `of` reads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: InstanceOf[Models]
    """A Model, a name, a function, or a mapping from purpose to these. `of` also reads the entries of `ModelFlags`,
    and `decoder` (a name, an object, or a mapping) and `tokenizer` for models without them."""
    search: Any = Field(
        None,
        description="bfs, dfs, best-first, mcts, rap, ab-mcts, refine, act, cot, self-consistency or "
        "best-of-n, with options after a colon: mcts:iterations=20,exploration=2. The default of search, generator and "
        "evaluator is the task's own.",
    )
    generator: Any = Field(
        None,
        description="Thought generator: sample, continue, turns, propose or enumerate, with options like --search.",
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
    """Functions with type hints or their names, `Tool`s, and descriptions of functions (`tot.decoders.Function`)."""
    prompts: Literal["papers", "chat"] | None = Field(
        None,
        description="papers: our few-shot prompts, in the papers' form. chat: prompts in the model's chat format. The "
        "default is chat for models with a chat template.",
    )
    """None uses few-shot prompts if the task has no others, or if the search or the decoder needs them (RAP, FastCoT,
    PDOS)."""
    thinking: Thinking = Field(
        ThinkingOptions(),
        description="How a model that thinks may think: off, low, medium, high or a number of tokens, with options: "
        "512,settle=0.9.",
        json_schema_extra={"text": True},
    )
    template_options: Mapping[str, JsonValue] = Field(
        {},
        description="Variable of the model's chat template, as name=value: enable_thinking=false.",
        json_schema_extra={"flag": "--template-option"},
    )
    until: float | None = Field(
        None,
        description="Stop when the answer is right with this probability: the search auto, by default at 0.95.",
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
    calibration: str | None = Field(
        None,
        description="File with your own calibrations of answers, which python -m benchmarks calibrate writes; by "
        "default the shipped one.",
    )
    seed: int = Field(0, description="Seed of the run.")
    budget: Budget | None = None
    """Limits of a search. A search that reaches one returns its best answer so far."""
    reproducible: bool = Field(False, description="Compute in float32: the same tree every time.")
    """It also replaces the decoder "auto", whose choices depend on timing, by "ar"."""

    @model_validator(mode="before")
    @classmethod
    def _from_flags(cls, given: Any) -> Any:
        """Convert the spellings of flags and files: models, tool as a list, budget_tokens."""
        if not isinstance(given, Mapping):
            return given
        fields = dict(given)
        limits = {name: fields.pop(f"budget_{name}") for name in Budget.model_fields if f"budget_{name}" in fields}
        if limits:
            fields["budget"] = {**dict(fields.get("budget") or {}), **limits}
        tools = fields.pop("tool", None) or fields.get("tools") or ()
        fields["tools"] = (tools,) if isinstance(tools, str) else tuple(tools)
        variables = fields.pop("template_option", None) or fields.get("template_options") or {}
        if not isinstance(variables, Mapping):
            variables = {name: _value(text) for name, text in read_options(variables, "--template-option").items()}
        fields["template_options"] = variables
        decoder, tokenizer = fields.pop("decoder", None), fields.pop("tokenizer", None)
        models = Models.of(_with_second(fields), decoder)
        engine = {name: fields.pop(name) for name in EngineOptions.model_fields if name in fields}
        options = read_options(fields.pop("decoder_option", None) or ())
        if engine or options or tokenizer is not None:
            models = models.with_options(engine, options, tokenizer)
        return {**fields, "model": models}

    @classmethod
    def of(cls, config: SearchConfig | None = None, options: Mapping[str, Any] | None = None) -> Self:
        """Return `config` with some options changed. Raises OptionError for an unknown or an invalid one."""
        if type(config) is cls and not options:
            return config
        for name in options or {}:
            if name not in cls.names():
                raise OptionError(unknown("option", name, {*cls.model_fields, *ModelFlags.model_fields}))
        base = {} if config is None else {name: getattr(config, name) for name in cls.model_fields}
        try:
            return cls(**{**base, **(options or {})})
        except ValidationError as error:
            raise OptionError(readable(error)) from None

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of all options, in Python, in files and as flags."""
        budget = (f"budget_{name}" for name in Budget.model_fields)
        return {*cls.model_fields, *ModelFlags.model_fields, "tokenizer", "tool", "template_option", *budget}

    def to_json(self, secrets: bool = False) -> dict[str, Any]:
        """Return the options as JSON data, objects by name. Keys and passwords are included only with `secrets`."""
        tools = [getattr(tool, "__name__", getattr(tool, "name", str(tool))) for tool in self.tools]
        budget = {f"budget_{name}": limit for name, limit in (self.budget or Budget()).model_dump().items()}
        parts = {name: as_text(getattr(self, name)) for name in ("search", "generator", "evaluator")}
        special = {"model", "tools", "budget", "thinking", "template_options", *parts}
        others = {name: getattr(self, name) for name in type(self).model_fields if name not in special}
        others |= {"thinking": self.thinking.model_dump(exclude_defaults=True) or None}
        others |= {"template_options": dict(self.template_options) or None}
        options = {**_as_flags(self.model, secrets), **parts, "tool": tools or None, **others, **budget}
        return {name: value for name, value in options.items() if value is not None}

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
        return loaded.with_prompts("chat") if not few_shot and uses_chat_format(self.model) else loaded

    def parts(self, task: Task) -> dict[str, Any]:
        """Return the search, the generator and the evaluator, by kind. Raises OptionError if one is unknown."""
        parts = parts_of(
            task,
            *(self.search, self.generator, self.evaluator),
            tools=self.tools,
            until=self.until,
            temperature=self.temperature,
        )
        own = all(type(parts[kind]).__module__.startswith("tot.") for kind in ("search", "generator"))
        if "escalate" in self.model.by_purpose and own and not parts["search"].asks_second_model:
            raise OptionError(
                f"escalate has no effect: {type(parts['search']).__name__} asks only one model; choose "
                "search='auto' or search='ab-mcts', or leave escalate out"
            )
        return parts

    def filters_for(self, task: Task) -> dict[Purpose, dict[str, float]]:
        """Return the sampling filters for a task by purpose: of the model that generates, and of "escalate".

        Sources in order: these options, the model's generation_config, and, for a local model, the task. Raises
        OptionError.
        """
        given = {name: getattr(self, name) for name in FILTERS}
        purposes: tuple[Purpose, ...] = ("generate", "escalate")
        models = {one: self.model.weights.get(one) for one in purposes if one in self.model.by_purpose}
        return {
            purpose: filters_of(model, given, {} if model is None else task.filters)
            for purpose, model in models.items()
        }

    def exact(self) -> SearchConfig:
        """Return this config; if it is reproducible, with exact models. Raises OptionError for a contradiction."""
        return self.model_copy(update={"model": self.model.exact()}) if self.reproducible else self


def _value(text: str) -> Any:
    """Return the JSON value of a text, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_options(options: str | Sequence[Any], flag: str = "--decoder-option") -> dict[str, str]:
    """Parse options from name=value texts. Raises OptionError if one is invalid."""
    given = [options] if isinstance(options, str) else options
    split = [str(option).partition("=") for option in given]
    for option, (name, equals, _) in zip(given, split, strict=True):
        if not (name.strip() and equals) or name.strip() in EngineOptions.model_fields:
            raise OptionError(f"{flag} {option!r} can't be read: write NAME=VALUE, such as k=4")
    return {name.strip(): value.strip() for name, _, value in split}


def _with_second(fields: dict[str, Any]) -> Any:
    """Remove `model` and `escalate` from the fields, and return them as one. Raises OptionError if they differ."""
    model = fields.pop("model", "smollm2-135m")
    second = fields.pop("escalate", None)
    if second in (None, "none"):
        return model
    models = by_purpose("model", model.by_purpose if isinstance(model, Models) else model)
    models = dict.fromkeys(ALWAYS, model) if models is None else models
    if models.setdefault("escalate", second) != second:
        raise OptionError(f"escalate is {models['escalate']!r} in model, and {second!r}: give one of them")
    return models


def _as_flags(models: Models, secrets: bool) -> dict[str, Any]:
    """Return models as the entries of `ModelFlags`; as a nested mapping if their engines or options differ."""
    given, named = models.by_purpose, {purpose: one for purpose, one in models.by_purpose.items() if one.named}
    options = {name: value for one in named.values() for name, value in one.options.items()}
    engines = [one.engine for one in named.values() if one.decoder not in REMOTE] or [EngineOptions()]
    equal = all(one == engines[0] for one in engines) and all(
        one.options
        == {name: options[name] for name in options if name in one.options or name in option_names(one.decoder)}
        for one in named.values()
    )
    decoders = {purpose: _without_secrets(value_text(one.decoder), secrets) for purpose, one in given.items()}
    if not equal:
        return {
            "model": {
                purpose: {
                    "model": value_text(one.model),
                    "decoder": decoders[purpose],
                    "options": dict(pair.split("=", 1) for pair in _option_texts(one.options, secrets)),
                    "engine": one.engine.model_dump(exclude_defaults=True),
                }
                for purpose, one in given.items()
            }
        }
    first = {purpose: value_text(one.model) for purpose, one in named.items() if purpose in ALWAYS}
    if not first:
        own = sorted((one.decoder for one in given.values()), key=is_remote)
        first = {"generate": value_text(next((one.model for one in own if hasattr(one, "model")), None))}
    return {
        "model": _joined(first),
        "escalate": value_text(named["escalate"].model) if "escalate" in named else None,
        "decoder": _joined(decoders),
        "decoder_option": _option_texts(options, secrets),
        **engines[0].model_dump(),
    }


def _joined(texts: Mapping[Purpose, str]) -> str:
    """Return one text for all purposes, or pairs if they differ."""
    first, *others = dict.fromkeys(texts.values())
    return ",".join(f"{purpose}={text}" for purpose, text in texts.items()) if others else first


def _option_texts(options: Mapping[str, Any], secrets: bool) -> list[str]:
    texts = [f"{name}={value_text(value)}" for name, value in options.items()]
    return texts if secrets else [_USER_IN_URL.sub("//", text) for text in texts if not _SECRET.search(text)]


def _without_secrets(decoder: str, secrets: bool) -> str:
    return decoder if secrets else _SECRET_VALUE.sub(r"\1***", decoder)


def as_text(part: Any) -> str | None:
    """Return a part as text: names unchanged, objects as `of` reads them, or else by class."""
    if isinstance(part, BaseModel):
        return spec_of(part) or re.sub(r" at 0x[0-9a-f]+", "", repr(part))
    return part if part is None or isinstance(part, str) else type(part).__name__
