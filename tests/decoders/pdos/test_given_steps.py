"""PDOS, stages 2 and 3: each step equals decoding it alone, and the text continues as from its own tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tot.decoders import (
    LocalDecoder,
    Request,
    Sampling,
)
from tot.decoders.engine.sampling import Draw, read
from tot.decoders.methods.pdos import STEP

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
CITIES = ("Oslo", "Rome", "the other one", "10")
END = 2
Make = Callable[..., LocalDecoder]


class Alone:
    """Decode one text at a time on the unmodified model."""

    def __init__(self, model: Any, decoder: LocalDecoder, logits_alone: Callable[..., torch.Tensor]) -> None:
        self._model = copy.deepcopy(model)
        self._run = logits_alone
        self.codec = decoder.engine.codec

    def tokens(
        self,
        context: Sequence[int],
        s: Sampling,
        limit: int,
        sample: int = 0,
        first: int = 0,
        until: Sequence[str] = (),
    ) -> list[int]:
        drawn: list[int] = []
        while len(drawn) < limit:
            draw = Draw(s.temperature, s.top_k, s.top_p, s.min_p, s.seed, sample, first + len(drawn))
            drawn.append(read(self._run(self._model, [*context, *drawn])[-1:], [draw])[0].token)
            text = self.codec.decode(drawn)
            if (drawn[-1] in self.codec.end_ids and not s.ignore_eos) or any(mark in text for mark in until):
                break
        return drawn

    def trimmed(self, drawn: list[int], until: Sequence[str]) -> tuple[str, list[int]]:
        """Return the text of a step without its end marker and the whitespace before that, and its tokens."""
        drawn = drawn[:-1] if drawn[-1] == END else drawn
        text = self.codec.decode(drawn)
        content = text[: min([len(text), *(text.find(mark) for mark in until if mark in text)])].rstrip()
        count = max(k for k in range(len(drawn) + 1) if content.startswith(self.codec.decode(drawn[:k])))
        return content, drawn[:count] + self.codec.encode(content[len(self.codec.decode(drawn[:count])) :])


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("marker", ["####", "e"])  # tiny models write an e now and then, even inside tokens
def test_steps_and_the_rest_equal_decoding_them_alone(
    make: Make, model: Any, logits_alone: Callable[..., torch.Tensor], heat: float, marker: str, marks: Any, ids: Any
) -> None:
    marks(marker=marker)
    decoder = make()
    alone = Alone(model, decoder, logits_alone)
    sampling = Sampling(max_tokens=130, temperature=heat, seed=5, n=2)
    prompt = ids(decoder, LONG + "|\n")
    until = (marker, "%%%")
    frame = sum(len(alone.codec.encode(f"{marker} {title}:")) + 1 for title in CITIES)
    limit, ended = (130 - frame - len(alone.codec.encode(f"{marker}%%%\n"))) // 5, 0
    for sample, got in enumerate(decoder.generate([Request(prompt=prompt, sampling=sampling, steps=CITIES)])):
        block, drawn_so_far, parts = list(prompt), [], []
        for number, title in enumerate(CITIES, 1):
            header = alone.codec.encode(f"{marker} {title}:")
            drawn = alone.tokens([*prompt, *header], sampling, limit, sample + number * STEP, until=until)
            content, trimmed = alone.trimmed(drawn, until)
            ended += len(drawn) < limit
            block += [*header, *trimmed, *alone.codec.encode("\n")]
            drawn_so_far += drawn
            parts.append(f"{marker} {title}:{content}\n")
        end = f"{marker}%%%\n"
        block += alone.codec.encode(end)
        room = 130 - (len(block) - len(prompt))
        rest = alone.tokens(block, sampling, room, sample, len(drawn_so_far))
        assert [part.text for part in got.parts] == [*parts, end, alone.codec.decode(rest)]
        assert list(got.tokens) == drawn_so_far + rest
        assert got.finish_reason == ("eos" if rest[-1] == END else "length")
    assert ended or marker == "####"


def test_steps_do_not_attend_to_each_other(make: Make, ids: Any) -> None:
    """A step's text depends on its own title and number, not on the other steps."""
    decoder = make()
    sampling = Sampling(max_tokens=150, temperature=1.0, seed=3)
    steps = [("Oslo", "Rome", "10"), ("Oslo", "10 a", "10"), ("Oslo", "Rome", "abc")]
    requests = [Request(prompt=ids(decoder, LONG + "|\n"), sampling=sampling, steps=titles) for titles in steps]
    texts = [[part.text for part in one.parts] for one in decoder.generate(requests)]

    def alike(number: int, *which: int) -> bool:
        """Return whether a step is the same up to the shortest limit."""
        first, *others = (texts[i][number].strip() for i in which)
        return all(one.startswith(first) or first.startswith(one) for one in others)

    assert alike(0, 0, 1, 2)
    assert alike(1, 0, 2)
    assert not alike(1, 0, 1)


def test_titles_take_one_forward_and_ended_steps_take_no_further_ones(make: Make, scripted: Any, ask: Any) -> None:
    decoder = make()
    script = scripted(
        decoder, "#### A: on\n####", "#### B: on and on and on\n####", "#### A: on\n#### B: on and on and on\n####%%%\n"
    )
    for _ in range(2):  # the second time with a cached prompt
        (got,) = decoder.generate([ask(decoder, steps=("A", "B"))])
    assert [part.text for part in got.parts] == ["#### A: on\n", "#### B: on and on and on\n", "####%%%\n", ""]
    drawn = [part.tokens for part in got.parts[:2]]
    steps = script.texts[-max(drawn) - 1 : -1]
    assert [len(texts) for texts in steps] == [2] * drawn[0] + [1] * (drawn[1] - drawn[0])
    assert got.usage.forwards == drawn[1] + 1
    assert got.finish_reason == "eos"
