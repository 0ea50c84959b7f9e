"""Asked: what came over the wire, as requests to a decoder. Here limits are applied and what can't be done is refused.

Knows no engine: what only a tokenizer can tell (lengths) is checked where requests are submitted.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tot.decoders.request import Message, Request, Sampling
from tot.decoders.serving.errors import ServingError
from tot.decoders.serving.limits import Limits
from tot.decoders.serving.wire import ChatWanted, TextWanted, Wanted

_TEXT_TOKENS = 16
"""What a text completion gets that doesn't say how many tokens, as OpenAI's."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request's worth of work: a request a prompt, all of them decoded by one method."""

    model: str
    """As the client named it."""
    decoder: str
    requests: tuple[Request, ...]
    chat: bool
    seed: int
    """Of the first prompt. Where the client gave none, each prompt has its own."""
    include_usage: bool = False
    echo: bool = False
    logprobs: int | None = None
    """Tell the log-probabilities of tokens, and of so many alternatives to each."""
    draws: bool = True
    """False: the prompt is scored, nothing is decoded."""

    @property
    def samples(self) -> int:
        """Texts in the reply."""
        return sum(request.sampling.n for request in self.requests)


def asked(wanted: ChatWanted | TextWanted, decoder: str, limits: Limits) -> Asked:
    """What is to be done. Raises ServingError or pydantic's ValidationError for what can't be."""
    chat = isinstance(wanted, ChatWanted)
    prompts = _messages(wanted) if isinstance(wanted, ChatWanted) else _prompts(wanted)
    samples = len(prompts) * wanted.n
    if samples > limits.max_samples:
        raise ServingError(
            400,
            f"{samples} texts at once (prompts times n) are over the limit of {limits.max_samples}: ask for fewer",
            "n",
            "too_many_samples",
        )
    logprobs = _alternatives(wanted)
    _check_fields(wanted, decoder, logprobs)
    tokens = _max_tokens(wanted, limits)
    if wanted.answer_tokens > limits.max_tokens:
        raise _above("answer_tokens", wanted.answer_tokens, limits)
    seeds = [secrets.randbits(63) if wanted.seed is None else wanted.seed for _ in prompts]
    return Asked(
        model=wanted.model,
        decoder=decoder,
        requests=tuple(
            Request(
                prompt=prompt,
                sampling=Sampling(
                    max_tokens=max(1, tokens),
                    temperature=wanted.temperature,
                    top_k=wanted.top_k,
                    top_p=wanted.top_p,
                    min_p=wanted.min_p,
                    stop=tuple(wanted.stop),
                    seed=seed,
                    n=wanted.n,
                    ignore_eos=wanted.ignore_eos,
                ),
                purpose=wanted.purpose,
                choices=tuple(wanted.choices),
                close_choices=wanted.close_choices,
                answer_trigger=wanted.answer_trigger,
                answer_tokens=wanted.answer_tokens,
                steps=tuple(wanted.steps),
                whole_rationale=wanted.whole_rationale,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
        ),
        chat=chat,
        seed=seeds[0],
        include_usage=wanted.stream_options is not None and wanted.stream_options.include_usage,
        echo=isinstance(wanted, TextWanted) and wanted.echo,
        logprobs=logprobs,
        draws=tokens > 0 or bool(wanted.choices),
    )


def _messages(wanted: ChatWanted) -> list[tuple[Message, ...]]:
    return [tuple(Message(role=message.role, content=message.content) for message in wanted.messages)]


def _prompts(wanted: TextWanted) -> list[str | tuple[int, ...]]:
    prompt = wanted.prompt
    if isinstance(prompt, str):
        return [prompt]
    several = prompt if not isinstance(prompt[0], int) else [prompt]
    prompts = [one if isinstance(one, str) else tuple(one) for one in several]
    if not all(prompts):
        raise ServingError(
            400, f"prompt {prompts.index('') if '' in prompts else prompts.index(())} is empty", "prompt"
        )
    return prompts


def _max_tokens(wanted: ChatWanted | TextWanted, limits: Limits) -> int:
    given = wanted.max_tokens
    if isinstance(wanted, ChatWanted) and given is None:
        given = wanted.max_completion_tokens
    if given is None:
        return limits.max_tokens if isinstance(wanted, ChatWanted) else min(_TEXT_TOKENS, limits.max_tokens)
    if given > limits.max_tokens:
        raise _above("max_tokens" if wanted.max_tokens is not None else "max_completion_tokens", given, limits)
    return given


def _alternatives(wanted: ChatWanted | TextWanted) -> int | None:
    if isinstance(wanted, TextWanted):
        return wanted.logprobs
    return wanted.top_logprobs if wanted.logprobs else None


def _above(field: str, given: int, limits: Limits) -> ServingError:
    return ServingError(
        400, f"{field} is {given} and this server's limit is {limits.max_tokens}: ask for less", field, "above_limit"
    )


def _check_fields(wanted: Wanted, decoder: str, logprobs: int | None) -> None:
    """Fields of ours that this decoder would not honour, and log-probabilities that could not be told truly."""
    if wanted.steps and decoder != "pdos":
        raise ServingError(
            400,
            f"steps are what pdos decodes side by side, and this request goes to {decoder}: name the model "
            f"{wanted.model.partition(':')[0]}:pdos",
            "steps",
        )
    if isinstance(wanted, TextWanted) and wanted.echo and (wanted.choices or wanted.answer_trigger):
        raise ServingError(
            400, "echo goes with plain texts, without choices or an answer trigger: leave it out", "echo"
        )
    if logprobs is None:
        return
    for field in ("stream", "choices", "answer_trigger"):
        if getattr(wanted, field):
            raise ServingError(
                400, f"logprobs are told of whole, plain texts only: leave out {field} or logprobs", "logprobs"
            )
    if decoder == "pdos":
        raise ServingError(
            400, "logprobs can't be told of parallel steps, which have not seen one another: leave them out", "logprobs"
        )
