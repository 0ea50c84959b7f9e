"""The context of drafters: they get all of a text in every step, and it is gathered once."""

from __future__ import annotations

from typing import Any

import pytest

from tot.decoders import Request
from tot.decoders.drafting.drafters import DraftContext
from tot.decoders.engine.radix_cache import RadixCache
from tot.decoders.methods.speculative import Speculation


@pytest.mark.parametrize(("method", "draft"), [("sd", "lookup"), ("mcsd", "near"), ("seed", "near")])
def test_a_drafter_gets_all_of_each_text(
    method: str, draft: str, make_bench: Any, mixed: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[tuple[list[int], list[int]]] = []
    context = Speculation.context

    def spy(speculation: Any, sequence: Any) -> DraftContext:
        made = context(speculation, sequence)
        expected = [*sequence.job.cache.tokens(sequence.branch), *sequence.pending]
        contexts.append((list(made.tokens), expected))
        return made

    monkeypatch.setattr(Speculation, "context", spy)
    bench = make_bench()
    bench.speculative(method, draft).generate(mixed)
    assert len(contexts) > 50
    assert all(text == expected for text, expected in contexts)


def test_a_text_is_read_from_the_cache_once_and_once_more_for_its_answer(
    make_bench: Any, mixed: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    tokens = RadixCache.tokens

    def spy(cache: RadixCache, branch: Any) -> list[int]:
        reads.append(len(branch))
        return tokens(cache, branch)

    monkeypatch.setattr(RadixCache, "tokens", spy)
    completions = make_bench().speculative("sd", "lookup").generate(mixed)
    texts = sum(request.sampling.n * (2 if request.answer_trigger else 1) for request in mixed)
    assert 0 < len(reads) <= texts < sum(len(completion.tokens) for completion in completions) / 4
