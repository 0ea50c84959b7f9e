"""Drafters: their guesses, the sources of these, and draft models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tot.decoders import Request, Sampling, load_decoder, load_model
from tot.decoders.drafting.draft_model import ModelDrafter
from tot.decoders.drafting.drafters import Draft, DraftContext, Verified
from tot.decoders.drafting.latency_model import LatencyModel
from tot.decoders.drafting.lookup import LookupDrafter
from tot.decoders.drafting.planner import AcceptanceStatistics, SpeculationPlanner
from tot.decoders.engine.sampling import Draw, candidates

PADDED = 340
"""Rows of an embedding that is larger than the target's."""


def context(
    prompt: Sequence[int], drawn: Sequence[int] = (), widths: Sequence[int] = (1,) * 4, key: int = 0, heat: float = 0.0
) -> DraftContext:
    draws = [Draw(heat, 0, 1.0, 0.0, 7, key, len(drawn) + ahead) for ahead in range(len(widths))]
    return DraftContext(key, prompt, [*prompt, *drawn], draws, widths)


# -- the tree of a draft ---------------------------------------------------------------------------


@pytest.fixture
def tree() -> Draft:
    """A draft with two first tokens. The first has two branches, and one of them is longer than the second token's."""
    draft = Draft()
    left, right = draft.add(10, -1), draft.add(20, -1)
    draft.add(21, right)
    draft.add(11, left)
    deep = draft.add(12, left)
    draft.add(13, deep)
    return draft


def test_a_draft_returns_its_paths_leaves_and_children(tree: Draft) -> None:
    assert tree.children(-1) == [0, 1]
    assert [tree.children(node) for node in range(6)] == [[3, 4], [2], [], [], [5], []]
    assert [tree.path(node) for node in (-1, 0, 2, 5)] == [[], [0], [1, 2], [0, 4, 5]]
    assert tree.leaves() == [3, 5, 2]  # depth first, not in list order


# -- lookup ----------------------------------------------------------------------------------------


def looked_up(drafter: LookupDrafter, *contexts: DraftContext) -> list[list[int]]:
    drafts = drafter.draft(contexts)
    assert [draft.parents for draft in drafts] == [list(range(-1, len(draft.tokens) - 1)) for draft in drafts]
    return [draft.tokens for draft in drafts]


def test_lookup_continues_like_the_prompt() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 9, 9]
    assert looked_up(LookupDrafter(), context([*prompt, 2, 3])) == [[4, 5, 6, 7]]
    assert looked_up(LookupDrafter(), context(prompt, [2, 3], widths=(2, 2))) == [[4, 5]]


def test_lookup_finds_the_tokens_of_a_sibling() -> None:
    prompt = [5, 6, 7]
    first = context(prompt, [1, 2, 3, 4], key=1)
    second = context(prompt, [8, 1, 2], key=2)
    assert looked_up(LookupDrafter(), first, second) == [[], [3, 4]]
    assert looked_up(LookupDrafter(), second, first) == [[3, 4], []]  # all texts are indexed before any lookup


def test_lookup_finds_tokens_of_finished_texts_with_other_prompts() -> None:
    drafter = LookupDrafter()
    looked_up(drafter, context([30, 31, 32], [33, 34], key=1))
    drafter.end(1)
    assert looked_up(drafter, context([9, 31, 32], key=2)) == [[33, 34]]
    assert looked_up(drafter, context([9, 30, 31], key=3)) == [[32, 33, 34]]


def test_lookup_indexes_only_the_part_of_a_text_that_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, written = LookupDrafter(), []
    extend = drafter.index.extend
    monkeypatch.setattr(
        drafter.index, "extend", lambda tokens, start: written.append(len(tokens) - start) or extend(tokens, start)
    )
    prompt = list(range(100))
    for drawn in range(3):
        looked_up(drafter, context(prompt, range(50, 50 + drawn), key=1))
    looked_up(drafter, context([*prompt, 7, 8, 9], key=2), context([*prompt[:50], 5, 5], key=3))
    looked_up(drafter, context([*prompt, 7, 8, 9], key=4))
    assert written == [100, 1, 1, 3, 2, 0]


