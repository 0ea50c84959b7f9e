"""The benchmark `constraints`: samples under a JSON schema of ten fields, and free texts of the same prompt and length.

Both sides decode all branches in packed forward passes. Each free text ignores end tokens, up to the length of the
constrained text of the same branch and round. Tokens for which the schema leaves no choice take no forward pass of
their own; without that, a text would take one for each of its tokens.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field
from rich.console import Console

from benchmarks.engines import about, forget
from benchmarks.harness import RATE, Bench, BenchOptions, Measured, Metric, by_metric, plain, timed
from tot.decoders import Constraint, LocalDecoder, Message, Request, Sampling, Usage, load_decoder

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
    lengths: tuple[int, ...] = ()
    """Tokens of each free text."""


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print its table."""
    with ExitStack() as stack:
        decoder = stack.enter_context(load_decoder(asked.decoder, asked.model))
        bench = Bench(asked, console, about(decoder.engine))
        sides = {name: partial(_measured, decoder, asked, name == CONSTRAINED) for name in (CONSTRAINED, FREE)}

        def work(_: Any, turn: int) -> Work:
            texts = decoder.generate(_requests(asked, True, Work(turn)))
            return Work(turn, tuple(max(1, len(text.tokens)) for text in texts))

        title = f"{asked.model}: {asked.branches} samples of ten fields, T = {asked.temperature}"
        bench.compare(
            title,
            sides,
            work,
            lambda cells: by_metric(cells, _METRICS, [FREE], title),
            rounds=asked.rounds,
            warm_up=True,
        )


def _requests(asked: Options, constrained: bool, work: Work) -> list[Request]:
    """Return a request for each branch."""
    constraint = Constraint(json_schema=Book) if constrained else None
    limits = [asked.max_tokens] * asked.branches if constrained else work.lengths
    heat, free = asked.temperature, not constrained
    samplings = (
        Sampling(max_tokens=limit, temperature=heat, sample=i, seed=work.seed, ignore_eos=free)
        for i, limit in enumerate(limits)
    )
    return [Request(prompt=_PROMPT, sampling=sampling, constraint=constraint) for sampling in samplings]


def _measured(decoder: LocalDecoder, asked: Options, constrained: bool, work: Work) -> Measured:
    requests = _requests(asked, constrained, work)
    forget(decoder)
    seconds, texts = timed(lambda: decoder.generate(requests))
    for text in texts:
        if constrained and text.finish_reason == "eos":
            Book.model_validate_json(text.text)
    usage = sum((text.usage for text in texts), Usage())
    return {
        "seconds": seconds,
        "texts": len(texts),
        "tokens": usage.new_tokens,
        "forwards": usage.forwards,
        "forced": usage.forced_tokens,
    }
