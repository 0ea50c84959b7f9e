"""Request bodies for a prompt and its sampling, and a record of the fields that a server rejects.

Servers support different fields. If a server rejects an optional field, the request is sent again without it or with
another spelling. `Dialect` remembers this for all later requests.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from typing import Any

from tot.decoders.errors import ContextError, RequestError
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.request import Message, Sampling

log = logging.getLogger(__name__)

Prompt = str | tuple[Message, ...] | tuple[int, ...]
CHAT, COMPLETIONS = "/chat/completions", "/completions"
CONTINUING = {"continue_final_message": True, "add_generation_prompt": False}
"""vLLM's and SGLang's fields that make the model continue the last assistant message."""
KEEP_STOP = "include_stop_str_in_output"
"""vLLM's field that keeps the stop string in the text."""
_TOO_LONG = re.compile(r"(?i)\bcontext[ _](?:length|size|window)|\bexceeds?\b.*\bcontext\b|\bprompt is too long")
"""Messages about a prompt that is longer than the model's context."""
_COUNT = (
    Message(role="user", content="Count from 1 to 20."),
    Message(role="assistant", content="1, 2, 3, 4, 5, 6, 7, 8, 9, 1"),
)


class RefusedError(RequestError):
    """The server rejected a request body, or fails for it; `said` is the server's own message."""

    def __init__(self, message: str, said: str, status: int = 400) -> None:
        """`status` is for an HTTP reply."""
        super().__init__(message)
        self.said = said
        self.status = status
        self.retry_after = None
        if _TOO_LONG.search(said):
            self.code = ContextError.code


class Dialect:
    """The features of one server. Each is assumed to work until a reply shows otherwise."""

    def __init__(self) -> None:
        self.n = True
        """It returns several samples per request; otherwise one request is sent per sample."""
        self.continuing = True
        """It accepts the `CONTINUING` fields."""
        self.continues: bool | None = None
        """It continues an assistant message instead of starting a new reply; None until tested."""
        self.instead = ""
        """A description of its behavior in that test."""
        self.repeats = False
        """It repeats the prefix that it continues."""
        self.keep_stop = True
        """It accepts the `KEEP_STOP` field."""
        self.tells_stops = True
        """It reports which stop string ended a text; otherwise `keep_stop` texts are requested without stop strings and
        truncated by the client."""
        self.limit = "max_tokens"
        """Its field for the maximum number of new tokens."""
        self.seeded = True
        """It accepts a seed."""

    def learns(self, said: str, body: dict[str, Any]) -> bool:
        """Record the feature that a rejection names. Return True if `fitted` now builds a different body."""
        if KEEP_STOP in body and KEEP_STOP in said:
            self.keep_stop = False
        elif self.continuing and any(name in body and name in said for name in CONTINUING):
            self.continuing = False
        elif self.limit in body and "max_completion_tokens" in said and self.limit != "max_completion_tokens":
            self.limit = "max_completion_tokens"
        elif self.n and body.get("n", 1) > 1 and re.search(r"['\"`]n['\"`]|\bn\b *(must|is|=|>|should)", said):
            self.n = False
        elif self.seeded and "seed" in body and re.search(r"\bseed\b", said):
            self.seeded = False
            log.warning("this server does not accept a seed: its samples are not reproducible")
        else:
            return False
        return True

    def fitted(self, body: dict[str, Any]) -> dict[str, Any]:
        """Adapt a body to this server, except for `n`, which the caller handles."""
        unsupported = {
            *(CONTINUING if not self.continuing else ()),
            *(["seed"] if not self.seeded else ()),
            *([KEEP_STOP] if not self.keep_stop else ()),
        }
        renamed = {self.limit if name == "max_tokens" else name: value for name, value in body.items()}
        return {name: value for name, value in renamed.items() if name not in unsupported}

    def tried(self, text: str, thinking: str) -> None:
        """Record from the reply to `counting` whether the server continues a message: a new reply may have thinking."""
        text = text.strip()
        prefix = _COUNT[-1].content
        self.repeats = text.startswith(f"{prefix}0")
        self.continues = not thinking and (self.repeats or text.startswith("0") or not text[:1].isalnum())
        self.instead = f"after {prefix[-7:]!r} it writes {(thinking or text)[:20]!r}"


