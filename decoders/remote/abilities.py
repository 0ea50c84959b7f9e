"""Probe the abilities of a server with tiny requests, as servers ignore fields that they do not support.

A field has an effect if the text shows it: `top_k=1` at a high temperature gives the text of temperature 0, and equal
seeds give equal texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from tot.decoders.budget import Meter
from tot.decoders.remote.body import RefusedError, address
from tot.decoders.remote.choices import Choices
from tot.decoders.remote.endpoint import Endpoint
from tot.decoders.remote.loop import together
from tot.decoders.remote.reply import ServerReply, apart
from tot.decoders.remote.sampler import Sampler
from tot.decoders.request import Message, Request

Abilities = Mapping[str, bool | None]
"""Whether a server has each ability of `EFFECTS`; None, or missing, if the probe could not tell."""
EFFECTS = {
    "n": ("several samples a request", "used", "each sample is a request of its own"),
    "seed": ("seed", "samples are repeatable", "samples differ from run to run"),
    "top_k": ("top_k", "used", "top_k is refused: leave it out"),
    "top_p": ("top_p", "used", "top_p is refused: leave it out"),
    "min_p": ("min_p", "used", "min_p is refused: leave it out"),
    "logprobs": (
        "logprobs of new tokens",
        "votes are weighted by probability with --decoder-option logprobs=true",
        "votes count equally; logprobs=true is refused",
    ),
    "choices": ("logprobs of given tokens", "choices are scored exactly", "the model writes a choice"),
    "continues": ("continued assistant message", "used", "generator=continue is refused: use generator=sample"),
    "parallel": ("several requests at once", "sent together", "sent one by one, unless concurrency is given"),
    "status": ("errors with a status", "read", "errors in a reply with status 200 are recognized"),
    "thinking": ("thinking in its own field", "kept apart from the answer", ""),
}
"""For each ability: its name for users, and the effect with it and without it."""
FILTERS: dict[str, float] = {"top_k": 1, "top_p": 0.01, "min_p": 1.0}
"""Values with which a server draws only the most likely token."""
_PROMPT = (Message(role="user", content="List random words, without end."),)
_TOKENS, _LONG = 12, 64
"""New tokens of a probe, and of the request that a short one overtakes on a server that runs several at once."""
_HEAD_START = 0.05
"""Seconds between these two requests."""
_HOT = 1.5
"""A temperature at which two samples of the prompt differ."""


async def probe(endpoint: Endpoint, sampler: Sampler, choices: Choices, meter: Meter) -> Abilities:
    """Return the abilities of a server. Raises ModelError, or SpentError if the meter's budget is spent."""
    if endpoint.server.is_tot:
        return {name: True for name in EFFECTS if name != "thinking"}
    path, body = address(_PROMPT, endpoint.options)
    body |= {"max_tokens": _TOKENS, "temperature": 0.0}

    async def send(path: str, body: dict[str, Any]) -> ServerReply:
        return (await endpoint.ask(meter, path, body))[0]

    async def ask(**changed: Any) -> ServerReply | None:
        try:
            return await send(path, body | changed)
        except RefusedError:
            return None

    async def text(seed: int, **changed: Any) -> str | None:
        reply = await ask(temperature=_HOT, seed=seed, **changed)
        return None if reply is None else "".join(apart(reply.choices[0]))

    if (reply := await ask()) is None:
        return {}
    greedy, message = "".join(apart(reply.choices[0])), reply.choices[0].message
    first, again, other = [await text(seed) for seed in (1, 1, 2)]
    samples = None not in (first, again, other) and first != other
    alike = {name: await text(3, **{name: value}) == greedy for name, value in FILTERS.items()}
    several = await ask(n=2, temperature=_HOT)
    scored = await ask(logprobs=True if "messages" in body else 0)
    logprobs = scored.choices[0].logprobs if scored is not None else None
    return {
        "n": several is not None and len(several.choices) > 1,
        "seed": False if not endpoint.dialect.seeded else first == again if samples else None,
        **{name: found if samples else None for name, found in alike.items()},
        "logprobs": logprobs is not None and any(value is not None for _, value in logprobs.drawn),
        "choices": await choices.are_exact(Request(prompt=_PROMPT, choices=("yes", "no")), send),
        "continues": await sampler.continues(meter) if endpoint.options.api == "chat" else None,
        "parallel": await _overtakes(ask),
        "status": await endpoint.server.errors_have_a_status(),
        "thinking": True if message and (message.reasoning_content or message.reasoning) else None,
    }


async def _overtakes(ask: Callable[..., Awaitable[ServerReply | None]]) -> bool | None:
    """Return whether a short request ends before a long one. Tries twice, as the network may delay the short one."""
    ended: list[int] = []

    async def run(tokens: int, delay: float) -> tuple[ServerReply | None, bool]:
        await asyncio.sleep(delay)
        alone = bool(ended)
        reply = await ask(max_tokens=tokens)
        ended.append(tokens)
        return reply, alone

    for _ in range(2):
        ended.clear()
        (reply, _), (_, alone) = await together([partial(run, _LONG, 0.0), partial(run, 1, _HEAD_START)])
        if alone or not reply or not reply.usage or (reply.usage.completion_tokens or 0) < _LONG // 2:
            return None
        if ended[0] == 1:
            return True
    return False
