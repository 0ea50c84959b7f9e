"""Output: the growing text of one sample, and when it ends (end-of-text token, stop string, length).

Every policy passes its tokens to an Output, so only this file decides when a text ends. A stop string may span tokens
and begin in the middle of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from tot.decoders.engine.sampling import Draw, Sampled
from tot.decoders.engine.text import TextCodec
from tot.decoders.request import ChoiceLogprob, Completion, FinishReason, Part, Sampling, Usage


class Output:
    """Tokens of sample `index`, at most `limit` of them in the current part."""

    def __init__(self, codec: TextCodec, sampling: Sampling, index: int, limit: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        """Log-probability of each token."""
        self.states: list[np.ndarray[Any, np.dtype[np.float16]] | None] = []
        """Hidden states of each token, and of the token after the text if that was sampled."""
        self.finish_reason: FinishReason | None = None
        self.choice_logprobs: tuple[ChoiceLogprob, ...] = ()
        self.parts: list[Part] = []
        self.forwards = self.drafted = self.accepted = self.reached = 0
        self.glimpse: list[int] = []
        """Approximate tokens between a cut rationale and its trigger."""
        self.undecoded = 0
        """Tokens left in the limit of a cut rationale."""
        self._cut = False
        self._dropped = 0
        """Sampled tokens that are not part of the text, because a stop string ends inside them."""
        self.trajectory: list[tuple[int, tuple[int, ...]]] = []
        self._codec = codec
        self._sampling = sampling
        self._draw_fields = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, index
        """The fields of `Draw` that all tokens share."""
        self._stop_starts = [stop[:k] for stop in sampling.stop for k in range(1, len(stop))]
        self._open_part(limit)

    def _open_part(self, limit: int) -> None:
        self._limit = limit
        self._first = len(self.tokens)
        self._stream: Any = DecodeStream(skip_special_tokens=True)
        self._text = ""
        self._stop_end: int | None = None
        """Where a stop string that is part of the text ends. The text ends there unless end-of-text follows."""
        self._boundaries: list[tuple[int, int]] = [(self._first, 0)]
        """(tokens, characters) pairs at which the text consists of whole tokens."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts) + self._text

    @property
    def first(self) -> int:
        """Number of tokens drawn before this part."""
        return self._first

    @property
    def room(self) -> int:
        """Number of tokens that this part may still have."""
        return 0 if self.finish_reason else self._limit - (len(self.tokens) - self._first)

    def draw(self, ahead: int = 0) -> Draw:
        """Return how to draw the next token, or the token `ahead` positions after it."""
        return Draw(*self._draw_fields, self._sampling.drawn + len(self.tokens) + ahead)

    def add(self, sampled: Sampled) -> bool:
        """Append a token. Returns True if it ended the text; no token may be added after that."""
        token = sampled.token
        self.tokens.append(token)
        self.logprobs.append(sampled.logprob)
        self.states.append(sampled.states)
        if token in self._codec.end_ids and not self._sampling.ignore_eos:
            return self._end("eos")
        piece = self._stream.step(self._codec.backend, token)
        if piece is not None:
            length = len(self._text)
            self._text += piece
            self._boundaries.append((len(self.tokens), len(self._text)))
            matches = [(self._text.find(stop, max(0, length - len(stop) + 1)), stop) for stop in self._sampling.stop]
            if (hits := [(hit, hit + len(stop)) for hit, stop in matches if hit >= 0]) and self._stop_end is None:
                hit, end = min(hits)
                if not self._sampling.keep_stop:
                    self._text = self._text[:hit]
                    return self._end("stop")
                if self._text[:hit].strip():
                    self._stop_end = end
            if self._stop_end is not None and self._text[self._stop_end :].strip():
                self._keep(self._stop_end)
                return self._end("stop")
        if self.room:
            return False
        if self._sampling.keep_stop:
            self._keep(len(self._text))
        return self._end("length")

    def _keep(self, end: int) -> None:
        """Cut the text to whole tokens: after the last token with only blanks beyond character `end`.

        Tokens of an unfinished character are dropped. If no token qualifies, nothing changes.
        """
        tokens, characters = [(t, c) for t, c in self._boundaries if c <= end or not self._text[end:c].strip()][-1]
        if tokens > self._first:
            self._dropped = len(self.tokens) - tokens
            del self.tokens[tokens:], self.logprobs[tokens:], self.states[tokens + 1 :]
            self._text = self._text[:characters]

    def end(self, reason: FinishReason) -> None:
        """End the text from outside: the request is cancelled or out of budget."""
        if self.finish_reason is None:
            self._end(reason)

    def _end(self, reason: FinishReason) -> bool:
        self.finish_reason = reason
        if reason != "stop":  # the tokenizer decides how to render an unfinished character
            self._text = self._codec.decode(self.tokens[self._first :])
        return True

    def cut(self, glimpse: Sequence[int]) -> None:
        """End before the text is complete; `glimpse` are approximate tokens of its continuation."""
        self.glimpse = list(glimpse)
        self.undecoded = self.room - len(glimpse)
        self._cut = True
        self._end("length")

    def begin_answer(self, trigger: str, limit: int) -> tuple[int, str]:
        """Close the rationale, append the trigger and start the answer.

        Returns the number of tokens whose text is retained, and the text to encode after them (and after the glimpse).
        That text begins with the rest of a token if a stop string cut it in two.
        """
        tokens, characters = len(self.tokens), len(self._text)
        if not self._cut:
            tokens, characters = max(entry for entry in self._boundaries if entry[1] <= len(self._text))
        rest = self._text[characters:] + trigger
        self.parts.append(self._part())
        if self.glimpse:
            self.parts.append(Part("approximate", self._codec.decode(self.glimpse), len(self.glimpse)))
        if self.undecoded:
            self.parts.append(Part("undecoded", "", self.undecoded))
        self.parts.append(Part("trigger", trigger))
        self.finish_reason = None
        self._open_part(limit)
        return tokens, rest

    def completion(self, seconds: float, prompt_tokens: int = 0, reused: int = 0) -> Completion:
        """Return the completion, `seconds` after its request was submitted."""
        parts = (*self.parts, self._part())
        usage = Usage(
            prompt_tokens=prompt_tokens,
            reused_prompt_tokens=reused,
            new_tokens=len(self.tokens) + self._dropped,
            forwards=self.forwards,
            drafted=self.drafted,
            accepted=self.accepted,
            seconds=seconds,
            approximate_tokens=len(self.glimpse),
            undecoded_tokens=self.undecoded,
            reached=self.reached,
        )
        return Completion(
            text="".join(part.text for part in parts),
            tokens=tuple(self.tokens),
            logprob=math.fsum(self.logprobs),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or "cancelled",
            usage=usage,
            choice_logprobs=self.choice_logprobs,
            parts=parts,
            trajectory=tuple(self.trajectory),
            states=np.stack(states) if (states := [row for row in self.states if row is not None]) else None,
        )

    def _part(self) -> Part:
        return Part("exact", self._text, len(self.tokens) - self._first)

    def settled(self) -> str:
        """Return the text without a suffix that may be the beginning of a stop string."""
        if self.finish_reason is not None:
            return self.text
        pending = max((len(start) for start in self._stop_starts if self._text.endswith(start)), default=0)
        return self.text[: len(self.text) - pending]