def counting(options: RemoteOptions) -> tuple[str, dict[str, Any]]:
    """Build a request that tests whether a server continues an assistant message.

    The continuation starts with the character 0, and a new reply does not.
    """
    path, body = address(_COUNT, options)
    return path, body | {"max_tokens": 2 + options.thinking_tokens, "temperature": 0.0}


def address(prompt: Prompt, options: RemoteOptions) -> tuple[str, dict[str, Any]]:
    """Return the route for a prompt and the body fields that contain the prompt."""
    if isinstance(prompt, str):
        return COMPLETIONS, {"prompt": prompt}
    messages = messages_of(prompt)
    if not messages:
        return COMPLETIONS, {"prompt": list(prompt)}
    if options.api == "completions":
        return COMPLETIONS, {"prompt": joined(messages)}
    fields: dict[str, Any] = {"messages": [{"role": m.role, "content": m.content} for m in messages]}
    if messages[-1].role == "assistant":
        if not messages[-1].content.strip():
            raise RequestError("the assistant's prefix is empty: leave the message out")
        fields |= CONTINUING
    return CHAT, fields


def for_tot(prompt: Prompt, sampling: Sampling) -> dict[str, Any]:
    """Return the fields that make `tot serve` draw the same samples as a local decoder.

    They hold the full seed, the number of tokens already drawn, and the tokens of the prompt that the model generated.
    The reply then contains token ids and their logprobs.
    """
    body = sampling.model_dump(include={"seed", "top_k", "top_p", "min_p"}) | {"return_token_ids": True}
    if sampling.keep_stop:
        body["keep_stop"] = True
    for name in ("drawn", "thinking_tokens"):
        if value := getattr(sampling, name):
            body[name] = value
    if messages := messages_of(prompt):
        body["messages"] = [message.model_dump(exclude_defaults=True) for message in messages]
    return body


def sampled(sampling: Sampling, options: RemoteOptions, seed: int, n: int, chat: bool) -> dict[str, Any]:
    """Return the sampling fields. Fields that only some servers support are included only if they have an effect."""
    tokens = sampling.max_tokens + options.thinking_tokens
    body: dict[str, Any] = {"max_tokens": tokens, "temperature": sampling.temperature, "seed": seed}
    if options.logprobs:
        body["logprobs"] = True if chat else 0
    optional = {
        "n": n if n > 1 else None,
        "stop": None if options.thinking_tokens else list(sampling.stop),
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    return body | {name: value for name, value in optional.items() if value}


def extended(prompt: Prompt, text: str) -> Prompt:
    """Append text to a prompt: for messages, to the last assistant message or as a new one."""
    if isinstance(prompt, str):
        return prompt + text
    messages = messages_of(prompt)
    if not messages:
        raise RequestError("cannot append text to a prompt of token ids: give the prompt as text or messages")
    if messages[-1].role != "assistant":
        return (*messages, Message(role="assistant", content=text))
    return (*messages[:-1], Message(role="assistant", content=messages[-1].content + text))


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return the messages of a prompt; empty for a prompt of text or token ids."""
    return tuple(part for part in prompt if isinstance(part, Message))


def joined(messages: Sequence[Message]) -> str:
    """Join messages to one text, for models without a chat template, as local decoders do."""
    return "\n\n".join(message.content for message in messages)


def seed_of(seed: int, *place: object) -> int:
    """Return a seed of 31 bits, which every server accepts.

    `place` identifies the sample within a request. A seed below 2**31 stays unchanged for place 0, the first sample;
    all others are hashed.
    """
    if place == (0,) and seed < 2**31:
        return seed
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
