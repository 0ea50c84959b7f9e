"""Output: the growing text of one sample, and when it ends (end-of-text token, stop string, length, repetition).

Every policy passes its tokens to an Output, so only this file decides when a text ends. A stop string may span tokens
and begin in the middle of one. Thinking before the answer is a part of its own, which no stop string ends.
"""

from __future__ import annotations

import math

from tot.decoders.engine.grammar import Matcher
from tot.decoders.engine.sampling import Draw, Sampled
from tot.decoders.engine.text import TextCodec, TextStream
from tot.decoders.models.shapes import Array
from tot.decoders.request import ChoiceLogprob, Completion, FinishReason, Part, Sampling, Usage
from tot.decoders.thinking import (
    Thinking,
    answer_of,
    before_tag,
    begins_tag,
    cut_in_tag,
    find_thinking,
    split,
)

LONGEST_CHARACTER = 4
"""Tokens of a character at most."""
_PERIOD, _REPEATS, _REPEATED = 128, 24, 256
"""A text that ends with the same tokens, `_PERIOD` at most, has no end if they are repeated `_REPEATS` times and in
`_REPEATED` tokens. Rows of tables and grids are shorter or differ."""
_CHECKED = 16
"""Tokens between two checks for repetitions."""


class Output:
    """Tokens of sample `index`, at most `limit` of them beside its thinking."""

    def __init__(
        self,
        codec: TextCodec,
        sampling: Sampling,
        index: int,
        limit: int,
        awaits: str | None = None,
        thinking_limit: int = 0,
        total: int | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """`awaits`: the tag that closes the thinking in which the text begins, "" if it may begin with thinking, and
        None if it has none. `thinking_limit`: maximum tokens of thinking; `total`: of both, by default the sum.
        `matcher`: the constraint on the text."""
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        """Log-probability of each token."""
        self.finish_reason: FinishReason | None = None
        self.choice_logprobs: tuple[ChoiceLogprob, ...] = ()
        self.matcher = matcher
        self.forwards = self.drafted = self.accepted = self.reached = self.forced = 0
        self._forced_at = 0
        """Number of tokens up to the last forced one."""
        self._dropped = 0
        """Sampled tokens that are not part of the text, because a stop string ends inside them."""
        self.trajectory: list[tuple[int, tuple[int, ...]]] = []
        self._codec = codec
        self._sampling = sampling
        filters = sampling.top_k, sampling.top_p, sampling.min_p
        self._draw_fields = sampling.temperature, *filters, sampling.seed, sampling.sample + index
        """The fields of `Draw` that all tokens share."""
        self._stop_starts = [stop[:k] for stop in sampling.stop for k in range(1, len(stop))]
        self.awaits = awaits
        self.thinking_limit = thinking_limit
        self.limit = limit
        self._limit = limit + thinking_limit if total is None else total
        self._stream = TextStream(codec)
        self._text = ""
        self._thinking = Thinking("", 0, awaits or "")
        self._begin = 0 if awaits is None else None
        """Where the answer begins in the text; None until it is known."""
        self._stop_end: int | None = None
        """Where a stop string that is part of the text ends. The text ends there unless end-of-text follows."""
        self._boundaries: list[tuple[int, int]] = [(0, 0)]
        """(tokens, characters) pairs at which the text consists of whole tokens."""

    @property
    def text(self) -> str:
        """The text without its thinking, unless `keep_stop` cuts thinking into pieces, too."""
        if self._sampling.keep_stop:
            return self._text
        return "" if self._begin is None and self.thinks else self._text[self._begin or 0 :]

    @property
    def thinks(self) -> bool:
        """Whether the text has thinking."""
        return bool(self._thinking.end or self._thinking.awaits)

    @property
    def room(self) -> int:
        """Number of tokens that the text may still have."""
        return 0 if self.finish_reason else self._limit - len(self.tokens)

    def draw(self, ahead: int = 0, mask: Array | None = None) -> Draw:
        """Return how to draw the next token, or the token `ahead` positions after it, which `mask` allows."""
        if not ahead and self.matcher is not None:
            mask = self.matcher.mask
        return Draw(*self._draw_fields, self._sampling.drawn + len(self.tokens) + ahead, mask)

    def force(self) -> list[int]:
        """Append the tokens for which the constraint leaves no choice, and return them. May end the text.

        Their log-probability is 0. They are the tokens that would be drawn under the mask, one at a time.
        """
        tokens: list[int] = []
        if self.matcher is not None and not self.finish_reason and self.matcher.complete:
            self._end("eos")
        while self.matcher is not None and not self.finish_reason and (token := self.matcher.forced) is not None:
            tokens.append(token)
            self._forced_at = len(self.tokens) + 1
            self.add(Sampled(token, 0.0))
        self.forced += len(tokens)
        return tokens

    def add(self, sampled: Sampled) -> bool:
        """Append a token. Returns True if it ended the text; no token may be added after that."""
        token = sampled.token
        self.tokens.append(token)
        self.logprobs.append(sampled.logprob)
        ended = token in self._codec.end_ids or (token == self._codec.message_end and not self._thinking.awaits)
        if ended and not self._sampling.ignore_eos:
            return self._end("eos")
        if self.matcher is not None:
            self.matcher.advance(token)
        piece = self._stream.step(token)
        if piece is not None:
            length: int | None = len(self._text)
            self._text += piece
            self._boundaries.append((len(self.tokens), len(self._text)))
            if self._begin is None:
                length = self._find_answer(piece, len(self._text) - len(piece))
        if piece is not None and length is not None:
            matches = [
                (self._text.find(stop, max(self._begin or 0, length - len(stop) + 1)), stop)
                for stop in self._sampling.stop
            ]
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
        if self.matcher is not None and self.matcher.complete:
            return self._end("eos")
        count = len(self.tokens)
        if not count % _CHECKED and self._repeats(count):
            return self._end("repetition")
        if self._begin is None and self.thinks and 0 < self.thinking_limit <= count:
            return self._end("length")
        whole = self._sampling.keep_stop and len(self._boundaries) > 1  # a piece has at least one character
        if self.room and not (whole and count >= self._sampling.max_tokens):
            return False
        if self._sampling.keep_stop:
            self._keep(len(self._text))
        return self._end("length")

    def _find_answer(self, piece: str, length: int) -> int | None:
        """Look for the beginning of the answer. Return from where on stop strings count, or None if none counts yet.

        `length` is the length of the text before its last piece.
        """
        pieces = self._sampling.keep_stop
        if self._thinking.awaits and self._thinking.awaits[-1] not in piece:
            return length if pieces else None
        found = self._thinking = find_thinking(self._text, self.awaits or "")
        if found.awaits or begins_tag(rest := self._text[found.end :]):
            return length if pieces or not (self.thinks or rest.strip()) else None
        self._begin = found.end
        if self.thinking_limit:  # the answer has tokens of its own
            tokens, _ = self._split_at(found.end)
            self._limit = min(self._limit, tokens + self.limit)
        return length if pieces else found.end

    def _split_at(self, begin: int) -> tuple[int, int]:
        """Return the last (tokens, characters) pair of whole tokens up to a character."""
        return max(entry for entry in self._boundaries if entry[1] <= begin)

    def _repeats(self, count: int) -> bool:
        """Return whether the last of the `count` tokens repeat the same ones many times."""
        if count - self._forced_at < _REPEATED or self._sampling.ignore_eos:
            return False
        tokens = self.tokens
        for period in range(1, min(_PERIOD, count // _REPEATS) + 1):
            length = max(_REPEATED, _REPEATS * period)
            if tokens[-1] == tokens[-1 - period] and tokens[-length:-period] == tokens[period - length :]:
                return True
        return False

    def _keep(self, end: int) -> None:
        """Cut the text to whole tokens: after the last token with only blanks beyond character `end`.

        Tokens of an unfinished character are dropped. If no token qualifies, nothing changes.
        """
        tokens, characters = [(t, c) for t, c in self._boundaries if c <= end or not self._text[end:c].strip()][-1]
        if tokens:
            self._dropped = len(self.tokens) - tokens
            del self.tokens[tokens:], self.logprobs[tokens:]
            self._text = self._text[:characters]

    def end(self, reason: FinishReason) -> None:
        """End the text from outside: the request is cancelled or out of budget."""
        if self.finish_reason is None:
            self._end(reason)

    def _end(self, reason: FinishReason) -> bool:
        self.finish_reason = reason
        if reason != "stop":  # without an unfinished character at the end
            end = len(self.tokens) - (reason == "eos" and self.tokens[-1:] == [self._codec.message_end])
            self._text = self._codec.decode(self.tokens[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
        if self._begin is None:
            found = find_thinking(self._text, self.awaits or "")
            if not found.awaits and reason == "length" and cut_in_tag(rest := self._text[found.end :]):
                found = Thinking(found.text or rest, len(self._text), "<think>")
            found = found._replace(text=before_tag(found.text, found.awaits))
            self._thinking, self._begin = found, None if found.awaits else found.end
        if self._codec.thinks and self.awaits == "" and not (self.thinks or self._sampling.keep_stop):
            thinking, answer = split(self._text)  # opened by neither the model nor its template, but closed
            if thinking:
                self._begin = len(self._text) - len(answer)
                self._thinking = Thinking(thinking, self._begin, "")
        return True

    def completion(self, seconds: float, prompt_tokens: int = 0, reused: int = 0) -> Completion:
        """Return the completion, `seconds` after its request was submitted."""
        parts = self._parts()
        usage = Usage(
            prompt_tokens=prompt_tokens,
            reused_prompt_tokens=reused,
            new_tokens=len(self.tokens) + self._dropped,
            forwards=self.forwards,
            drafted=self.drafted,
            accepted=self.accepted,
            seconds=seconds,
            reached=self.reached,
            forced_tokens=self.forced,
            masked_tokens=0 if self.matcher is None else len(self.tokens) + self._dropped - self.forced,
        )
        return Completion(
            text="".join(part.text for part in parts if part.kind != "thinking" or self._sampling.keep_stop),
            tokens=tuple(self.tokens),
            logprob=math.fsum(self.logprobs),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or "cancelled",
            usage=usage,
            choice_logprobs=self.choice_logprobs,
            parts=tuple(parts),
            trajectory=tuple(self.trajectory),
        )

    def _parts(self) -> list[Part]:
        """Return the thinking and the text."""
        count = len(self.tokens)
        if not self.thinks:
            return [Part("exact", self._text, count)]
        begin, tokens = len(self._text), count
        if self._begin is not None:
            begin = min(begin, self._begin)
            tokens = self._split_at(begin)[0]
        pieces = self._sampling.keep_stop
        thinking = self._text[:begin] if pieces else self._thinking.text
        text = self._text[begin:] if pieces else answer_of(self._text, begin)
        return [Part("thinking", thinking, tokens), Part("exact", text, count - tokens)]

    def settled_thinking(self) -> str:
        """Return the thinking without a suffix that may be the beginning of its closing tag; empty for `keep_stop`."""
        if self._sampling.keep_stop or self.awaits is None:
            return ""
        if self._begin is not None or self.finish_reason is not None:
            return self._thinking.text
        text, _, tag = find_thinking(self._text, self.awaits)
        return before_tag(text, tag)

    def settled(self) -> str:
        """Return the text without a suffix that may be the beginning of a stop string."""
        if self.finish_reason is not None:
            return self.text
        if self._begin is None and not self._sampling.keep_stop:
            return ""
        text = self.text
        pending = max((len(start) for start in self._stop_starts if text.endswith(start)), default=0)
        return text[: len(text) - pending]
