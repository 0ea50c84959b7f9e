"""RadixCache against a reference model: a set of texts (prefixes), some live, some computed, some cached."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tot.decoders.engine.radix_cache import Branch, RadixCache, RadixCacheFullError

Text = tuple[int, ...]
texts = st.lists(st.integers(0, 2), max_size=6)


def prefixes(text: list[int] | Text) -> set[Text]:
    return {tuple(text[:length]) for length in range(1, len(text) + 1)}


def slots_of_stored(cache: RadixCache) -> dict[Text, int]:
    """Map each text in the trie, live or cached, to its slot, from private fields."""

    def text(slot: int) -> Text:
        return () if slot < 0 else (*text(cache._parent[slot]), cache._token[slot])

    return {text(slot): slot for slot in cache._child_of.values()}


class KVTreeMachine(RuleBasedStateMachine):
    """Run each operation on the cache and on sets of texts."""

    branches = Bundle("branches")

    @initialize(capacity=st.integers(1, 14), idle=st.none() | st.integers(0, 8))
    def begin(self, capacity: int, idle: int | None) -> None:
        self.cache = RadixCache(capacity)
        if idle is not None:
            self.cache.most_idle = idle
        self.texts: dict[Branch, list[int]] = {}
        self.computed: set[Text] = set()
        self.cached: dict[Text, int] = {}
        """Computed texts without a branch, and their last use."""
        self.now = 0
        self.peak = 0

    def live(self) -> set[Text]:
        return set().union(*map(prefixes, self.texts.values()))

    def stored(self) -> set[Text]:
        return self.live() | self.cached.keys()

    def leaves(self) -> list[Text]:
        parents = {text[:-1] for text in self.stored()}
        return [text for text in self.cached if text not in parents]

    def append(self, branch: Branch, tokens: list[int]) -> bool:
        """Extend the reference branch, evicting as needed. Return False if the cache must be full."""
        for token in tokens:
            text = (*self.texts[branch], token)
            if text not in self.stored() and len(self.stored()) == self.cache.capacity:
                if not self.leaves():
                    assert len(self.live()) == self.cache.capacity
                    return False
                self.evict()
            self.cached.pop(text, None)
            self.texts[branch].append(token)
            self.peak = max(self.peak, len(self.live()))
        return True

    def evict(self) -> None:
        gone = min(self.leaves(), key=self.cached.__getitem__)
        del self.cached[gone]
        self.computed.discard(gone)

    def end(self, branch: Branch) -> None:
        self.shorten(branch, 0, keep=True)
        while len(self.cached) > self.cache.most_idle and self.leaves():
            self.evict()

    def shorten(self, branch: Branch, length: int, keep: bool) -> None:
        self.now += 1
        before = self.live()
        self.texts[branch] = self.texts[branch][:length]
        dead = before - self.live()
        for text in sorted(dead, key=len, reverse=True):
            has_cached_child = any(other[:-1] == text for other in self.cached)
            if (keep and text in self.computed) or has_cached_child:
                self.cached[text] = self.now
            else:
                self.computed.discard(text)

    @rule(target=branches, tokens=texts)
    def open(self, tokens: list[int]) -> object:
        expected, live = self.cache.new_slots(tokens), len(self.live())
        assert expected == len(prefixes(tokens) - self.live())
        probe = Branch.__new__(Branch)
        self.texts[probe] = []
        fits = self.append(probe, tokens)
        if not fits:
            with pytest.raises(RadixCacheFullError):
                self.cache.open(tokens)
            self.end(probe)
            del self.texts[probe]
            return multiple()
        branch = self.cache.open(tokens)
        self.texts[branch] = self.texts.pop(probe)
        assert self.cache.live - live == expected
        return branch

    @rule(branch=branches, tokens=texts)
    def extend(self, branch: Branch, tokens: list[int]) -> None:
        if self.append(branch, tokens):
            self.cache.extend(branch, tokens)
        else:
            with pytest.raises(RadixCacheFullError):
                self.cache.extend(branch, tokens)

    @rule(target=branches, branch=branches, length=st.none() | st.integers(0, 6))
    def fork(self, branch: Branch, length: int | None) -> Branch:
        twin = self.cache.fork(branch, length)
        self.texts[twin] = self.texts[branch][:length]
        return twin

    @rule(branch=branches, length=st.integers(0, 6))
    def rollback(self, branch: Branch, length: int) -> None:
        self.cache.rollback(branch, length)
        self.shorten(branch, length, keep=False)

    @rule(branch=branches, tokens=texts, length=st.integers(0, 6), run=st.booleans())
    def draft_and_commit(self, branch: Branch, tokens: list[int], length: int, run: bool) -> None:
        draft = self.fork(branch, None)
        self.extend(draft, tokens)
        if run:
            self.mark_computed(draft, len(draft))
        length = len(branch) + min(length, len(draft) - len(branch))
        self.cache.commit(branch, draft, length)
        self.texts[branch] = self.texts[draft][:length]
        self.shorten(draft, 0, keep=False)

    @rule(branch=branches)
    def release(self, branch: Branch) -> None:
        self.cache.release(branch)
        self.end(branch)

    @rule(tokens=texts)
    def serve(self, tokens: list[int]) -> None:
        """Run a text's whole life cycle, so that the cache fills up."""
        branch = self.open(tokens)
        if isinstance(branch, Branch):
            self.mark_computed(branch, len(branch))
            self.release(branch)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.computed -= self.cached.keys()
        self.cached.clear()

    @rule(branch=branches, length=st.integers(1, 8))
    def mark_computed(self, branch: Branch, length: int) -> None:
        self.cache.mark_computed(branch.slots[:length])
        self.computed |= prefixes(self.texts[branch][:length])

    @invariant()
    def branches_hold_their_texts(self) -> None:
        slot_of: dict[Text, int] = {}
        for branch, text in self.texts.items():
            assert self.cache.tokens(branch) == text
            for length, slot in enumerate(branch.slots, 1):
                assert slot_of.setdefault(tuple(text[:length]), slot) == slot
        assert len(set(slot_of.values())) == len(slot_of)
        assert self.cache.live == len(slot_of) == len(self.live())
        assert self.cache.peak_live == self.peak
        for text, slot in slot_of.items():
            assert self.cache.is_computed(slot) == (text in self.computed)

    @invariant()
    def holds_exactly_the_live_and_cached_texts(self) -> None:
        slots = slots_of_stored(self.cache)
        assert slots.keys() == self.stored()
        assert self.cache.stored == len(slots) <= self.cache.capacity
        assert sorted([*slots.values(), *self.cache._free]) == list(range(1, len(self.cache._token)))
        assert len(self.cache._evictable) <= 2 * max(self.cache.capacity, 16)


KVTreeMachine.TestCase.settings = settings(stateful_step_count=40)
test_the_cache_equals_sets_of_texts = KVTreeMachine.TestCase


@pytest.mark.parametrize(("text", "length"), [([1, 3, 4], 3), ([1, 2, 3], 1)])
def test_commit_refuses_a_draft_that_does_not_extend_the_branch(text: list[int], length: int) -> None:
    cache = RadixCache(8)
    branch = cache.open([1, 2])
    with pytest.raises(ValueError, match="does not extend the branch"):
        cache.commit(branch, cache.open(text), length)
