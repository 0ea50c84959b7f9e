"""SteppedOutput: the text of one sample, some of it parallel steps; and the state of steps while they are decoded.

Where the marker appears the text halts: what follows is a skeleton, which is no part of it. Then it is either taken on
as the plain text it was after all, or steps take its place (PDOS, section 3). Which tokens are fed when is decided in
`parallel_steps.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tot.decoders.engine.output import Output
from tot.decoders.engine.radix_cache import Branch, RadixCache
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.text import TextCodec
from tot.decoders.request import FinishReason, Part, Sampling


class Passage(Output):
    """Text that ends at a stop string, and knows at which."""

    ended_by: str | None = None

    def _end(self, reason: FinishReason) -> bool:
        if reason == "stop":
            cut = self._rest()
            self.ended_by = next((stop for stop in self._sampling.stop if cut.startswith(stop)), None)
        return super()._end(reason)

    def _rest(self) -> str:
        """What the tokens say after the text: the stop string, and what else its last token held."""
        return self._codec.decode(self.tokens[self._first :])[len(self._text) :]

    def whole(self, text: str) -> tuple[int, str]:
        """How many tokens stand for a text that the tokens begin with, and what is left of it to be encoded."""
        kept, characters = max(entry for entry in self._boundaries if entry[1] <= len(text))
        return kept, text[characters:]

    @property
    def open_text(self) -> str:
        return self._text


class StepHead(NamedTuple):
    """What a step begins with."""

    title: str
    text: str
    ids: list[int]


class ParallelStep:
    """One step: its title, its text, and its branch while it runs."""

    def __init__(self, head: StepHead, opening: Sequence[int], output: Passage, limit: int) -> None:
        self.ids = list(head.ids)
        """The step's tokens in the text: its title's, and from `close` on all of them."""
        self.output = output
        self.branch: Branch | None = None
        self.pending = list(head.ids)
        self._opening = opening
        self._limit = limit
        self._title = head.text
        self._said: str | None = None

    @property
    def text(self) -> str:
        return self._title + (f"{self.output.open_text}\n" if self._said is None else self._said)

    def run(self, cache: RadixCache, trunk: Branch) -> Chunk:
        """The title, all at once, and then token by token."""
        start = len(self.branch or trunk)
        if self.branch is None:
            self.branch = cache.fork(trunk)
            cache.extend(self.branch, self._opening)
        cache.extend(self.branch, self.pending)
        return Chunk(self.branch, start, len(self.branch), [self.output.draw()])

    def take(self, drawn: Sampled) -> bool:
        """Returns True where this ended the step."""
        self.pending = [drawn.token]
        return self.output.add(drawn)

    def close(self, codec: TextCodec, between: str) -> None:
        """Settle what the step adds to the text, `between` being what separates it from the next."""
        said = self.output.open_text
        if between:
            said = said.rstrip().rstrip("\N{REPLACEMENT CHARACTER}").rstrip()
        kept, rest = self.output.whole(said)
        ids = self.output.tokens[:kept] + codec.encode(rest)
        if len(ids) > self._limit:  # a marker that cut a token in two: its first half took more tokens than it had
            ids = ids[: self._limit]
            said = codec.decode(ids)
        self.ids += ids
        self._said = said + between

    def release(self, cache: RadixCache) -> None:
        if self.branch is not None:
            cache.release(self.branch)


class SteppedOutput(Passage):
    """One sample. `room` and the limit count every token of the text, also those given rather than drawn."""

    def __init__(self, codec: TextCodec, sampling: Sampling, index: int, limit: int, marker: str | None) -> None:
        self.skeleton = False
        """The marker was met: what is drawn now is a skeleton."""
        self.given = 0
        """Tokens of the skeleton that were not drawn."""
        self._steps: Sequence[ParallelStep] | None = None
        self._plain = sampling
        self._marker = None if marker in sampling.stop else marker
        watched = sampling.model_copy(update={"stop": (*sampling.stop, self._marker)}) if self._marker else sampling
        super().__init__(codec, watched, index, limit)

    @property
    def room(self) -> int:
        return 0 if self.finish_reason else super().room - self.given

    @property
    def reserve(self) -> int:
        """Tokens that the text may still get when skeleton and unfinished steps are dropped."""
        if self.finish_reason:
            return 0
        if self._steps is not None:
            return self._limit
        return self._limit - (self.lead()[0] - self._first) if self.skeleton else self.room

    @property
    def first(self) -> int:
        """Tokens drawn before the open part of the text."""
        return self._first

    def lead(self) -> tuple[int, str]:
        """How many tokens stand for the text, and what is left of it to be encoded."""
        return self.whole(self._text)

    def after_marker(self) -> str:
        """What else the marker's last token said."""
        return self._rest()[len(self._marker or "") :]

    def add(self, sampled: Sampled) -> bool:
        self._drawn.append(sampled)
        return super().add(sampled)

    def append(self, sampled: Sampled) -> None:
        """Count a token that was drawn for a skeleton or a step."""
        self._drawn.append(sampled)
        self.tokens.append(sampled.token)
        self.logprobs.append(sampled.logprob)
        self.states.append(sampled.states)

    def take_skeleton_as_text(self) -> None:
        """It has no steps: what was drawn is plain text, which may have ended, and no marker is looked for any more."""
        drawn = self._drawn
        del self.tokens[self._first :], self.logprobs[self._first :], self.states[self._first :]
        self._unwatch()
        self._open_part(self._limit)
        for sampled in drawn:
            if self.add(sampled):
                break

    def begin_steps(self, steps: Sequence[ParallelStep], opening: str, limit: int) -> None:
        """Steps come after the text and `opening`. They, and what follows them, have room for `limit` tokens."""
        if self._text + opening:
            self.parts.append(Part("exact", self._text + opening, len(self.tokens) - self._first))
        self.skeleton, self.given = False, 0
        self._open_part(limit)
        self._steps = steps

    def end_steps(self, end: str, limit: int) -> None:
        """The text goes on after its steps with `end`, and has room for `limit` more tokens."""
        self._deposit()
        if end:
            self.parts.append(Part("exact", end))
        self._open_part(limit)

    def _deposit(self) -> None:
        """Steps as parts of the text; their tokens, which were counted as they were drawn, in the order of the text."""
        steps, self._steps = [step for step in self._steps or () if step.output.tokens], None
        self.tokens[self._first :] = [token for step in steps for token in step.output.tokens]
        self.logprobs[self._first :] = [logprob for step in steps for logprob in step.output.logprobs]
        self.states[self._first :] = [one for step in steps for one in step.output.states[: len(step.output.tokens)]]
        self.parts += [Part("step", step.text, len(step.output.tokens)) for step in steps]

    def begin_answer(self, trigger: str, limit: int) -> tuple[int, str]:
        self._unwatch()
        return super().begin_answer(trigger, limit)

    def _unwatch(self) -> None:
        self.skeleton, self.given = False, 0
        self._sampling, self._marker = self._plain, None

    def _open_part(self, limit: int) -> None:
        super()._open_part(limit)
        self.ended_by = None
        self._drawn: list[Sampled] = []
        """What was drawn since."""

    def _end(self, reason: FinishReason) -> bool:
        if self._steps is not None or self.skeleton:  # cancelled, or out of budget
            if self._steps is not None:
                self._deposit()
                self._open_part(0)
            self.finish_reason = reason
            return True
        ended = super()._end(reason)
        if self._marker is not None and self.ended_by == self._marker:
            self.skeleton, self.finish_reason, ended = True, None, False
        return ended


@dataclass
class StepBlock:
    """Steps that are decoded side by side."""

    steps: list[ParallelStep]
    opening: list[int]
    """What stands between the branch they fork from and each step."""
    unfed: int
    """How many of those are the prompt's."""
    left: int
    """Tokens that the text may still have, from the block on."""

    def running(self) -> list[ParallelStep]:
        return [step for step in self.steps if step.output.finish_reason is None]


@dataclass
class Line:
    """One sample: its text, and the skeleton or block that it is at."""

    output: SteppedOutput
    base: int
    """Positions of its branch before the open part of the text."""
    given: Sequence[StepHead] = ()
    """Steps of the request, until they begin."""
    heads: list[StepHead] = field(default_factory=list)
    """The skeleton so far."""
    title: Passage | None = None
    """The title that is being written."""
    block: StepBlock | None = None
    numbered: int = 0
    """Steps so far."""
    filling: int | None = None
    """A block is fed in pieces: positions that were."""
