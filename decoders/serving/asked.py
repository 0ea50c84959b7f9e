"""Asked: what came over the wire, as requests to a decoder. Here limits are applied and what can't be done is refused.

Knows no engine: what only a tokenizer can tell (lengths) is checked where requests are submitted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tot.decoders.request import Message, Request, Sampling
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.options import Limits
from tot.decoders.serving.wire import ChatWanted, TextWanted

_TEXT_TOKENS = 16
"""What a text completion gets that doesn't say how many tokens, as OpenAI's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request's worth of work: a request a prompt, all of them decoded by one method."""

    wanted: ChatWanted | TextWanted
    decoder: str
    requests: tuple[Request, ...]
    """Where the client gave no seed, each has its own."""

    @property
    def chat(self) -> bool:
        return isinstance(self.wanted, ChatWanted)


def asked(wanted: ChatWanted | TextWanted, decoder: str, limits: Limits) -> Asked:
    """What is to be done. Raises ServingError or pydantic's ValidationError for what can't be."""
    prompts = _prompts(wanted)
    samples = len(prompts) * wanted.n
    if samples > limits.max_samples:
        said = f"{samples} texts at once (prompts times n) are over the limit of {limits.max_samples}: ask for fewer"
        raise ServingError(400, said, "n", "too_many_samples")
    _check_fields(wanted, decoder)
    _check_tokens(wanted, limits)
    tokens = wanted.new_tokens
    if tokens is None:
        tokens = limits.max_tokens if isinstance(wanted, ChatWanted) else min(_TEXT_TOKENS, limits.max_tokens)
    sampling = wanted.model_dump(include=Sampling.model_fields.keys() - {"max_tokens", "seed"})
    fields = wanted.model_dump(include=Request.model_fields.keys() - {"prompt"})
    fields["answer_tokens"] = min(wanted.answer_tokens, limits.max_tokens)
    requests = []
    for prompt in prompts:
        seed = secrets.randbits(63) if wanted.seed is None else wanted.seed
        drawn = Sampling(max_tokens=max(1, tokens), seed=seed, **sampling)
        requests.append(Request(prompt=prompt, sampling=drawn, **fields))
    return Asked(wanted, decoder, tuple(requests))


def _prompts(wanted: ChatWanted | TextWanted) -> list[str | tuple[int, ...] | tuple[Message, ...]]:
    if isinstance(wanted, ChatWanted):
        return [tuple(Message(role=message.role, content=message.content) for message in wanted.messages)]
    prompt = wanted.prompt
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    prompts: list[str | tuple[int, ...] | tuple[Message, ...]]
    prompts = [one if isinstance(one, str) else tuple(one) for one in several]
    for place, one in enumerate(prompts):
        if not one:
            raise ServingError(400, f"prompt {place} is empty", "prompt")
    return prompts


def _check_tokens(wanted: ChatWanted | TextWanted, limits: Limits) -> None:
    for field in ("max_tokens", "max_completion_tokens", "answer_tokens"):
        given = getattr(wanted, field, None) if field in wanted.model_fields_set else None
        if given is not None and given > limits.max_tokens:
            said = f"{field} is {given} and this server's limit is {limits.max_tokens}: ask for less"
            raise ServingError(400, said, field, "above_limit")


def _check_fields(wanted: ChatWanted | TextWanted, decoder: str) -> None:
    """Fields of ours that this decoder would not honour, and log-probabilities that could not be told truly."""
    if wanted.steps and decoder != "pdos":
        named = f"{wanted.model.partition(':')[0]}:pdos"
        said = f"steps are what pdos decodes side by side, and this request goes to {decoder}: name the model {named}"
        raise ServingError(400, said, "steps")
    if wanted.echo:
        if wanted.choices or wanted.answer_trigger:
            said = "echo goes with plain texts, without choices or an answer trigger: leave it out"
            raise ServingError(400, said, "echo")
        if wanted.stream:
            raise ServingError(400, "echo is for whole replies: leave it or stream out", "echo")
    if wanted.alternatives is None:
        return
    for field in ("stream", "choices", "answer_trigger"):
        if getattr(wanted, field):
            said = f"logprobs are told of whole, plain texts only: leave out {field} or logprobs"
            raise ServingError(400, said, "logprobs")
    if decoder == "pdos":
        said = "logprobs can't be told of parallel steps, which have not seen one another: leave them out"
        raise ServingError(400, said, "logprobs")
