"""Exceptions with messages that state the problem and the remedy, and validation of options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

_Model = TypeVar("_Model", bound=BaseModel)
_TOO_LONG = re.compile(r"(?i)\bcontext[ _](?:length|size|window)|\bexceeds?\b.*\bcontext\b|\bprompt is too long")
"""Messages of servers about a prompt that is longer than the model's context."""
REMOVED = {
    **{
        f"--{name}": f"give it with the search, as in --search bfs:{name}=3"
        for name in ("thoughts", "breadth", "depth")
    },
    **dict.fromkeys(
        ("--question-column", "--answer-column", "question_column", "answer_column"),
        "rename the columns of the file, or write a task with `question_of` and `reference_of`",
    ),
    "--plot": "`tot eval --compare` prints the table",
    ".dot": "choose .graphml",
    ".gv": "choose .graphml",
    "ab-mcts:prior": "the prior is gaussian",
    "agreement": "choose logprob",
    "best-first:weight": "estimates have the weight 1",
    **dict.fromkeys(("best-first:merge", "bfs:merge", "dfs:merge"), "equal states of a task with a world are merged"),
    "cached_price": "multiply the tokens of results.json by your prices",
    "input_price": "multiply the tokens of results.json by your prices",
    "output_price": "multiply the tokens of results.json by your prices",
    **dict.fromkeys(
        (f"pdos:{name}" for name in ("marker", "terminator", "colon", "ellipsis", "max_steps", "title_tokens")),
        "the format of steps is fixed",
    ),
    "openai:api": "start the server with a chat template (vLLM: --chat-template FILE), or give prompts as text",
    "continue:tools": "give tools=[...] to solve, or --tool, which select the generator turns",
    "cpus_per_replica": "each replica has an equal share of the cores",
    "gpus_per_replica": "run vLLM on the GPUs, and give decoder=openai",
    "shuffle_seed": "shuffle the rows of the file",
    "pdos:step_tokens": "steps share max_tokens equally",
    "thinking_tokens": "give the budget as thinking=TOKENS, or --thinking",
    "served": "give the name of the model on the server as the model of that purpose: generate=NAME",
    "bench": "run python -m benchmarks in a clone of the repository",
    **dict.fromkeys(("on_backpropagate", "on_simulate"), "on_evaluate gets the states that MCTS visits"),
    "format": "a run's folder has its rows as JSON lines (samples.jsonl) and a tree for each (trees/)",
    "track": "read samples.jsonl in the folder of the run, which gets a JSON line for each finished search",
    "demo": "run python -m benchmarks demo in a clone of the repository",
    "dfs:goals": "the search ends at its first goal",
    "calibrate": "run python -m benchmarks calibrate in a clone of the repository",
    "cllm": "run tot train collect, and tot train cllm",
    "early-exit": "give a small model of the same family, or lookup",
    "fastcot": "run python -m benchmarks fastcot in a clone of the repository",
    "halving": "choose ab-mcts or refine",
    "train-draft": "give a small model of the same family as the draft",
    **dict.fromkeys(("fp16", "float16"), "choose bf16 or fp32"),
    "head": "choose logprob, which needs no training",
    "int8-dynamic": "give a .gguf file, or choose none for floating point",
    "mcts:leaves": "it selects one leaf after another",
    **dict.fromkeys(
        ("best-first:until", "bfs:until", "dfs:until", "mcts:until", "self-consistency:until"),
        "choose the search auto, or leave it out",
    ),
    "self-consistency:at_once": "choose auto:together=4",
    "certainty": "fit your own with python -m benchmarks calibrate, and give it as calibration, or --calibration",
    "escalate": "give model={'generate': MODEL, 'escalate': MODEL}",
    "model_options": "give model=Model(NAME, options={'draft': MODEL})",
    "models": "give model={'generate': MODEL, 'escalate': MODEL}",
    "--solutions": "run python -m benchmarks solutions in a clone of the repository",
    "pdos": "run python -m benchmarks steps in a clone of the repository",
    "reward-model": "write an evaluator that calls it, as in docs/extending.md",
    "textworld": "give benchmarks/textworld.py:TextWorld in a clone of the repository",
    "train-value": "choose the evaluator logprob, which needs no training",
    "watch": "iterate over astream(...)",
    "trained": "give a small model of the same family, or lookup",
}
"""Removed commands, parts, drafts and options, with a replacement."""


class TotError(Exception):
    """Base class of all errors that this project raises."""


class ModelError(TotError):
    """A model can't be found, read, converted or run."""


class ServerError(ModelError):
    """A server that a decoder sends requests to fails or does not answer.

    `status` and `retry_after` (seconds) are for an HTTP reply. `said` is the server's own message, without its address.
    """

    def __init__(self, message: str, said: str = "", status: int = 502, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.said = said
        self.status = status
        self.retry_after = retry_after
        self.code = "upstream_error"


class RequestError(TotError):
    """A request can't be served: empty, too long, contradictory or larger than the budget."""

    code: str | None = None
    """The code of this error in OpenAI's API."""


class ContextError(RequestError):
    """A prompt is longer than the model's context."""

    code = "context_length_exceeded"


class RefusedError(RequestError):
    """A server rejects a request, or fails for it. `said` is its own message; `status` is for an HTTP reply."""

    def __init__(self, message: str, said: str, status: int = 400) -> None:
        super().__init__(message)
        self.said = said
        self.status = status
        self.retry_after = None
        if _TOO_LONG.search(said):
            self.code = ContextError.code


class OptionError(TotError):
    """A name or an option is invalid."""


class TaskError(TotError):
    """A task, its templates or its data are invalid."""


def reason(error: BaseException) -> str:
    """Return the message of an error on one line; for system errors the system's message."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__


def describe(error: BaseException) -> str:
    """Return the type and the message of an error; an empty message adds no colon."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return a one-line message about a name that is not among the choices."""
    if replacement := REMOVED.get(name.partition(":")[0]):
        return f"{kind} {name!r} was removed: {replacement}"
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"unknown {kind} {name!r}{hint}: choose one of {', '.join(known)}"


def readable(error: ValidationError) -> str:
    """Return the first problem, such as "max_tokens = 0: Input should be greater than or equal to 1"."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))} = {first['input']!r}: {first['msg'].removeprefix('Value error, ')}"


def validated(cls: type[_Model], options: Mapping[str, Any], what: str) -> _Model:
    """Build an options model from values by name.

    Raises OptionError that names `what`, the invalid option and the valid options, without the value, which may be
    secret."""
    try:
        return cls(**options)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = f", option {first['loc'][0]}" if first["loc"] else ""
        known = ", ".join(cls.model_fields) or "none"
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            name = str(first["loc"][0])
            near = difflib.get_close_matches(name, cls.model_fields, n=1)
            reason = f"unknown, did you mean {near[0]}?" if near else "unknown"
            if removed := REMOVED.get(f"{what.rpartition(' ')[2]}:{name}") or REMOVED.get(name):
                reason = f"was removed: {removed}"
        raise OptionError(f"{what}{place}: {reason} (its options: {known})") from None
