"""Completions as OpenAI's JSON: whole replies, chunks of streams, usage, log-probabilities.

What they have no field for stands beside: `tot` (decoder, seed), `parts` and `answer` of rationales, `choice_logprobs`,
`token_ids`, `token_logprobs` and `finish` where a client asks for them, and in `usage` the forwards, the tokens
drafted, accepted, approximate and never decoded, and the drafts' positions that were reached.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from itertools import chain
from typing import Any

from tokenizers.decoders import DecodeStream

from tot.decoders.engine.text import TextCodec
from tot.decoders.request import Completion, FinishReason, Usage
from tot.decoders.serving.scoring import Scored
from tot.decoders.serving.service import Outcome
from tot.decoders.serving.wire import Asked


class ServedReply:
    """All that is said about one HTTP request: one id, one time."""

    def __init__(self, asked: Asked, codec: TextCodec) -> None:
        self._asked = asked
        self._codec = codec
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": asked.wanted.model,
            "tot": {"decoder": asked.decoder, "seed": asked.requests[0].sampling.seed},
        }

    def whole(self, outcome: Outcome) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for at, completions in enumerate(outcome.completions):
            for sample, completion in enumerate(completions):
                scored = outcome.scored[at][sample] if outcome.scored else None
                echo = self._echoed(at, outcome.prompts) if self._asked.wanted.echo else ""
                choices.append(self._choice(len(choices), completion, scored, echo))
        return {**self._head, "choices": choices, "usage": usage(outcome.completions, outcome.forwards)}

    def _echoed(self, at: int, prompts: list[list[int]]) -> str:
        """A prompt as text."""
        given = self._asked.requests[at].prompt
        return given if isinstance(given, str) else self._codec.decode(prompts[at])

    def opening(self, index: int) -> dict[str, Any]:
        """What a choice's stream begins with."""
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        said = {"delta": {"content": text}} if self._asked.chat else {"text": text}
        return self._chunk({"index": index, **said, "finish_reason": None})

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """The end of a choice's stream: why, and what is known of the whole of it."""
        said: dict[str, Any] = {"delta": {}} if self._asked.chat else {"text": ""}
        return self._chunk({"index": index, **said, "finish_reason": _reason(completion), **self._beside(completion)})

    def usage(self, completions: Sequence[Sequence[Completion]], forwards: int) -> dict[str, Any]:
        """The last chunk, where the client asked for it."""
        return {**self._chunk(None), "usage": usage(completions, forwards)}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        return {**self._head, "object": kind, "choices": [] if choice is None else [{**choice, "logprobs": None}]}

    def _choice(self, index: int, completion: Completion, scored: Scored | None, echo: str) -> dict[str, Any]:
        said: dict[str, Any]
        if self._asked.chat:
            said = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
            logprobs = None if scored is None else self._chat_logprobs(scored)
        else:
            said = {"text": echo + completion.text}
            logprobs = None if scored is None else self._text_logprobs(scored)
        return {
            "index": index,
            **said,
            "finish_reason": _reason(completion),
            "logprobs": logprobs,
            **self._beside(completion),
        }

    def _beside(self, completion: Completion) -> dict[str, Any]:
        """What is ours, where there is any of it."""
        said: dict[str, Any] = {}
        if self._asked.wanted.return_token_ids:
            said |= {"token_ids": completion.tokens, "token_logprobs": completion.logprobs}
            said["finish"] = completion.finish_reason
        if completion.choice_logprobs:
            said["choice_logprobs"] = [asdict(choice) for choice in completion.choice_logprobs]
        if len(completion.parts) > 1:
            said["parts"] = [asdict(part) for part in completion.parts]
            said["answer"] = completion.answer
        return said

    def _chat_logprobs(self, scored: Scored) -> dict[str, Any]:
        rows = zip(scored.tokens, scored.logprobs, _top(scored), strict=True)
        return {
            "content": [
                {**self._told(token, logprob), "top_logprobs": [self._told(*one) for one in top]}
                for token, logprob, top in rows
            ],
            "refusal": None,
        }

    def _text_logprobs(self, scored: Scored) -> dict[str, Any]:
        none = [None] * scored.unscored
        top = [{self._spelled(token): logprob for token, logprob in reversed(one)} for one in _top(scored)]
        return {
            "tokens": [self._spelled(token) for token in scored.tokens],
            "token_logprobs": [*none, *scored.logprobs],
            "top_logprobs": [*none, *top] if scored.top else None,
            "text_offset": list(self._offsets(scored.tokens)),
        }

    def _told(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._spelled(token), "logprob": logprob, "bytes": self._bytes_of(token)}

    def _bytes_of(self, token: int) -> list[int] | None:
        """One token's bytes, also where they are a part of a character; None for a token of no known spelling."""
        if (text := self._text_of(token)) is not None:
            return list(text.encode())
        spelled = self._spelled(token)
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", spelled):
            return [int(byte[1], 16)]
        known = _byte_of()
        return [known[character] for character in spelled] if known.keys() >= set(spelled) else None

    def _spelled(self, token: int) -> str:
        """One token as text; a part of a character as the vocabulary spells it."""
        text = self._text_of(token)
        return str(self._codec.backend.id_to_token(token)) if text is None else text

    def _text_of(self, token: int) -> str | None:
        text: str = self._codec.backend.decode([token], skip_special_tokens=False)
        return None if "\ufffd" in text else text

    def _offsets(self, tokens: Sequence[int]) -> Iterator[int]:
        """Characters before each token. Tokens that share a character have the place where it begins."""
        stream: Any = DecodeStream(skip_special_tokens=True)
        length = 0
        for token in tokens:
            yield length
            length += len(stream.step(self._codec.backend, token) or "")


@cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _top(scored: Scored) -> list[list[tuple[int, float]]]:
    return scored.top or [[] for _ in scored.logprobs]


def _reason(completion: Completion) -> str:
    ends: dict[FinishReason, str] = {"eos": "stop", "stop": "stop"}
    return ends.get(completion.finish_reason, "length")


def usage(completions: Sequence[Sequence[Completion]], forwards: int) -> dict[str, Any]:
    """What was spent on all texts of a reply; `forwards` counts those that they shared once."""
    spent = sum((completion.usage for completion in chain(*completions)), Usage())
    return {
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.new_tokens,
        "total_tokens": spent.prompt_tokens + spent.new_tokens,
        "prompt_tokens_details": {"cached_tokens": spent.reused_prompt_tokens},
        "forwards": forwards,
        "drafted_tokens": spent.drafted,
        "accepted_tokens": spent.accepted,
        "reached_positions": spent.reached,
        "approximate_tokens": spent.approximate_tokens,
        "undecoded_tokens": spent.undecoded_tokens,
    }
