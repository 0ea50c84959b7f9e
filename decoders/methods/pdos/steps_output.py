"""SteppedOutput: the text of one sample with parallel steps; and the state of steps during decoding.

At a marker the text pauses: the following tokens are a skeleton, which is not part of the text. Then steps replace the
skeleton, or an invalid skeleton becomes plain text (PDOS, section 3). `parallel_steps.py` decides which tokens to feed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tot.decoders.engine.output import Output
from tot.decoders.engine.radix_cache import Branch, RadixCache
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.text import TextCodec
from tot.decoders.request import FinishReason, Part, Sampling


class Passage(Output):
    """Text that ends at a stop string and records which one."""

    ended_by: str | None = None

    def _end(self, reason: FinishReason) -> bool:
        if reason == "stop":
            cut = self._rest()
            self.ended_by = next((stop for stop in self._sampling.stop if cut.startswith(stop)), None)
        return super()._end(reason)

    def _rest(self) -> str:
        """Return the decoded text after the end: the stop string, and the rest of its last token."""
        return self._codec.decode(self.tokens[self._first :])[len(self._text) :]

    def whole(self, text: str) -> tuple[int, str]:
        """Return the number of whole tokens in a prefix `text`, and the rest of it to encode."""
        count, characters = max(entry for entry in self._boundaries if entry[1] <= len(text))
        return count, text[characters:]

    @property
    def open_text(self) -> str:
        return self._text


class StepHead(NamedTuple):
    """The beginning of a step: its title, with markers as text and as token ids."""

    title: str
    text: str
    ids: list[int]


class ParallelStep:
    """One step: its title, its text, and its branch during decoding."""

    def __init__(self, head: StepHead, opening: Sequence[int], output: Passage, limit: int) -> None:
        self.ids = list(head.ids)
        """The step's tokens in the text: the title's tokens until `close`, then all of them."""
        self.output = output
        self.branch: Branch | None = None
        self.pending = list(head.ids)
        self._opening = opening
        self._limit = limit
        self._title = head.text
        self._body: str | None = None

    @property
    def text(self) -> str:
        return self._title + (f"{self.output.open_text}\n" if self._body is None else self._body)

    def run(self, cache: RadixCache, trunk: Branch) -> Chunk:
        """Return the next chunk: first the whole title, then one token at a time."""
        start = len(self.branch or trunk)
        if self.branch is None:
            self.branch = cache.fork(trunk)
            cache.extend(self.branch, self._opening)
        cache.extend(self.branch, self.pending)
        return Chunk(self.branch, start, len(self.branch), [self.output.draw()])

    def take(self, drawn: Sampled) -> bool:
        """Add a token. Returns True if it ended the step."""
        self.pending = [drawn.token]
        return self.output.add(drawn)

    def close(self, codec: TextCodec, between: str) -> None:
        """Fix the text and tokens of the step. `between` separates it from the next step."""
        body = self.output.open_text
        if between:
            body = body.rstrip().rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
        count, rest = self.output.whole(body)
        ids = self.output.tokens[:count] + codec.encode(rest)
        if len(ids) > self._limit:  # encoding a token cut by a marker took more tokens
            ids = ids[: self._limit]
            body = codec.decode(ids)
        self.ids += ids
        self._body = body + between

    def release(self, cache: RadixCache) -> None:
        if self.branch is not None:
            cache.release(self.branch)


class SteppedOutput(Passage):
    """One sample. `room` and the limit count all tokens of the text, including tokens that were not drawn."""

    def __init__(self, codec: TextCodec, sampling: Sampling, like: Output, marker: str | None) -> None:
        """`like` is the plain output in whose place it stands."""
        self.skeleton = False
        """Whether the tokens drawn now belong to a skeleton."""
        self.given = 0
        """Number of tokens of the skeleton that were not drawn."""
        self._steps: Sequence[ParallelStep] | None = None
        self._original_sampling = sampling
        self._marker = None if marker in sampling.stop else marker
        watched = sampling.model_copy(update={"stop": (*sampling.stop, self._marker)}) if self._marker else sampling
        super().__init__(codec, watched, like.index, like.limit, like.awaits, like.thinking_limit)

    @property
    def room(self) -> int:
        return 0 if self.finish_reason else super().room - self.given

    @property
    def reserve(self) -> int:
        """Number of tokens that the text may still have without the skeleton and unfinished steps."""
        if self.finish_reason:
            return 0
        if self._steps is not None:
            return self._limit
        return self._limit - (self.lead()[0] - self._first) if self.skeleton else self.room

    def lead(self) -> tuple[int, str]:
        """Return the number of whole tokens in the text, and the rest of it to encode."""
        return self.whole(self._text)

    def after_marker(self) -> str:
        """Return the text after the marker in its last token."""
        return self._rest()[len(self._marker or "") :]

    def add(self, sampled: Sampled) -> bool:
        self._drawn.append(sampled)
        return super().add(sampled)

    def append(self, sampled: Sampled) -> None:
        """Count a token that was drawn for a skeleton or a step."""
        self._drawn.append(sampled)
        self.tokens.append(sampled.token)
        self.logprobs.append(sampled.logprob)

    def take_skeleton_as_text(self) -> None:
        """Add the skeleton as plain text, which may end in it, and stop looking for markers."""
        drawn = self._drawn
        del self.tokens[self._first :], self.logprobs[self._first :]
        self._ignore_marker()
        self._open_part(self._limit)
        for sampled in drawn:
            if self.add(sampled):
                break

    def begin_steps(self, steps: Sequence[ParallelStep], opening: str, limit: int) -> None:
        """Begin steps after the text and `opening`. `limit` is the number of tokens for steps and following text."""
        if self._text + opening:
            *thinking, text = self._open_parts()
            self.parts += [*thinking, replace(text, text=text.text + opening)]
        self.skeleton, self.given = False, 0
        self._open_part(limit)
        self._steps = steps

    def end_steps(self, end: str, limit: int) -> None:
        """Continue the text after its steps with `end` and at most `limit` more tokens."""
        self._add_steps()
        if end:
            self.parts.append(Part("exact", end))
        self._open_part(limit)

    def _add_steps(self) -> None:
        """Add the steps as parts, and reorder their tokens from the order of drawing to the order of the text."""
        steps, self._steps = [step for step in self._steps or () if step.output.tokens], None
        self.tokens[self._first :] = [token for step in steps for token in step.output.tokens]
        self.logprobs[self._first :] = [logprob for step in steps for logprob in step.output.logprobs]
        self.parts += [Part("step", step.text, len(step.output.tokens)) for step in steps]

    def begin_answer(self, trigger: str, limit: int) -> tuple[int, str]:
        self._ignore_marker()
        return super().begin_answer(trigger, limit)

    def _ignore_marker(self) -> None:
        self.skeleton, self.given = False, 0
        self._sampling, self._marker = self._original_sampling, None

    def _open_part(self, limit: int) -> None:
        super()._open_part(limit)
        self.ended_by = None
        self._drawn: list[Sampled] = []
        """Tokens drawn in this part."""

    def _end(self, reason: FinishReason) -> bool:
        if self._steps is not None or self.skeleton:  # cancelled or out of budget
            if self._steps is not None:
                self._add_steps()
                self._open_part(0)
            self.finish_reason = reason
            return True
        ended = super()._end(reason)
        if self._marker is not None and self.ended_by == self._marker:
            self.skeleton, self.finish_reason, ended = True, None, False
        return ended


@dataclass
class StepBlock:
    """Steps that are decoded in parallel."""

    steps: list[ParallelStep]
    opening: list[int]
    """Tokens between the branch that the steps fork from and each step."""
    unfed: int
    """Number of these tokens that belong to the prompt."""
    left: int
    """Number of tokens that the text may still have, from the block on."""

    def running(self) -> list[ParallelStep]:
        return [step for step in self.steps if step.output.finish_reason is None]


@dataclass
class Line:
    """One sample: its text, and its current skeleton or block."""

    output: SteppedOutput
    base: int
    """Number of positions of its branch before the open part of the text."""
    given: Sequence[StepHead] = ()
    """Steps given by the request, until they begin."""
    heads: list[StepHead] = field(default_factory=list)
    """The skeleton so far."""
    title: Passage | None = None
    """The title in progress."""
    block: StepBlock | None = None
    numbered: int = 0
    """Number of steps so far."""
    filling: int | None = None
    """While a block is fed in chunks: the number of positions fed."""
