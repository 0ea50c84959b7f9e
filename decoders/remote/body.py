"""From a prompt and its sampling to the body that a server is sent; and what this server was found not to take.

Servers differ in the fields they know. One that refuses a body for a field that can be done without, or said otherwise,
is sent another, and from then on bodies without it: `Dialect` remembers.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from typing import Any

from tot.decoders.errors import RequestError
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.request import Message, Sampling

log = logging.getLogger(__name__)

Prompt = str | tuple[Message, ...] | tuple[int, ...]
CHAT, COMPLETIONS = "/chat/completions", "/completions"
CONTINUING = {"continue_final_message": True, "add_generation_prompt": False}
"""vLLM's and SGLang's fields for an assistant message that is to be continued."""
KEEP_STOP = "include_stop_str_in_output"
"""vLLM's field for a stop string that stays in the text."""
_COUNT = (
    Message(role="user", content="Count from 1 to 20."),
    Message(role="assistant", content="1, 2, 3, 4, 5, 6, 7, 8, 9, 1"),
)


class RefusedError(RequestError):
    """The server can't serve a body; `said` is why, in its words."""

    def __init__(self, message: str, said: str) -> None:
        super().__init__(message)
        self.said = said


class Dialect:
    """What one server takes and does. Everything, until it shows otherwise."""

    def __init__(self) -> None:
        self.n = True
        """Several samples a request; else each is asked for by itself."""
        self.continuing = True
        """It takes the fields that ask it to continue an assistant message."""
        self.continues: bool | None = None
        """It continues an assistant message, rather than starting a new reply; None until that was tried."""
        self.instead = ""
        """What it did when that was tried, in words."""
        self.repeats = False
        """It repeats the beginning that it continues."""
        self.keep_stop = True
        """It takes the field that leaves a stop string in the text."""
        self.tells_stops = True
        """It shows which stop string ended a text; else texts that keep theirs are asked for whole, and cut here."""
        self.limit = "max_tokens"
        """Its name for the most tokens of a reply."""
        self.seeded = True

    def learns(self, said: str, body: dict[str, Any]) -> bool:
        """Return True where a refusal is about something that `fitted` then sends otherwise."""
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
            log.warning("this server takes no seed: what it samples is another text each time")
        else:
            return False
        return True

    def fitted(self, body: dict[str, Any]) -> dict[str, Any]:
        """A body as this server takes it; `n` is the caller's to see to."""
        left_out = {
            *(CONTINUING if not self.continuing else ()),
            *(["seed"] if not self.seeded else ()),
            *([KEEP_STOP] if not self.keep_stop else ()),
        }
        renamed = {self.limit if name == "max_tokens" else name: value for name, value in body.items()}
        return {name: value for name, value in renamed.items() if name not in left_out}

    def tried(self, text: str) -> None:
        """Learn from the reply to `counting` whether the server continues an assistant message."""
        text = text.strip()
        begun = _COUNT[-1].content
        self.repeats = text.startswith(f"{begun}0")
        self.continues = self.repeats or text.startswith("0") or not text[:1].isalnum()
        self.instead = f"after {begun[-7:]!r} it writes {text[:20]!r}"


def counting(options: RemoteOptions) -> tuple[str, dict[str, Any]]:
    """A request that shows whether a server continues an assistant message: the next character is a 0, and nobody
    begins a new reply with that."""
    path, body = address(_COUNT, options)
    return path, body | {"max_tokens": 2 + options.thinking_tokens, "temperature": 0.0}


def address(prompt: Prompt, options: RemoteOptions) -> tuple[str, dict[str, Any]]:
    """The route for a prompt, and the fields that hold it."""
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
    """The fields by which `tot serve` draws what a local decoder draws: the whole seed, how many tokens were drawn, and
    which tokens of the prompt the model wrote itself. It returns the tokens, and their log-probabilities."""
    body: dict[str, Any] = {"seed": sampling.seed, "return_token_ids": True}
    if sampling.keep_stop:
        body["keep_stop"] = True
    if sampling.drawn:
        body["drawn"] = sampling.drawn
    if messages := messages_of(prompt):
        body["messages"] = [message.model_dump(exclude_defaults=True) for message in messages]
    return body


def sampled(sampling: Sampling, options: RemoteOptions, seed: int, n: int, chat: bool) -> dict[str, Any]:
    """The fields that say how to sample; those that only some servers know are there only where they are needed."""
    tokens = sampling.max_tokens + options.thinking_tokens
    body: dict[str, Any] = {"max_tokens": tokens, "temperature": sampling.temperature, "seed": seed}
    if options.logprobs:
        body["logprobs"] = True if chat else 0
    needed = {
        "n": n if n > 1 else None,
        "stop": None if options.thinking_tokens else list(sampling.stop),
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    return body | {name: value for name, value in needed.items() if value}


def extended(prompt: Prompt, text: str) -> Prompt:
    """A prompt with text after it: for messages, what the assistant has said so far."""
    if isinstance(prompt, str):
        return prompt + text
    messages = messages_of(prompt)
    if not messages:
        raise RequestError("a prompt of token ids can't be gone on with in text: give text or messages")
    if messages[-1].role != "assistant":
        return (*messages, Message(role="assistant", content=text))
    return (*messages[:-1], Message(role="assistant", content=messages[-1].content + text))


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """The messages of a prompt that consists of them."""
    return tuple(part for part in prompt if isinstance(part, Message))


def joined(messages: Sequence[Message]) -> str:
    """Messages as one text, for models without a template: as local decoders do it."""
    return "\n\n".join(message.content for message in messages)


def seed_of(seed: int, *place: object) -> int:
    """A seed of 31 bits, which every server takes: a small one as it is, another one's hash. `place` tells samples of
    one request apart, 0 being the first."""
    if place == (0,) and seed < 2**31:
        return seed
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
