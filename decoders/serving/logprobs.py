"""Log-probabilities of given tokens: a policy that scores a text without sampling, and OpenAI's JSON of the scores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from scipy.special import log_softmax
from tokenizers.decoders import DecodeStream

from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import Job
from tot.decoders.engine.text import TextCodec
from tot.decoders.methods.choices import Scoring


@dataclass(slots=True)
class Scored:
    """The tokens of one text and their logprobs (nats), before temperature and filters, filled in chunks."""

    tokens: list[int]
    unscored: int
    """Number of tokens at the start that are not scored."""
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    """At each scored position the most likely tokens, best first, and its own token, with their logprobs."""


class TextScoring(Scoring):
    """Scores a text's tokens after the unscored ones, as the continuation of the request's prompt."""

    def __init__(self, job: Job, text: Scored, top: int) -> None:
        super().__init__(job, [text.tokens[text.unscored :]], raw=top > 0)
        self._text = text
        self._top = top

    def take(self, number: int, row: Sequence[Sampled]) -> None:
        for one in row:
            self._add(one)

    def _add(self, row: Sampled) -> None:
        """Add the score of the next token."""
        text = self._text
        if row.logits is None:
            text.logprobs.append(row.logprob)
            return
        logprobs, token = log_softmax(row.logits), self._continuations[0][len(text.logprobs)]
        likely = np.flatnonzero(logprobs >= np.partition(logprobs, -self._top)[-self._top])
        best = likely[np.argsort(-logprobs[likely], stable=True)][: self._top].tolist()
        text.logprobs.append(float(logprobs[token]))
        text.top.append([(i, float(logprobs[i])) for i in (best if token in best else [*best, token])])


def chat_logprobs(scored: Scored, codec: TextCodec) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": _text_of(token, codec), "logprob": logprob, "bytes": _bytes_of(token, codec)}

    tops = scored.top or [[] for _ in scored.logprobs]
    rows = zip(scored.tokens, scored.logprobs, tops, strict=True)
    content = [{**entry(one, logprob), "top_logprobs": [entry(*best) for best in top]} for one, logprob, top in rows]
    return {"content": content, "refusal": None}


def text_logprobs(scored: Scored, codec: TextCodec) -> dict[str, Any]:
    """Return the `logprobs` of a text completion's choice."""
    none = [None] * scored.unscored
    top = [{_text_of(token, codec): logprob for token, logprob in reversed(pairs)} for pairs in scored.top]
    return {
        "tokens": [_text_of(token, codec) for token in scored.tokens],
        "token_logprobs": [*none, *scored.logprobs],
        "top_logprobs": [*none, *top] if scored.top else None,
        "text_offset": list(_offsets(scored.tokens, codec)),
    }


def _text_of(token: int, codec: TextCodec) -> str:
    """Return a token as text, or its vocabulary entry if it is a part of a character."""
    text: str = codec.backend.decode([token], skip_special_tokens=False)
    return str(codec.backend.id_to_token(token)) if "\ufffd" in text else text


def _bytes_of(token: int, codec: TextCodec) -> list[int] | None:
    """Return a token's bytes, which may be a part of a character; None if they are unknown."""
    text: str = codec.backend.decode([token], skip_special_tokens=False)
    if "\ufffd" not in text:
        return list(text.encode())
    entry = _text_of(token, codec)
    if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", entry):
        return [int(byte[1], 16)]
    known = _byte_of()
    return [known[character] for character in entry] if known.keys() >= set(entry) else None


def _offsets(tokens: Sequence[int], codec: TextCodec) -> Iterator[int]:
    """Yield the number of characters before each token. Tokens that share a character share its offset."""
    stream: Any = DecodeStream(skip_special_tokens=True)
    length = 0
    for token in tokens:
        yield length
        length += len(stream.step(codec.backend, token) or "")


@cache
def _byte_of() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary: itself if it is printable, else the next free."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
