"""The benchmark `constraints`: samples under a JSON schema of ten fields, and free texts of the same prompt and length.

Both sides decode all branches in packed forward passes. Free texts ignore end tokens, up to the mean length of the
constrained texts of the same round. Tokens for which the schema leaves no choice take no forward pass of their own:
without that, a text would take a forward pass for each of its tokens.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field
from rich.console import Console

from benchmarks.engines import about, forget
from benchmarks.harness import RATE, Bench, BenchOptions, Measured, Metric, by_metric, plain, timed
from tot.decoders import Constraint, LocalDecoder, Message, Request, Sampling, load_decoder

CONSTRAINED, FREE = "constrained", "unconstrained"
_PROMPT = (Message(role="user", content="Invent a book in a library, and describe it as JSON."),)
_METRICS = (
    RATE,
    Metric("tokens a text", lambda cell: cell["tokens"] / cell["texts"], plain(".1f")),
    Metric("forwards a text", lambda cell: cell["forwards"] / cell["texts"], plain(".1f"), less=True),
    Metric("tokens forced", lambda cell: cell["forced"] / cell["tokens"], plain(".0%")),
)


class Book(BaseModel):
    """Ten fields of all kinds."""

    title: Annotated[str, Field(max_length=40)]
    author_name: Annotated[str, Field(max_length=30)]
    publication_year: Annotated[int, Field(ge=1500, le=2030)]
    number_of_pages: Annotated[int, Field(ge=10, le=2000)]
    language: Literal["English", "French", "German", "Spanish"]
    genre: Literal["novel", "poetry", "science", "history", "travel"]
    is_available: bool
    shelf_number: Annotated[int, Field(ge=1, le=99)]
    average_rating: Annotated[float, Field(ge=0, le=5)]
    keywords: Annotated[list[Annotated[str, Field(max_length=12)]], Field(max_length=3)]


class Options(BenchOptions):
    """Compare samples under a JSON schema of ten fields with free texts: tokens/s, and forward passes a text."""

    decoder: str = Field("ar", description="A decoding method.")
    branches: int = Field(15, ge=1, description="Samples decoded together.")
    temperature: float = Field(1.0, ge=0, description="The sampling temperature.")
    max_tokens: int = Field(200, ge=1, description="Maximum tokens of a text.")
    rounds: int = Field(3, ge=1, description="Rounds. The sides take turns in each; medians are compared.")


class Work(NamedTuple):
    """The work of one round."""

    seed: int
    length: int
    """Tokens of a free text."""


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print its table."""
    with ExitStack() as stack:
        decoder = stack.enter_context(load_decoder(asked.decoder, asked.model))
        bench = Bench(asked, console, about(decoder.engine))
        sides = {name: partial(_measured, decoder, asked, name == CONSTRAINED) for name in (CONSTRAINED, FREE)}

        def work(_: Any, turn: int) -> Work:
            length = _measured(decoder, asked, True, Work(turn, 0))["tokens"] // asked.branches
            return Work(turn, max(1, length))

        title = f"{asked.model}: {asked.branches} samples of ten fields, T = {asked.temperature}"
        bench.compare(
            title,
            sides,
            work,
            lambda cells: by_metric(cells, _METRICS, [FREE], title),
            rounds=asked.rounds,
            warm_up=True,
        )


def _measured(decoder: LocalDecoder, asked: Options, constrained: bool, work: Work) -> Measured:
    sampling = Sampling(
        max_tokens=asked.max_tokens if constrained else work.length,
        temperature=asked.temperature,
        n=asked.branches,
        seed=work.seed,
        ignore_eos=not constrained,
    )
    constraint = Constraint(json_schema=Book) if constrained else None
    request = Request(prompt=_PROMPT, sampling=sampling, constraint=constraint)
    forget(decoder)
    seconds, texts = timed(lambda: decoder.generate([request]))
    for text in texts:
        if constrained and text.finish_reason == "eos":
            Book.model_validate_json(text.text)
    return {
        "seconds": seconds,
        "texts": len(texts),
        "tokens": sum(text.usage.new_tokens for text in texts),
        "forwards": sum(text.usage.forwards for text in texts),
        "forced": sum(text.usage.forced_tokens for text in texts),
    }
