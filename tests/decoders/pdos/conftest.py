"""Helpers for the tests of parallel steps: models that write readable text, and ways to watch and script them.

pytest imports with `importlib`, so tests get these functions and classes as fixtures.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tot.decoders import (
    Completion,
    Engine,
    LocalDecoder,
    Request,
    Sampling,
    load_decoder,
    load_model,
)
from tot.decoders.engine.runner import Chunk, Forward
from tot.decoders.engine.text import TextCodec
from tot.decoders.methods import pdos, steps_format

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: " * 2
END = 2
"""The end token."""
Make = Callable[..., LocalDecoder]


@pytest.fixture(params=["llama", pytest.param("qwen2", marks=pytest.mark.families)])
def model(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> Any:
    return make_model(request.param, readable=True)


@pytest.fixture
def make(model: Any, tokenizer: Any) -> Iterator[Make]:
    """Create decoders by name, each on a copy of one model. No branch may be live at the end."""
    engines: list[Engine] = []

    def load(name: str = "pdos", kv_budget: int = 6000, chunk: int = 512, **options: Any) -> LocalDecoder:
        engines.append(Engine(load_model(copy.deepcopy(model), tokenizer=tokenizer), kv_budget, chunk))
        return load_decoder(name, engine=engines[-1], **options)

    yield load
    for engine in engines:
        engine.close()
        assert engine.cache.live == 0


@pytest.fixture(scope="module")
def codec(tokenizer: Any) -> TextCodec:
    return TextCodec(tokenizer)


def ids(decoder: LocalDecoder, text: str) -> tuple[int, ...]:
    return tuple(decoder.engine.codec.encode_prompt(text))


class Watch:
    """Record each forward of a decoder: the tokens of the branches of which it reads logits, and the number of rows."""

    def __init__(self, decoder: LocalDecoder) -> None:
        self.engine = decoder.engine
        self.tokens: list[list[list[int]]] = []
        self.texts: list[list[str]] = []
        self.rows: list[int] = []
        self._forward = decoder.engine.runner.forward
        decoder.engine.runner.forward = self.forward  # type: ignore[method-assign]

    def forward(self, chunks: Sequence[Chunk]) -> Forward:
        cache = self.engine.cache
        self.tokens.append([cache.tokens(chunk.branch)[: chunk.stop] for chunk in chunks if chunk.reads])
        self.texts.append([self.engine.codec.decode(tokens) for tokens in self.tokens[-1]])
        self.rows.append(sum(chunk.stop - chunk.start for chunk in chunks))
        return self._forward(chunks)


class Script(Watch):
    """Force a model's output: the next token continues the first document that begins with the text so far.

    A text that equals a document ends. If no document matches, the model decides. Texts start after the prompt's "|"
    and line break.
    """

    def __init__(self, decoder: LocalDecoder, *documents: str) -> None:
        super().__init__(decoder)
        self.documents = documents

    def next(self, text: str) -> int | None:
        written = text.rpartition("|\n")[2]
        if written in self.documents:
            return END
        for document in self.documents:
            if document.startswith(written):
                return self.engine.codec.encode(document[len(written) :])[0]
        return None

    def forward(self, chunks: Sequence[Chunk]) -> Forward:
        forward = super().forward(chunks)
        for chunk, rows in zip(chunks, forward.rows, strict=True):
            tokens = self.engine.cache.tokens(chunk.branch)
            for back, row in enumerate(reversed(rows)):
                token = self.next(self.engine.codec.decode(tokens[: chunk.stop - back]))
                if token is not None:
                    forward.logits[row] = 0.0
                    forward.logits[row, token] = 8.0
        return forward


def ask(decoder: LocalDecoder, prompt: str = "Which?|\n", **more: Any) -> Request:
    sampling = Sampling(**{"max_tokens": 200, **more.pop("sampling", {})})
    return Request(prompt=ids(decoder, prompt), sampling=sampling, **more)


def mixed(decoder: LocalDecoder, count: int = 12) -> list[Request]:
    rng = random.Random(4)
    requests = []
    for i in range(count):
        prompt = LONG[: rng.randint(1, len(LONG))] + rng.choice(["and", " 10", "abc\n"])
        sampling = Sampling(
            max_tokens=rng.choice([2, rng.randint(40, 90), 160]),
            temperature=rng.choice([0.0, 1.0, 2.0]),
            top_p=rng.choice([0.9, 1.0]),
            stop=rng.choice([(), (), ("10", "zz")]),
            seed=i,
            n=rng.choice([1, 1, 3]),
            ignore_eos=rng.random() < 0.4,
        )
        trigger = rng.choice([None, None, " So the answer is"])
        steps = rng.choice([(), (), ("Oslo", "Rome", "10")]) if sampling.max_tokens > 2 else ()
        choices = ("1", "10") if rng.random() < 0.2 and (trigger or (sampling.n == 1 and not steps)) else ()
        requests.append(
            Request(
                prompt=ids(decoder, prompt), sampling=sampling, answer_trigger=trigger, choices=choices, steps=steps
            )
        )
    return requests


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the marks of steps, for models that do not write the real ones."""

    def change(marker: str = "####", colon: str = ":", terminator: str = "%%%", ellipsis: str = "...") -> None:
        for module in (pdos, steps_format):
            monkeypatch.setattr(module, "MARKER", marker)
            monkeypatch.setattr(module, "COLON", colon)
            monkeypatch.setattr(module, "TERMINATOR", terminator)
            monkeypatch.setattr(module, "ELLIPSIS", ellipsis)
            monkeypatch.setattr(module, "END", f"{marker}{terminator}\n")
        monkeypatch.setattr(steps_format, "_BLANK", f" {marker[-1]}")

    return change


