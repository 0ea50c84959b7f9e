"""PDOS: decode independent steps of one text in parallel.

Yu et al., 2025, section 3. Stage 1: the model writes a skeleton of titles; the tokens that must follow a title are fed,
not drawn. Stage 2: the skeleton is rolled back, and each step is a branch from its start, with its title fed in one
forward. All branches share a packed forward per token. Stage 3: the steps are concatenated, their keys and values are
computed again, and decoding continues; another skeleton begins another block. Steps given by the request skip stage 1.
The text differs from the text of `ar`, because no step has seen the others when it is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

from tot.decoders.engine.engine import Engine
from tot.decoders.engine.runner import Chunk
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.scoring import Scorer
from tot.decoders.engine.sequence import DecodingSequence, Job
from tot.decoders.errors import RequestError
from tot.decoders.methods.autoregressive import Autoregressive
from tot.decoders.methods.method import OpenedMethod
from tot.decoders.methods.options import PDOSOptions
from tot.decoders.methods.pdos.steps_format import StepsFormat
from tot.decoders.methods.pdos.steps_output import Line, ParallelStep, Passage, StepBlock, StepHead, SteppedOutput

STEP_KEY = 2**32
"""Step k of a text (from 1) draws its tokens as sample `index + k * STEP_KEY`, at positions from 0."""


class ParallelSteps(Autoregressive):
    """Decode like `Autoregressive`, with steps in parallel."""

    def __init__(self, job: Job, form: StepsFormat, chunk: int) -> None:
        super().__init__(job)
        self._form = form
        self._chunk = chunk
        self._lines: dict[int, Line] = {}
        if self._choices and not self._trigger:
            return
        request, codec = job.request, job.codec
        tail = codec.decode(job.prompt[-8:])
        self._opening = "\n" if tail and not tail.endswith("\n") else ""
        given = [self._head(title.strip()) for title in request.steps]
        marker = None if given else form.options.marker
        for output in job.outputs:
            text = SteppedOutput(codec, request.sampling, output, marker)
            self._lines[output.index] = Line(text, len(job.prompt), given)
        job.outputs = [line.output for line in self._lines.values()]
        self._check(given)

    @property
    def pausable(self) -> bool:
        return False

    def growth(self) -> int:
        """Count only the final text, because skeletons and steps never take more slots than the text in their place."""
        extra = 0
        for sequence in self._running():
            line = self._lines.get(sequence.output.index)
            if line is not None and sequence.output.index not in self._heads:
                extra += line.output.reserve - line.output.room + max(0, len(sequence.pending) - 1)
        return super().growth() + extra

    def run(self, sequence: DecodingSequence) -> list[Chunk]:
        line = self._lines[sequence.output.index]
        if line.given:
            heads, line.given = line.given, ()
            self._begin_steps(sequence, line, heads, self._opening)
        if line.block is not None:
            return [step.run(self._job.cache, sequence.branch) for step in line.block.running()]
        if line.filling is not None or len(sequence.pending) > self._chunk:
            return self._feed_block(sequence, line)
        return super().run(sequence)

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        line = self._lines[sequence.output.index]
        if line.block is not None:
            self._take_steps(sequence, line, line.block, rows)
            return
        row = next(rows)
        if not row:
            return
        (drawn,) = row
        sequence.pending = [drawn.token]
        if line.title is not None:
            self._take_title(sequence, line, line.title, drawn)
            return
        line.output.add(drawn)
        if line.output.skeleton:
            self._job.account.skeletons += 1
            if line.output.room and self._form.is_blank(line.output.after_marker()):
                line.title = self._new_title()
            else:
                self._handle_malformed(sequence, line)

    def release(self) -> None:
        for line in self._lines.values():
            for step in line.block.steps if line.block is not None else ():
                step.release(self._job.cache)
        super().release()

    # -- stage 1: the skeleton ----------------------------------------------------------------------------------

    def _new_title(self) -> Passage:
        job, options = self._job, self._form.options
        return Passage(job.codec, self._form.title_sampling(job.request.sampling), 0, options.title_tokens)

    def _take_title(self, sequence: DecodingSequence, line: Line, title: Passage, drawn: Sampled) -> None:
        output, form = line.output, self._form
        output.append(drawn)
        if not title.add(drawn):
            if not output.room:
                self._handle_malformed(sequence, line)
            return
        # The text must not hold a stop string of the request, nor one that begins in the marker.
        ends = any(stop in form.options.marker + title.open_text for stop in self._job.request.sampling.stop)
        mark = None if ends or title.ended_by in self._job.request.sampling.stop else title.ended_by
        if form.ends_block(title.open_text, mark) and line.heads:
            self._begin_steps(sequence, line, line.heads)
            return
        head = self._head(form.title(title.open_text))
        titles = [other.title for other in line.heads]
        if mark != form.options.colon or not head.title or head.title in titles or not self._fits(line, head):
            self._handle_malformed(sequence, line)
            return
        line.heads.append(head)
        if len(line.heads) == form.options.max_steps:
            self._begin_steps(sequence, line, line.heads)
        else:
            self._force(sequence, line, title)

    def _force(self, sequence: DecodingSequence, line: Line, title: Passage) -> None:
        """Feed the ellipsis and the next marker after a title's colon, instead of the model's own tokens."""
        branch = sequence.branch
        retained, rest = title.whole(title.open_text + self._form.options.colon)
        forced = self._form.forced(rest)
        fed = len(title.tokens) - 1
        self._job.cache.rollback(branch, len(branch) - max(0, fed - retained))
        sequence.pending = [*title.tokens[fed:retained], *forced]
        line.output.given += len(forced) - (len(title.tokens) - retained)
        line.title = self._new_title()
        if line.output.room < 1:
            self._handle_malformed(sequence, line)

    def _handle_malformed(self, sequence: DecodingSequence, line: Line) -> None:
        """Handle a malformed skeleton: run its steps, or treat it as plain text if it has none."""
        self._job.account.broken += 1
        if line.heads:
            self._begin_steps(sequence, line, line.heads)
            return
        line.title = None
        line.output.take_skeleton_as_text()

    # -- stage 2: the steps -------------------------------------------------------------------------------------

    def _head(self, title: str) -> StepHead:
        text = self._form.header(title)
        return StepHead(title, text, self._job.codec.encode(text))

    def _frame(self, heads: Sequence[StepHead]) -> int:
        """Return the number of tokens of a block that are fed: titles and markers."""
        return sum(len(head.ids) + len(self._form.between) for head in heads) + len(self._form.end)

    def _fits(self, line: Line, head: StepHead) -> bool:
        """Return whether the limit leaves a token for each step so far, for this step, and for the text after them."""
        heads = [*line.heads, head]
        lead = self._job.codec.encode(line.output.lead()[1])
        return line.output.reserve - len(lead) - self._frame(heads) > len(heads)

    def _begin_steps(
        self, sequence: DecodingSequence, line: Line, heads: Sequence[StepHead], opening: str = ""
    ) -> None:
        """Roll the skeleton back and set up a branch for each step."""
        job, form, output = self._job, self._form, line.output
        retained, rest = output.lead()
        start = line.base + retained - output.first
        unfed = sequence.pending[
            : max(0, start - len(sequence.branch))
        ]  # the prompt's last token, if no token was drawn
        job.cache.rollback(sequence.branch, start)
        sequence.pending = []
        prefix = [*unfed, *job.codec.encode(rest + opening)]
        left = output.reserve
        share = (left - (len(prefix) - len(unfed)) - self._frame(heads)) // (len(heads) + 1)
        limit = min(share, form.options.step_tokens or share)
        sampling = form.step_sampling(job.request.sampling)
        steps = []
        for number, head in enumerate(heads, line.numbered + 1):
            text = Passage(job.codec, sampling, output.index + number * STEP_KEY, limit)
            steps.append(ParallelStep(head, prefix, text, limit))
        line.numbered += len(steps)
        line.title, line.heads = None, []
        line.block = StepBlock(steps, prefix, len(unfed), left)
        output.begin_steps(steps, opening, left)

    def _take_steps(
        self, sequence: DecodingSequence, line: Line, block: StepBlock, rows: Iterator[list[Sampled]]
    ) -> None:
        cache, stops = self._job.cache, self._job.request.sampling.stop
        for step in block.running():
            (drawn,) = next(rows)
            line.output.append(drawn)
            if step.take(drawn):
                step.release(cache)
        stopped = next((i for i, step in enumerate(block.steps) if step.output.ended_by in stops), None)
        if stopped is not None:  # the text ends there: drop the later steps
            for step in block.steps[stopped + 1 :]:
                step.release(cache)
            del block.steps[stopped + 1 :]
        if not block.running():
            self._join(sequence, line, block, stopped is not None)

    # -- stage 3: the text continues ----------------------------------------------------------------------------

    def _join(self, sequence: DecodingSequence, line: Line, block: StepBlock, stopped: bool) -> None:
        """Concatenate the steps, to be fed before the next token is drawn."""
        form, output = self._form, line.output
        line.block = None
        ids = list(block.opening)
        for step in block.steps:
            last = stopped and step is block.steps[-1]
            step.close(form.codec, "" if last else "\n")
            ids += step.ids + ([] if last else form.between)
        ids += [] if stopped else form.end
        line.base = len(sequence.branch) + len(ids)
        sequence.pending = ids
        for step in block.steps:
            step.release(self._job.cache)
        output.end_steps("" if stopped else form.end_text, block.left - (len(ids) - block.unfed))
        if stopped:
            output.end("stop")

    def _feed_block(self, sequence: DecodingSequence, line: Line) -> list[Chunk]:
        """Feed a long block in chunks, from its first missing position; its first step is usually computed."""
        cache, branch = self._job.cache, sequence.branch
        fed = len(branch) if line.filling is None else line.filling
        cache.extend(branch, sequence.pending)
        sequence.pending, line.filling = [], None
        start = cache.computed_length(branch, fed)
        if len(branch) - start > self._chunk:
            line.filling = start + self._chunk
            return [Chunk(branch, start, line.filling)]
        start = min(start, len(branch) - 1)
        return [Chunk(branch, start, len(branch), [sequence.output.draw()])]

    def _begin_answer(self, sequence: DecodingSequence) -> None:
        """Begin the answer as in `Autoregressive`, for a text that also has tokens that were not drawn."""
        job, line = self._job, self._lines[sequence.output.index]
        output, branch, trigger = line.output, sequence.branch, job.request.answer_trigger
        assert trigger is not None
        first, drawn = output.first, list(output.tokens)
        retained, rest = output.begin_answer(trigger, job.request.answer_tokens)
        ids = drawn[first:retained] + job.codec.encode(rest)
        unfed = sequence.pending[: max(0, line.base - len(branch))]  # a block, if no token was drawn after it
        fed = min(max(0, len(branch) - line.base), retained - first)
        job.cache.rollback(branch, line.base + fed)
        sequence.pending = [*unfed, *ids[fed:]]
        self._heads[output.index] = [*job.cache.tokens(branch), *sequence.pending]
        if self._choices:
            sequence.scorer = Scorer(job.cache, branch, sequence.pending, self._choices)

    def _check(self, given: Sequence[StepHead]) -> None:
        """Raise RequestError if the given steps do not fit."""
        frame = self._frame(given) + len(self._job.codec.encode(self._opening))
        needed, room = frame + len(given) + 1, next(iter(self._lines.values())).output.room
        if given and needed > room:
            raise RequestError(
                f"{len(given)} steps need at least {needed} tokens, {frame} of them for titles and markers, and there "
                f"is room for {room}: raise max_tokens, shorten the prompt, or give fewer steps"
            )


def open_pdos(engine: Engine, options: PDOSOptions, stack: ExitStack) -> OpenedMethod:
    form = StepsFormat(options, engine.codec)
    policy = partial(ParallelSteps, form=form, chunk=engine.chunk)
    return OpenedMethod(policy, prepare=form.prepare, writes_steps=True)
