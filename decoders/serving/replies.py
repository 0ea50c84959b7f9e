"""Convert completions to OpenAI's JSON: complete replies, stream chunks, usage and logprobs.

Additional fields: `tot` (decoder, seed), `parts` and `answer` of rationales, and, on request, `choice_logprobs`,
`token_ids`, `token_logprobs` and `finish`. `usage` also has the forward passes, the drafted, accepted, approximate and
undecoded tokens, and the reached draft positions.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import chain
from typing import Any

from tokenizers.decoders import DecodeStream

from tot.decoders.engine.sequence import ThinkingPiece
from tot.decoders.engine.text import TextCodec
from tot.decoders.request import Completion, FinishReason, Usage
from tot.decoders.serving.scoring import Scored
from tot.decoders.serving.service import Outcome
from tot.decoders.serving.wire import Asked


class ServedReply:
    """The reply to one HTTP request, with one id and one creation time for all of its chunks."""

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
        for i, completions in enumerate(outcome.completions):
            for sample, completion in enumerate(completions):
                scored = outcome.scored[i][sample] if outcome.scored else None
                echo = self._echoed(i, outcome.prompts) if self._asked.wanted.echo else ""
                choices.append(self._choice(len(choices), completion, scored, echo))
        return {**self._head, "choices": choices, "usage": usage(outcome.completions, outcome.forwards)}

    def _echoed(self, i: int, prompts: list[list[int]]) -> str:
        """Return a prompt as text."""
        prompt = self._asked.requests[i].prompt
        return prompt if isinstance(prompt, str) else self._codec.decode(prompts[i])

    def opening(self, index: int) -> dict[str, Any]:
        """Return the first chunk of a choice's stream."""
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, index: int, text: str) -> dict[str, Any]:
        field = "reasoning_content" if isinstance(text, ThinkingPiece) else "content"
        content = {"delta": {field: text}} if self._asked.chat else {"text": text}
        return self._chunk({"index": index, **content, "finish_reason": None})

    def ending(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return the last chunk of a choice's stream: the finish reason and the additional fields."""
        content: dict[str, Any] = {"delta": {}} if self._asked.chat else {"text": ""}
        extra = self._extra_fields(completion)
        return self._chunk({"index": index, **content, "finish_reason": _reason(completion), **extra})

    def usage(self, completions: Sequence[Sequence[Completion]], forwards: int) -> dict[str, Any]:
        """Return the usage chunk, the last one if requested."""
        return {**self._chunk(None), "usage": usage(completions, forwards)}

    def _chunk(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        return {**self._head, "object": kind, "choices": [] if choice is None else [{**choice, "logprobs": None}]}

    def _choice(self, index: int, completion: Completion, scored: Scored | None, echo: str) -> dict[str, Any]:
        content: dict[str, Any]
        if self._asked.chat:
            content = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
            if completion.thinking:
                content["message"]["reasoning_content"] = completion.thinking
            logprobs = None if scored is None else self._chat_logprobs(scored)
        else:
            content = {"text": echo + completion.text}
            logprobs = None if scored is None else self._text_logprobs(scored)
        return {
            "index": index,
            **content,
            "finish_reason": _reason(completion),
            "logprobs": logprobs,
            **self._extra_fields(completion),
        }

    def _extra_fields(self, completion: Completion) -> dict[str, Any]:
        """Return the fields of a choice that OpenAI's format does not have."""
        fields: dict[str, Any] = {}
        if self._asked.wanted.return_token_ids:
            fields |= {"token_ids": completion.tokens, "token_logprobs": completion.logprobs}
            fields["finish"] = completion.finish_reason
        if completion.choice_logprobs:
            fields["choice_logprobs"] = [asdict(choice) for choice in completion.choice_logprobs]
        if len(completion.parts) > 1:
            fields["parts"] = [asdict(part) for part in completion.parts]
            fields["answer"] = completion.answer
        return fields

    def _chat_logprobs(self, scored: Scored) -> dict[str, Any]:
        rows = zip(scored.tokens, scored.logprobs, _top(scored), strict=True)
        return {
            "content": [
                {**self._entry(token, logprob), "top_logprobs": [self._entry(*pair) for pair in top]}
                for token, logprob, top in rows
            ],
            "refusal": None,
        }

    def _text_logprobs(self, scored: Scored) -> dict[str, Any]:
        none = [None] * scored.unscored
        top = [{self._token_text(token): logprob for token, logprob in reversed(pairs)} for pairs in _top(scored)]
        return {
            "tokens": [self._token_text(token) for token in scored.tokens],
            "token_logprobs": [*none, *scored.logprobs],
            "top_logprobs": [*none, *top] if scored.top else None,
            "text_offset": list(self._offsets(scored.tokens)),
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token_text(token), "logprob": logprob, "bytes": self._bytes_of(token)}

    def _bytes_of(self, token: int) -> list[int] | None:
        """Return a token's bytes, which may be a part of a character; None if they are unknown."""
        if (text := self._text_of(token)) is not None:
            return list(text.encode())
        token_text = self._token_text(token)
        if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", token_text):
            return [int(byte[1], 16)]
        known = _byte_of()
        return [known[character] for character in token_text] if known.keys() >= set(token_text) else None

    def _token_text(self, token: int) -> str:
        """Return a token as text, or its vocabulary entry if it is a part of a character."""
        text = self._text_of(token)
        return str(self._codec.backend.id_to_token(token)) if text is None else text

    def _text_of(self, token: int) -> str | None:
        text: str = self._codec.backend.decode([token], skip_special_tokens=False)
        return None if "\ufffd" in text else text

    def _offsets(self, tokens: Sequence[int]) -> Iterator[int]:
        """Yield the number of characters before each token. Tokens that share a character share its offset."""
        stream: Any = DecodeStream(skip_special_tokens=True)
        length = 0
        for token in tokens:
            yield length
            length += len(stream.step(self._codec.backend, token) or "")


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary: itself if it is printable, else the next free."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _top(scored: Scored) -> list[list[tuple[int, float]]]:
    return scored.top or [[] for _ in scored.logprobs]


def _reason(completion: Completion) -> str:
    ends: dict[FinishReason, str] = {"eos": "stop", "stop": "stop"}
    return ends.get(completion.finish_reason, "length")


def usage(completions: Sequence[Sequence[Completion]], forwards: int) -> dict[str, Any]:
    """Return the usage of all completions of a reply; `forwards` counts shared forward passes once."""
    return usage_of(replace(sum((completion.usage for completion in chain(*completions)), Usage()), forwards=forwards))


def usage_of(total: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.new_tokens,
        "total_tokens": total.prompt_tokens + total.new_tokens,
        "prompt_tokens_details": {"cached_tokens": total.reused_prompt_tokens},
        "forwards": total.forwards,
        "drafted_tokens": total.drafted,
        "accepted_tokens": total.accepted,
        "reached_positions": total.reached,
        "approximate_tokens": total.approximate_tokens,
        "undecoded_tokens": total.undecoded_tokens,
    }