@pytest.fixture
def loose(make: Make, marks: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalDecoder]:
    """Create models that often write markers, colons and terminators: many skeletons, some of them valid."""
    marks(marker="e", colon="a", terminator="o")
    monkeypatch.setattr(pdos, "_TITLE_TOKENS", 12)
    monkeypatch.setattr(pdos, "_MAX_STEPS", 3)

    def load(**options: Any) -> LocalDecoder:
        decoder = make(**options)
        for mark, more in (("e", 3.0), ("a", 6.0), ("o", 2.0)):
            decoder.model.lm_head.bias.data[decoder.engine.codec.encode(mark)] += more
        return decoder

    return load


def outcomes(completions: Sequence[Completion]) -> list[Any]:
    return [(c.tokens, c.text, c.finish_reason, c.parts, c.answer) for c in completions]


def kinds(completion: Completion) -> list[str]:
    return [part.kind for part in completion.parts]


OSLO, ROME = "I compare.\n#### Oslo: cold\n####", "I compare.\n#### Rome: warm, they say.\n####"
SKELETON = "I compare.\n#### Oslo:...\n#### Rome:...\n####%%%"
TEXT = "I compare.\n#### Oslo: cold\n#### Rome: warm, they say.\n####%%%\nSo Oslo is colder."
DOCUMENTS = (OSLO, ROME, SKELETON, TEXT)


@pytest.fixture(name="ids")
def _ids() -> Callable[..., tuple[int, ...]]:
    return ids


@pytest.fixture(name="ask")
def _ask() -> Callable[..., Request]:
    return ask


@pytest.fixture(name="watching")
def _watching() -> type[Watch]:
    return Watch


@pytest.fixture(name="scripted")
def _scripted() -> type[Script]:
    return Script


@pytest.fixture(name="mixed")
def _mixed() -> Callable[..., list[Request]]:
    return mixed


@pytest.fixture(name="outcomes")
def _shown() -> Callable[..., list[Any]]:
    return outcomes


@pytest.fixture(name="kinds")
def _kinds() -> Callable[..., list[str]]:
    return kinds


@pytest.fixture(name="documents")
def _documents() -> tuple[str, ...]:
    """The documents of a skeleton with two steps: each step, the skeleton, and the final text."""
    return DOCUMENTS
