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
from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import Field

from tot.decoders.drafting.drafters import Draft, DraftContext, Drafter, Verified
from tot.decoders.drafting.planner import SpeculationPlanner
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.output import Output
from tot.decoders.engine.sampling import Sampled
from tot.decoders.engine.sequence import DecodingSequence, Job
from tot.decoders.methods.autoregressive import Autoregressive
from tot.decoders.methods.method import Method, MethodOptions, OpenedMethod
from tot.decoders.methods.programs import Program, Sample, ending
from tot.decoders.methods.speculative import Speculation, Speculative, SpeculativeConfig
from tot.decoders.request import Completion, Message, Part, Usage


class FastCoTOptions(MethodOptions):
    """FastCoT (arXiv 2311.08263): answer from the beginning of a rationale and an approximation of its rest."""

    cap: Annotated[int, Field(ge=0)] | None = None
    """Iterations after which a rationale is cut. 0 decodes the answer at once; None decodes rationales to their end.
    `python -m benchmarks fastcot` finds a cap that costs little accuracy with a window."""
    window: Annotated[int, Field(ge=0, le=128)] = 2
    """c, the context window. On CPUs, each row costs more than it saves: 0 was fastest."""
    glimpse: bool = True
    """Put the approximate tokens before the answer. False is the paper's baseline, which only cuts the rationale."""

    trajectory: bool = False
    """Keep (number of exact tokens, approximate tokens after them) of every iteration in `Completion.trajectory`."""


class Approximations(Drafter):
    """Drafts the approximate tokens of one rationale."""

    def __init__(self, question: Sequence[int]) -> None:
        self._question = question
        """Repeated as the initial content (section 4.2)."""
        self._computed: dict[int, int] = {}
        """By position after the prompt: the token that the model drew last."""

    def draft(self, contexts: Sequence[DraftContext], planner: SpeculationPlanner | None = None) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        draft, start = Draft(), len(context.tokens) - len(context.prompt)
        for place in range(len(context.widths)):
            token = self._question[(start + place) % len(self._question)]
            draft.add(self._computed.get(start + place, token), place - 1, "approximate")
        return draft

    def observe(self, verified: Verified) -> None:
        """Update the buffer (section 4.3): drawn[i] is the token after node i."""
        context, draft, drawn, _, accepted, *_ = verified
        start = len(context.tokens) - len(context.prompt) + accepted + 1
        self._computed.update(enumerate((drawn[node] for node in range(accepted, len(draft.tokens))), start))

    def glimpse(self, start: int) -> list[int]:
        """Return the approximate tokens from `start` on that were drawn, without the initial content."""
        tokens: list[int] = []
        while (token := self._computed.get(start + len(tokens))) is not None:
            tokens.append(token)
        return tokens


class FastCoT(Speculative):
    """Decode a rationale as described above, up to its cap.

    The completion of a rationale that was cut ends with the entry (number of its tokens, approximate tokens) in its
    trajectory.
    """

    def __init__(
        self, job: Job, engine: Engine, question: Sequence[int], cap: int | None, options: FastCoTOptions
    ) -> None:
        self._approximations = Approximations(question)
        super().__init__(job, Speculation(engine, self._approximations, SpeculativeConfig((1,) * options.window)))
        self._cap = cap
        self._options = options
        self._iterations = 0

    @property
    def pausable(self) -> bool:
        """A cut depends on the approximate tokens, which a pause loses."""
        return self._cap is None and not self._options.trajectory

    def take(self, sequence: DecodingSequence, rows: Iterator[list[Sampled]]) -> None:
        super().take(sequence, rows)
        output = sequence.output
        self._iterations += 1
        if output.finish_reason is not None:
            return
        cut = self._cap is not None and self._iterations >= self._cap
        if cut or self._options.trajectory:
            output.trajectory.append((len(output.tokens), tuple(self._glimpse(output))))
        if cut:
            output.end("length")
            self._speculation.end(sequence.key)

    def _glimpse(self, output: Output) -> list[int]:
        """Return the next approximate tokens, up to the end that they predict for the rationale."""
        if not self._options.glimpse:
            return []
        codec, sampling = self._job.codec, self._job.request.sampling
        tokens = self._approximations.glimpse(len(output.tokens))[: output.room]
        stops, ends = sampling.stop, () if sampling.ignore_eos else codec.end_ids
        end = output.text[-max(map(len, stops), default=0) :] if stops else ""
        for count, token in enumerate(tokens):
            text = end + codec.decode(tokens[: count + 1])
            if token in ends or any(stop in text for stop in stops):
                return tokens[:count]
        return tokens


def _question(sample: Sample) -> list[int]:
    """Return the tokens of the last paragraph that the user wrote: the question after few-shot examples."""
    prompt = sample.request.prompt
    if isinstance(prompt, str):
        texts = [prompt]
    else:
        texts = [part.content for part in prompt if isinstance(part, Message) and part.role == "user"]
    paragraphs = [paragraph for text in texts for paragraph in text.split("\n\n") if paragraph.strip()]
    return (sample.codec.encode(paragraphs[-1], continues=False) if paragraphs else []) or sample.prompt


def _decode(sample: Sample, engine: Engine, options: FastCoTOptions) -> Program:
    """Decode a rationale up to the cap, and then the answer."""
    cap = None if sample.request.whole_rationale else options.cap
    rationale = Completion("", (), 0.0, "length", Usage(), parts=(Part("exact", ""),), trajectory=((0, ()),))
    if cap != 0:
        policy = partial(FastCoT, engine=engine, question=_question(sample), cap=cap, options=options)
        (rationale,) = yield [sample.rationale(policy)]
    if rationale.finish_reason in ("budget", "cancelled"):
        return rationale
    exact, glimpse = rationale.trajectory[-1] if rationale.trajectory else (-1, ())
    if not options.trajectory:
        rationale = replace(rationale, trajectory=())
    if rationale.finish_reason != "length" or exact != len(rationale.tokens):  # not cut
        end = ending(sample.codec, rationale)
        return (yield from sample.answer(rationale, end.tokens, end.rest))
    text, undecoded = sample.codec.decode(glimpse), sample.limit - exact - len(glimpse)
    parts = [Part("approximate", text, len(glimpse)), Part("undecoded", "", undecoded)]
    sample.emit(text)
    cut = replace(
        rationale,
        text=rationale.text + text,
        parts=(*rationale.parts, *(part for part in parts if part.tokens > 0)),
        usage=replace(rationale.usage, approximate_tokens=len(glimpse), undecoded_tokens=max(0, undecoded)),
    )
    return (yield from sample.answer(cut, [*rationale.tokens, *glimpse]))


def _open(engine: Engine, options: FastCoTOptions, stack: ExitStack) -> OpenedMethod:
    program = partial(_decode, engine=engine, options=options)
    return OpenedMethod(Autoregressive, draft_rows=options.window, program=program)


METHOD = Method(_open, FastCoTOptions, needs_trigger=True)