def test_lookup_counts_on_plain_steps_what_its_drafts_would_have_got_right() -> None:
    drafter, statistics = LookupDrafter(), AcceptanceStatistics()
    expensive = LatencyModel((1, 64), (0.01, 0.64))
    tokens = [1, 2, 3, 4] * 6
    text = context(tokens[:7], key=1)
    for drawn in (*tokens[7:], 9):  # each token is looked up but the last
        assert drafter.draft([text], SpeculationPlanner(statistics, expensive, None, 1))[0].tokens == []
        drafter.observe(Verified(text, Draft(), {-1: drawn}, [], 0, [drawn]))
        text = context(tokens[:7], [*text.tokens[7:], drawn], key=1)
    assert statistics.chance(("lookup", 3, 1)) == statistics.chance(("lookup", 5, 1)) == (1 + 1) / (1 + 2)
    assert statistics.chance(("lookup", 6, 2)) == (4 + 1) / (4 + 2)
    assert statistics.chance(("lookup", 6, 3)) == (6 + 1) / (7 + 2)


# -- a model ---------------------------------------------------------------------------------------


@pytest.fixture
def draft_model(make_model: Callable[..., Any]) -> Any:
    return make_model(seed=4)


@pytest.fixture
def drafter(draft_model: Any, tokenizer: Any) -> Iterator[ModelDrafter]:
    made = ModelDrafter(load_model(copy.deepcopy(draft_model), tokenizer=tokenizer), 2000, 300)
    yield made
    assert sum(len(made.runner.cache.tokens(branch)) for branch in made._branches.values()) >= made.runner.cache.live
    made.close()


class Alone:
    """The draft that the unmodified model makes for a text, with one run of the whole text per node."""

    def __init__(self, model: Any, logits_alone: Callable[..., Tensor]) -> None:
        self._model, self._run = model, logits_alone

    def paths(self, context: DraftContext) -> list[list[int]]:
        paths: list[list[int]] = [[]]
        for how, width in zip(context.draws, context.widths, strict=True):
            logits = [self._run(self._model, [*context.tokens, *path])[-1:] for path in paths]
            grown = [candidates(row, [how], width)[0] for row in logits]
            paths = [[*path, token] for path, tokens in zip(paths, grown, strict=True) for token in tokens]
        return paths


@pytest.fixture
def alone(draft_model: Any, logits_alone: Callable[..., Tensor]) -> Alone:
    return Alone(draft_model, logits_alone)


def paths(draft: Draft) -> list[list[int]]:
    return [[draft.tokens[node] for node in draft.path(leaf)] for leaf in draft.leaves()]


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("widths", [(1,), (1, 1, 1, 1), (2, 2, 1), (3, 1, 2)])
def test_a_model_drafts_the_tokens_that_it_would_sample(
    drafter: ModelDrafter, alone: Alone, widths: tuple[int, ...], heat: float
) -> None:
    contexts = [
        context(list(range(5, 5 + size)), [9] * key, widths[: 4 - key], key, heat)
        for key, size in enumerate((4, 30, 1))
    ]
    drafts = drafter.draft(contexts)
    assert [paths(draft) for draft in drafts] == [alone.paths(one) for one in contexts]
    assert drafter.forwards == len(widths)  # one forward for all texts and candidates of a position


def test_a_model_follows_the_sampled_tokens_instead_of_its_drafts(drafter: ModelDrafter, alone: Alone) -> None:
    prompt = list(range(40, 60))
    for drawn in ([], [7], [7, 8, 9, 10], [7, 8], [7, 8, 200, 201, 202], [], [7, 8, 9, 10, 11], [7, 8, 9, 10, 11]):
        one = context(prompt, drawn, (2, 1, 1))
        (draft,) = drafter.draft([one])
        assert paths(draft) == alone.paths(one)
        assert drafter.runner.cache.live == len(prompt) + len(drawn)


def test_a_prompt_longer_than_a_chunk_is_prefilled_correctly(drafter: ModelDrafter, alone: Alone) -> None:
    prompt = torch.randint(3, 270, (800,), generator=torch.Generator().manual_seed(1)).tolist()
    contexts = [context(prompt, key=1), context([*prompt[:700], 5], key=2), context([4], key=3)]
    assert [paths(draft) for draft in drafter.draft(contexts)] == [alone.paths(one) for one in contexts]


