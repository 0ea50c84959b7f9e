"""SearchConfig: how questions are searched: the model, what decodes on it, the search and its parts, the budget."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tot.decoders.budget import Budget
from tot.decoders.decoder import (
    REMOTE,
    Decoder,
    checked_options,
    find_method,
    is_method,
    load_decoder,
    options_of,
)
from tot.decoders.errors import ModelError, OptionError, readable, unknown
from tot.decoders.methods.options import FEW_SHOT
from tot.decoders.models.model_names import find_model, has_chat_template, warn_of_no_template
from tot.decoders.remote.decoder import RemoteDecoder
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.request import Purpose, Sampling
from tot.registry import SEARCHES, load_task, named, parts_of
from tot.search.base import Search
from tot.task.checked import user_code
from tot.task.task import Task

FILTERS = ("top_k", "top_p", "min_p")
_OF_ENGINE = ("tokenizer", "dtype", "device", "kv_budget", "quantize")
"""Options that are the engine's, whatever decodes on it."""


class SearchConfig(BaseModel):
    """How `solve`, `asolve` and `evaluate` search: the options that the three share.

    Objects of one's own (searches, decoders, a loaded model) are taken as well as names.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    model: Any = "smollm2-135m"
    """A name (`tot models`), a hub id, a folder, a .gguf file or a loaded model; None is no model, for searches that
    ask none. One that is named stays open for the next call; `close_models()` gives its memory back."""
    decoder: Any = "auto"
    """A method's name, a decoder object, which then has its own model, or one or the other by purpose ({"generate": …,
    "evaluate": …, "answer": …}): names share one engine, and a purpose left out is decoded by "auto" there, or, where
    only objects are given, by the one that generates."""
    search: Any = None
    """A Search or its name with options ("mcts:iterations=20"); None takes the task's own, as for the next two. "rap"
    sets all three."""
    generator: Any = None
    """Where thoughts come from."""
    evaluator: Any = None
    """How states are valued."""
    tools: tuple[Any, ...] = ()
    """Functions with type hints, or their names, that the model may call while it writes."""
    prompts: Literal["papers", "chat"] | None = None
    """papers: the few-shot prompts of the papers. chat: the question alone, as a chat model is asked, which answers in
    its own words. None: chat, where the task has such prompts, the model a chat template, and neither the search nor
    the decoder needs the others (RAP, FastCoT, PDOS)."""
    budget: Budget | None = None
    """What a search may cost; one that hits it returns its best so far."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most new tokens of any text."""
    top_k: int | None = None
    """Which tokens are drawn from, as for the next two: by default as the model's own generation_config says, else as
    the task does; a task's template may say otherwise."""
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    reproducible: bool = False
    """Compute in float32, by "ar" in place of "auto": the same tree whatever else is packed with it, and when
    resumed."""
    model_options: dict[str, Any] = {}
    """What `load_decoder` is given besides: tokenizer, dtype, device, kv_budget, quantize and the decoder's own."""

    @classmethod
    def of(cls, config: SearchConfig | None, options: Mapping[str, Any]) -> Self:
        """`config` with some options changed; names that it doesn't know are model options. Raises OptionError."""
        known = {name: value for name, value in options.items() if name in cls.model_fields}
        others = {name: value for name, value in options.items() if name not in cls.model_fields}
        base = {} if config is None else dict(config)
        try:
            made = cls(**{**base, **known})
        except ValidationError as error:
            raise OptionError(readable(error)) from None
        return made.model_copy(update={"model_options": {**made.model_options, **others}}) if others else made

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
        if any(each in FEW_SHOT for each in chosen.values()):
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
        return parts_of(task, self.search, self.generator, self.evaluator, tools=self.tools)

    @property
    def decoders(self) -> dict[Purpose, str | Decoder]:
        """What each purpose is asked of. Raises OptionError for what is no purpose, or no decoder."""
        purposes: tuple[Purpose, ...] = get_args(Purpose)
        given: Mapping[Purpose, str | Decoder] = (
            self.decoder if isinstance(self.decoder, Mapping) else dict.fromkeys(purposes, self.decoder)
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
        chosen, options = self.decoders.values(), self.model_options
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
        if options.get("dtype", "auto") not in ("auto", "fp32", "float32"):
            raise OptionError(f"reproducible runs compute in float32: leave dtype={options['dtype']!r} out")
        if options.get("quantize", "auto") not in ("auto", "none"):
            raise OptionError(f"reproducible runs compute in float32: leave quantize={options['quantize']!r} out")
        decoder: Any = {purpose: "ar" if each == "auto" else each for purpose, each in self.decoders.items()}
        decoder = decoder if isinstance(self.decoder, Mapping) else decoder["generate"]
        return self.model_copy(update={"decoder": decoder, "model_options": {**options, "dtype": "fp32"}})

    def open(self, stack: ExitStack) -> dict[Purpose, Decoder]:
        """A decoder for each purpose; those made here share one engine, which the stack closes, as it does connections.

        Raises TotError for a model or an option that can't be had.
        """
        chosen, options = {purpose: _made(each) for purpose, each in self.decoders.items()}, self.model_options
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


def _is_remote(decoder: str | Decoder) -> bool:
    return decoder in REMOTE if isinstance(decoder, str) else isinstance(decoder, RemoteDecoder)


def _made(decoder: str | Decoder) -> str | Decoder:
    """A decoder of one's own that a name stands for; names of decoding methods as they are."""
    if not isinstance(decoder, str) or decoder in REMOTE or is_method(decoder):
        return decoder
    found = find_method(decoder)
    with user_code(f"decoder {decoder}"):
        made: Decoder = found() if isinstance(found, type) else found
    if not callable(getattr(made, "generate", None)):
        raise OptionError(f"decoder {decoder} has no method 'generate': give a class whose objects have one")
    return made


def _options_of(name: str) -> set[str]:
    return set(RemoteOptions.model_fields if name in REMOTE else options_of(name).model_fields)


def _of(names: set[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in names}


def filters_of(
    model: Any, given: Mapping[str, float | None], default: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The filters of a run by name: those given, for the others those of the model's generation_config, or a default.

    `model` is a name or a path, whose files are read, a model object, or None for none here. Raises OptionError for a
    value that can't be taken.
    """
    config = getattr(model, "generation_config", None)
    own = _of_files(model) if isinstance(model, str | Path) else {} if config is None else vars(config)
    sources = (given, own, default or {})
    chosen = {name: next((one[name] for one in sources if one.get(name) is not None), None) for name in FILTERS}
    said = {name: value for name, value in chosen.items() if value is not None}
    try:
        Sampling(**said)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        whose = "" if given.get(name) is not None else ", from the model's generation_config: give another"
        raise OptionError(f"{name}={first['input']!r}: {first['msg']}{whose}") from None
    return said


def _of_files(model: str | Path) -> dict[str, Any]:
    try:
        path = find_model(model)
        return dict(json.loads((path / "generation_config.json").read_text()))
    except (OSError, ValueError, TypeError, ModelError):  # none, or no model: it is said when that is loaded
        return {}
