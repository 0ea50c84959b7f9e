"""Output: the growing text of one sample, and when it ends (end-of-text token, stop string, length).

Every policy hands its tokens to one of these, so what ends a text is decided in one place. A stop string may span
tokens and begin in the middle of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from tot.decoders.engine.sampling import Draw, Sampled
from tot.decoders.engine.text import TextCodec
from tot.decoders.request import ChoiceLogprob, Completion, FinishReason, Part, Sampling, Usage


class Output:
    """Tokens of sample `index`, at most `limit` of them in this part."""

    def __init__(self, codec: TextCodec, sampling: Sampling, index: int, limit: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        """Of each of `tokens`."""
        self.states: list[Tensor | None] = []
        """The same, and of the token after the text where that was looked at."""
        self.finish_reason: FinishReason | None = None
        self.choice_logprobs: tuple[ChoiceLogprob, ...] = ()
        self.parts: list[Part] = []
        self.forwards = self.drafted = self.accepted = self.reached = 0
        self.glimpse: list[int] = []
        """Approximate tokens that stand between a rationale that was cut and its trigger."""
        self.undecoded = 0
        """Tokens that a rationale which was cut had still room for."""
        self._cut = False
        self._dropped = 0
        """Tokens that a stop string cut in two: drawn, and no part of the text."""
        self.trajectory: list[tuple[int, tuple[int, ...]]] = []
        self._codec = codec
        self._sampling = sampling
        self._how = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, index
        """How all of its tokens are."""
        self._stop_starts = [stop[:k] for stop in sampling.stop for k in range(1, len(stop))]
        self._open_part(limit)

    def _open_part(self, limit: int) -> None:
        self._limit = limit
        self._first = len(self.tokens)
        self._stream: Any = DecodeStream(skip_special_tokens=True)
        self._text = ""
        self._kept_stop: int | None = None
        """Where a stop string that is kept ends. The text ends there, unless the model ends it after it."""
        self._whole: list[tuple[int, int]] = [(self._first, 0)]
        """(tokens, characters) at which the text so far was made of whole tokens."""

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts) + self._text

    @property
    def room(self) -> int:
        """How many more tokens this part may have."""
        return 0 if self.finish_reason else self._limit - (len(self.tokens) - self._first)

    def draw(self, ahead: int = 0) -> Draw:
        """How to draw the next token, or the one `ahead` positions after it."""
        return Draw(*self._how, self._sampling.drawn + len(self.tokens) + ahead)

    def add(self, sampled: Sampled) -> bool:
        """Append a token. Returns True where it ended the text; nothing may be added after that."""
        token = sampled.token
        self.tokens.append(token)
        self.logprobs.append(sampled.logprob)
        self.states.append(sampled.states)
        if token in self._codec.end_ids and not self._sampling.ignore_eos:
            return self._end("eos")
        piece = self._stream.step(self._codec.backend, token)
        if piece is not None:
            searched = len(self._text)
            self._text += piece
            self._whole.append((len(self.tokens), len(self._text)))
            found = [(self._text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._sampling.stop]
            if (hits := [(hit, hit + len(stop)) for hit, stop in found if hit >= 0]) and self._kept_stop is None:
                hit, end = min(hits)
                if not self._sampling.keep_stop:
                    self._text = self._text[:hit]
                    return self._end("stop")
                if self._text[:hit].strip():
                    self._kept_stop = end
            if self._kept_stop is not None and self._text[self._kept_stop :].strip():
                self._keep(self._kept_stop)
                return self._end("stop")
        if self.room:
            return False
        if self._sampling.keep_stop:
            self._keep(len(self._text))
        return self._end("length")

    def _keep(self, end: int) -> None:
        """Drop what comes after character `end` in whole tokens; the rest of its own token where that isn't blank, and
        the beginnings of a character."""
        kept, characters = [one for one in self._whole if one[1] <= end or not self._text[end : one[1]].strip()][-1]
        if kept > self._first:
            self._dropped = len(self.tokens) - kept
            del self.tokens[kept:], self.logprobs[kept:], self.states[kept + 1 :]
            self._text = self._text[:characters]

    def end(self, reason: FinishReason) -> None:
        """End from outside: cancelled, or out of budget."""
        if self.finish_reason is None:
            self._end(reason)

    def _end(self, reason: FinishReason) -> bool:
        self.finish_reason = reason
        if reason != "stop":  # bytes of a character that never came whole are shown as the tokenizer shows them
            self._text = self._codec.decode(self.tokens[self._first :])
        return True

    def cut(self, glimpse: Sequence[int]) -> None:
        """End before the text is complete; approximate tokens say how it may go on."""
        self.glimpse = list(glimpse)
        self.undecoded = self.room - len(glimpse)
        self._cut = True
        self._end("length")

    def begin_answer(self, trigger: str, limit: int) -> tuple[int, str]:
        """Close the rationale, append the trigger and let the text go on.

        Returns how many of the tokens stand for text that was kept, and what text is to be encoded after them (and
        after the glimpse): a stop string may have cut a token in two.
        """
        kept, characters = len(self.tokens), len(self._text)
        if not self._cut:
            kept, characters = max(entry for entry in self._whole if entry[1] <= len(self._text))
        rest = self._text[characters:] + trigger
        self.parts.append(self._part())
        if self.glimpse:
            self.parts.append(Part("approximate", self._codec.decode(self.glimpse), len(self.glimpse)))
        if self.undecoded:
            self.parts.append(Part("undecoded", "", self.undecoded))
        self.parts.append(Part("trigger", trigger))
        self.finish_reason = None
        self._open_part(limit)
        return kept, rest

    def completion(self, seconds: float, prompt_tokens: int = 0, reused: int = 0) -> Completion:
        """What came of it, `seconds` after its request was submitted."""
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
            states=torch.stack(states) if (states := [one for one in self.states if one is not None]) else None,
        )

    def _part(self) -> Part:
        return Part("exact", self._text, len(self.tokens) - self._first)

    def settled(self) -> str:
        """The text without an end that may yet turn out to be the beginning of a stop string."""
        if self.finish_reason is not None:
            return self.text
        held = max((len(start) for start in self._stop_starts if self._text.endswith(start)), default=0)
        return self.text[: len(self.text) - held]
