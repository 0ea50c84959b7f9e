"""FastCoT: cut the rationale before its end, and decode the answer after a glimpse of the rest.

Zhang et al., 2023 (arXiv:2311.08263), section 4. A step feeds the last exact token and the next c entries of a buffer
of approximate tokens. It yields the next exact token and c approximations (equation 4); the entries that do not change
are exact too (equation 5). After `cap` iterations the answer is decoded after the prompt, the exact tokens, the last
window's approximate tokens and the trigger. The method is not lossless: `Completion.parts` states which text is exact
or approximate, and how much was never decoded.

All requests share each forward, so no padding and no stripping of keys is needed (the paper's figure 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import DecodingSequence, Job
from tot.decoders.methods.method import OpenedMethod, SpeculativeConfig
from tot.decoders.methods.options import FastCoTOptions
from tot.decoders.methods.speculative import Speculation, Speculative
from tot.decoders.request import Message


@dataclass(slots=True)
class _Buffer:
    """The approximate tokens of one rationale."""

    question: Sequence[int]
    """Repeated as the initial content (section 4.2)."""
    computed: dict[int, int] = field(default_factory=dict)
    """By position after the prompt: the token that the model drew last."""

    def at(self, position: int) -> int:
        return self.computed.get(position, self.question[position % len(self.question)])


class Buffers(Drafter):
    """Drafts the approximate tokens of all rationales in progress."""

    def __init__(self) -> None:
        self._buffers: dict[int, _Buffer] = {}

    def begin(self, key: int, question: Sequence[int]) -> None:
        """Begin the buffer of a rationale with the tokens of its question."""
        self._buffers[key] = _Buffer(question)

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        drafts = []
        for context in contexts:
            draft = Draft()
            if (buffer := self._buffers.get(context.key)) is not None:
                start = len(context.tokens) - len(context.prompt)
                for place in range(len(context.widths)):
                    draft.add(buffer.at(start + place), place - 1, "approximate")
            drafts.append(draft)
        return drafts

    def observe(self, verified: Verified) -> None:
        """Update the buffer (section 4.3): drawn[i] is the token after node i."""
        context, draft, drawn, _, accepted, *_ = verified
        if (buffer := self._buffers.get(context.key)) is not None:
            start = len(context.tokens) - len(context.prompt) + accepted + 1
            buffer.computed.update(enumerate((drawn[node] for node in range(accepted, len(draft.tokens))), start))

    def glimpse(self, key: int, start: int) -> list[int]:
        """Return the approximate tokens from `start` on that were drawn, without the initial content."""
        tokens: list[int] = []
        while (token := self._buffers[key].computed.get(start + len(tokens))) is not None:
            tokens.append(token)
        return tokens

    def end(self, key: int) -> None:
        self._buffers.pop(key, None)


class FastCoT(Speculative):
    """Decode rationales before a trigger as described above, and everything else one token per step."""

    def __init__(self, job: Job, speculation: Speculation, buffers: Buffers, options: FastCoTOptions) -> None:
        super().__init__(job, speculation)
        self._buffers = buffers
        self._options = options
        whole = not self._trigger or job.request.whole_rationale
        self._cap = None if whole else options.cap
        self._iterations = [0] * len(job.outputs)

    def decoding(self) -> list[DecodingSequence]:
        first = self._sequences is None
        sequences = super().decoding()
        if first and self._trigger:  # not earlier: the request may be refused or cancelled
            question = _question(self._job)
            for sequence in sequences:
                if sequence.output.index in self._heads:  # resumed in the answer
                    continue
                self._buffers.begin(sequence.key, question)
                if self._cap == 0:
                    self._cut(sequence)
                    self._begin_answer(sequence)
        return super().decoding()

    @property
    def pausable(self) -> bool:
        """A cut depends on the approximate tokens, which a pause loses."""
        return self._cap is None and not self._options.trajectory

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        super().take(sequence, rows)
        index, output = sequence.output.index, sequence.output
        if index in self._heads or not self._trigger:
            return
        self._iterations[index] += 1
        if self._options.trajectory and output.finish_reason is None:
            output.trajectory.append((len(output.tokens), tuple(self._glimpse(sequence))))
        capped = self._cap is not None and self._iterations[index] >= self._cap
        if capped and output.finish_reason is None:
            self._cut(sequence)

    def _glimpse(self, sequence: DecodingSequence) -> list[int]:
        """Return the next approximate tokens, up to the end that they predict for the rationale."""
        output, codec = sequence.output, self._job.codec
        if not self._options.glimpse:
            return []
        tokens = self._buffers.glimpse(sequence.key, len(output.tokens))[: output.room]
        sampling = self._job.request.sampling
        stops, ends = sampling.stop, () if sampling.ignore_eos else codec.end_ids
        end = output.text[-max(map(len, stops), default=0) :] if stops else ""
        for count, token in enumerate(tokens):
            text = end + codec.decode(tokens[: count + 1])
            if token in ends or any(stop in text for stop in stops):
                return tokens[:count]
        return tokens

    def _cut(self, sequence: DecodingSequence) -> None:
        """End the rationale here. Its approximate tokens precede the trigger."""
        sequence.output.cut(self._glimpse(sequence))
        self._speculation.end(sequence.key)


def _question(job: Job) -> list[int]:
    """Return the tokens of the last paragraph that the user wrote: the question after few-shot examples."""
    prompt = job.request.prompt
    if isinstance(prompt, str):
        texts = [prompt]
    else:
        texts = [part.content for part in prompt if isinstance(part, Message) and part.role == "user"]
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n") if paragraph.strip()]
    return (job.codec.encode(paragraphs[-1], continues=False) if paragraphs else []) or list(job.prompt)


def open_fastcot(engine: Engine, options: FastCoTOptions, stack: ExitStack) -> OpenedMethod:
    buffers = Buffers()
    shared = Speculation(engine, buffers, SpeculativeConfig((1,) * options.window))
    return OpenedMethod(
        partial(FastCoT, speculation=shared, buffers=buffers, options=options), buffers, cuts_rationales=True
    )