@pytest.mark.parametrize("kv_budget", [1, 10, 22, 24, 25, 40])
def test_a_full_cache_shortens_drafts_and_keeps_them_correct(
    draft_model: Any, tokenizer: Any, alone: Alone, kv_budget: int
) -> None:
    small = ModelDrafter(load_model(copy.deepcopy(draft_model), tokenizer=tokenizer), kv_budget, 300)
    one = context(list(range(20)), widths=(1,) * 5)
    (draft,) = small.draft([one])
    fits = 0 if kv_budget < 20 else min(5, kv_budget - 20 + 1)
    assert draft.tokens == alone.paths(one)[0][:fits]
    small.end(0)
    assert small.runner.cache.live == 0


# -- through a decoder -----------------------------------------------------------------------------


@pytest.fixture
def requests() -> list[Request]:
    heats = (0.0, 0.6, 1.0)
    sampling = [Sampling(max_tokens=25, temperature=heat, ignore_eos=True, n=2) for heat in heats]
    return [Request(prompt=f"the range in {how.temperature} and on", sampling=how) for how in sampling]


Decode = Callable[..., list[tuple[int, ...]]]


@pytest.fixture
def decode(make_model: Callable[..., Any], tokenizer: Any, requests: list[Request]) -> Decode:
    """Decode the requests with a method. The target is not readable, so it also writes ids of padding rows."""

    def run(name: str, **options: Any) -> list[tuple[int, ...]]:
        with load_decoder(name, make_model(), tokenizer=tokenizer, kv_budget=3000, **options) as decoder:
            return [completion.tokens for completion in decoder.generate(requests)]

    return run


@pytest.mark.parametrize("vocabulary", [PADDED, 280])
@pytest.mark.parametrize("name", ["sd", "mcsd", "seed"])
def test_embeddings_padded_to_another_size_change_nothing(
    decode: Decode, make_model: Callable[..., Any], name: str, vocabulary: int
) -> None:
    expected = decode("ar")
    assert max(map(max, expected)) >= 280  # an id without a row in the smaller draft
    assert decode(name, draft=make_model(seed=3, vocab_size=vocabulary)) == expected


REJECTION = [
    ("sd", {"rule": "leviathan"}),
    ("mcsd", {"rule": "mcsd"}),
    ("seed", {"rule": "leviathan", "k_config": (1, 1, 1), "adapt": False}),
    ("seed", {"rule": "mcsd", "policy": "rounds", "adapt": False}),
]


@pytest.mark.parametrize("vocabulary", [PADDED, pytest.param(280, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "options"), REJECTION)
def test_by_rejection_a_draft_with_another_vocabulary_size_samples_the_same(
    make_model: Callable[..., Any], tokenizer: Any, requests: list[Request], name: str, options: Any, vocabulary: int
) -> None:
    """Compare one draft in two sizes. Tokens that only the larger one has are never drafted."""

    def decode(draft: Any) -> list[tuple[int, ...]]:
        target = make_model(readable=True)
        with load_decoder(name, target, tokenizer=tokenizer, kv_budget=3000, draft=draft, **options) as decoder:
            completions = decoder.generate(requests)
        drafted, accepted = (sum(getattr(c.usage, what) for c in completions) for what in ("drafted", "accepted"))
        assert 0 < accepted < drafted
        return [completion.tokens for completion in completions]

    equal, other = make_model(readable=True), make_model(readable=True, vocab_size=vocabulary)
    equal.model.norm.weight.data *= 1 + 0.2 * torch.randn(48, generator=torch.Generator().manual_seed(1))
    other.load_state_dict({k: v for k, v in equal.state_dict().items() if v.shape[0] != 300}, strict=False)
    for ours, theirs in ((other.lm_head, equal.lm_head), (other.model.embed_tokens, equal.model.embed_tokens)):
        ours.weight.data[:300] = theirs.weight[:vocabulary]
    other.lm_head.bias.data[300:] = 50.0  # its most likely tokens by far, if the target had them
    assert decode(other) == decode(equal)


@pytest.mark.parametrize("kv_budget", [1, 8, 20, 60, 150])
def test_a_draft_without_room_is_slower_and_changes_nothing(
    decode: Decode, make_model: Callable[..., Any], tokenizer: Any, kv_budget: int
) -> None:
    drafter = ModelDrafter(load_model(make_model(), tokenizer=tokenizer), kv_budget, 300)
    assert decode("mcsd", draft=drafter) == decode("ar")
    assert drafter.runner.cache.live == 0
