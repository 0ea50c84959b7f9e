"""The benchmark `constraints`: samples under a JSON schema of ten fields, beside free texts, llama.cpp and vLLM.

All sides decode all branches of one prompt at once. Each free text ignores end tokens, up to the length of our
constrained text of the same branch and round. Tokens for which the schema leaves no choice take no forward pass of
their own; without that, a text would take one for each of its tokens. Peers write the blanks of the JSON as they like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError
from rich.console import Console

from benchmarks import peer_process as peer
from benchmarks.engines import about, forget
from benchmarks.harness import (
    RATE,
    SECONDS,
    Bench,
    BenchOptions,
    Measured,
    Metric,
    by_metric,
    percent,
    plain,
    timed,
)
from tot.decoders import Constraint, LocalDecoder, Message, Request, Sampling, Usage, load_decoder

CONSTRAINED, FREE = "tot, constrained", "tot, unconstrained"
_PROMPT = (Message(role="user", content="Invent a book in a library, and describe it as JSON."),)
_CONTEXT = 512
"""Tokens of llama.cpp's cache for each text, and of vLLM's context."""
_METRICS = (
    RATE,
    SECONDS,
    Metric("tokens a text", lambda cell: cell["tokens"] / cell["texts"], plain(".1f")),
    Metric("valid", lambda cell: cell.get("valid"), percent),
    Metric("forwards a text", lambda cell: _share(cell, "forwards", "texts"), plain(".1f"), less=True),
    Metric("tokens forced", lambda cell: _share(cell, "forced", "tokens"), plain(".0%")),
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
    peers: tuple[Literal["llama", "vllm"], ...] = Field((), description="Comma-separated programs to compare with.")
    llama: peer.LlamaPython = peer.LLAMA_PYTHON
    vllm: peer.VLLMPython = peer.VLLM_PYTHON


class Work(NamedTuple):
    """The work of one round."""

    seed: int
    lengths: tuple[int, ...] = ()
    """Tokens of each free text."""


def run(asked: Options, console: Console) -> None:
    """Run the benchmark and print its table."""
    with ExitStack() as stack:
        decoder = stack.enter_context(load_decoder(asked.decoder, asked.model, prefix_cache=False))
        bench = Bench(asked, console, about(decoder.engine))
        sides: dict[str, Callable[[Work], Measured]] = {
            name: partial(_measured, decoder, asked, name == CONSTRAINED) for name in (CONSTRAINED, FREE)
        }
        sides |= {name: partial(_by_peer, decoder, asked, process) for name, process in _peers(asked, stack)}

        def work(_: Any, turn: int) -> Work:
            texts = decoder.generate(_requests(asked, True, Work(turn)))
            return Work(turn, tuple(max(1, len(text.tokens)) for text in texts))

        title = f"{asked.model}: {asked.branches} samples of ten fields, T = {asked.temperature}"
        bench.compare(
            title,
            sides,
            work,
            lambda cells: by_metric(cells, _METRICS, [FREE, CONSTRAINED], title),
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
    usage = sum((text.usage for text in texts), Usage())
    measured = {
        "seconds": seconds,
        "texts": len(texts),
        "tokens": usage.new_tokens,
        "forwards": usage.forwards,
        "forced": usage.forced_tokens,
    }
    return measured | ({"valid": _valid([text.text for text in texts])} if constrained else {})


def _peers(asked: Options, stack: ExitStack) -> Iterator[tuple[str, peer.PeerProcess]]:
    """Start the programs with the settings that the benchmark `peers` finds fastest for a .gguf file on CPUs."""
    cells = asked.branches * (_CONTEXT + asked.max_tokens)
    if "llama" in asked.peers:
        setting = ("no flash attention",)
        yield "llama.cpp", peer.llama_process(asked.model, asked.llama, stack, setting, cells=cells)
    if "vllm" in asked.peers:
        yield "vLLM", peer.vllm_process(asked.model, asked.vllm, stack, (peer.SCHEMAS,), context=_CONTEXT)


def _by_peer(decoder: LocalDecoder, asked: Options, process: peer.PeerProcess, work: Work) -> Measured:
    codec = decoder.engine.codec
    options = {"max_tokens": asked.max_tokens, "temperature": asked.temperature, "seed": work.seed}
    schema = Book.model_json_schema()
    prompt, ends = codec.encode_prompt(_PROMPT), sorted(codec.end_ids)
    reply = process.complete(prompt, asked.branches, ends=ends, schema=schema, **options)
    samples = reply["samples"]
    return {
        "seconds": reply["seconds"],
        "texts": len(samples),
        "tokens": sum(map(len, samples)),
        "valid": _valid([codec.decode(sample) for sample in samples]),
    }


def _valid(texts: Sequence[str]) -> float:
    """Return the share of texts that meet the schema; others were cut."""
    return sum(_is_book(text) for text in texts) / len(texts)


def _is_book(text: str) -> bool:
    try:
        Book.model_validate_json(text)
    except ValidationError:
        return False
    return True


def _share(cell: Measured, part: str, whole: str) -> float | None:
    return cell[part] / cell[whole] if part in cell else None
