"""From a request to a body in OpenAI's protocol."""

from __future__ import annotations

import hashlib
from typing import Any

from tot.decoders.errors import RequestError
from tot.decoders.remote.options import RemoteOptions
from tot.decoders.remote.servers import BUDGETS, SERVERS, Server
from tot.decoders.request import Message, Request, Sampling
from tot.decoders.thinking import switches
from tot.decoders.tools import call_json

Prompt = str | tuple[Message, ...] | tuple[int, ...]
CHAT, COMPLETIONS = "/chat/completions", "/completions"
TOKENIZE = "/tokenize"
"""vLLM's and SGLang's route, beside /v1."""


def body_of(
    request: Request, options: RemoteOptions, server: Server, index: int = 0, n: int = 1, thinking: int = 0
) -> tuple[str, dict[str, Any]]:
    """Return the route and the body of a request for n samples, of which the first has this index.

    Fields that only some servers support are included only if they have an effect. `tot serve` gets the fields that
    make it draw the same samples as a local decoder, and returns token ids and their logprobs. With tokens for
    `thinking`, which stop strings would end, no stop strings are included. With a constraint or tools
    they are only if the server reports which one ended a text.
    """
    prompt, sampling = request.prompt, request.sampling
    path, body = address(prompt, server)
    tokens = sampling.max_tokens + thinking
    body |= {"max_tokens": tokens, "temperature": sampling.temperature, "seed": seed_of(sampling.seed, index)}
    body |= thinking_fields(request, server, thinking)
    whole = sampling.keep_stop or request.tools or request.constraint is not None
    cut_here = thinking or (whole and not server.reports_stops)
    optional = {
        "n": n if n > 1 else None,
        "stop": None if cut_here else list(sampling.stop),
        "top_p": sampling.top_p if sampling.top_p < 1 else None,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
    }
    body |= {name: value for name, value in optional.items() if value}
    if server is SERVERS["tot"] and index == 0:
        body |= sampling.model_dump(include={"seed", "top_k", "top_p", "min_p"}) | {"return_token_ids": True}
        if messages := messages_of(prompt):  # with the tokens of the prefix that the model generated
            body["messages"] = [message_json(message, "written") for message in messages]
        body |= sampling.model_dump(include={"keep_stop", "drawn"}, exclude_defaults=True)
    elif options.logprobs:
        body["logprobs"] = True if path == CHAT else 0
    return path, body


def thinking_fields(request: Request, server: Server, tokens: int = 0) -> dict[str, Any]:
    """Return the fields that say how the model thinks, for `tokens` tokens at most if there are any.

    Which switch the model has is not known: its chat template gets values for all usual ones.
    """
    thinking, sent = request.sampling.thinking, {*server.thinking}
    guesses = {"reasoning_effort", "chat_template_kwargs"} <= sent
    values = switches(("enable_thinking", "reasoning_effort", "thinking", "thinking_budget"), thinking)
    effort = values.pop("reasoning_effort", None)
    off = thinking.tokens == 0
    fields = {
        "thinking": thinking.model_dump(),
        "reasoning_effort": "none" if off and not guesses else effort,
        "chat_template_kwargs": (values if guesses else {}) | dict(request.template_options),
        **dict.fromkeys(BUDGETS, thinking.tokens if tokens or off else None),
    }
    if not messages_of(request.prompt):
        sent &= {"thinking"}
    elif request.template_options:
        sent.add("chat_template_kwargs")
    return {name: value for name, value in fields.items() if name in sent and value not in (None, {})}


def address(prompt: Prompt, server: Server) -> tuple[str, dict[str, Any]]:
    """Return the route for a prompt and the body fields that contain the prompt."""
    messages = messages_of(prompt)
    if not messages:
        return COMPLETIONS, {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    fields: dict[str, Any] = {"messages": [message_json(message) for message in messages]}
    if messages[-1].role == "assistant":
        if not messages[-1].content.strip():
            raise RequestError("the assistant's prefix is empty: leave the message out")
        if server.continue_fields:
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
    return CHAT, fields


def message_json(message: Message, *more: str) -> dict[str, Any]:
    """Return a message in OpenAI's protocol, with more fields of `tot serve`."""
    about = {"role", "content", "reasoning_content", "tool_call_id", *more}
    calls = [call_json(call, call.arguments) for call in message.tool_calls]
    return message.model_dump(include=about, exclude_defaults=True) | ({"tool_calls": calls} if calls else {})


def extended(prompt: Prompt, text: str) -> Prompt:
    """Append text to a prompt: for messages, to the last assistant message or as a new one."""
    if isinstance(prompt, str):
        return prompt + text
    messages = messages_of(prompt)
    if not messages:
        raise RequestError("cannot append text to a prompt of token ids: give the prompt as text or messages")
    if not (prefix := prefix_of(prompt)):
        return (*messages, Message(role="assistant", content=text))
    return (*messages[:-1], Message(role="assistant", content=prefix + text))


def changed(request: Request, prompt: Prompt, sampling: Sampling | None = None) -> Request:
    """Return a request for a text after another prompt."""
    return request.model_copy(update={"prompt": prompt, "sampling": sampling or request.sampling})


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """Return the messages of a prompt; empty for a prompt of text or token ids."""
    return tuple(part for part in prompt if isinstance(part, Message))


def prefix_of(prompt: Prompt) -> str:
    """Return the assistant message that a prompt ends with; otherwise an empty string."""
    messages = messages_of(prompt)
    return messages[-1].content if messages and messages[-1].role == "assistant" else ""


def seed_of(seed: int, *place: object) -> int:
    """Return a seed of 31 bits, which every server accepts.

    `place` identifies the sample within a request. A seed below 2**31 stays unchanged for place 0, the first sample;
    all others are hashed.
    """
    if place == (0,) and seed < 2**31:
        return seed
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF
