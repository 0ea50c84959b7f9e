"""RadixCache against a model of it: a set of texts (prefixes), some live, some computed, some cached."""

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


def slots_of_stored(tree: RadixCache) -> dict[Text, int]:
    """Every text the trie holds, live or cached, and its slot; read from the inside."""

    def text(slot: int) -> Text:
        return () if slot < 0 else (*text(tree._parent[slot]), tree._token[slot])

    return {text(slot): slot for slot in tree._child_of.values()}


class KVTreeMachine(RuleBasedStateMachine):
    """Every operation on the tree, beside the same operation on sets of texts."""

    branches = Bundle("branches")

    @initialize(capacity=st.integers(1, 14))
    def begin(self, capacity: int) -> None:
        self.tree = RadixCache(capacity)
        self.texts: dict[Branch, list[int]] = {}
        self.computed: set[Text] = set()
        self.cached: dict[Text, int] = {}
        """Computed texts that no branch holds, and when they were last held."""
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
        """Extend the model's branch, evicting as needed. False where the tree has to be full."""
        for token in tokens:
            text = (*self.texts[branch], token)
            if text not in self.stored() and len(self.stored()) == self.tree.capacity:
                if not self.leaves():
                    assert len(self.live()) == self.tree.capacity
                    return False
                gone = min(self.leaves(), key=self.cached.__getitem__)
                del self.cached[gone]
                self.computed.discard(gone)
            self.cached.pop(text, None)
            self.texts[branch].append(token)
            self.peak = max(self.peak, len(self.live()))
        return True

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
        expected, live = self.tree.new_slots(tokens), len(self.live())
        assert expected == len(prefixes(tokens) - self.live())
        probe = Branch.__new__(Branch)
        self.texts[probe] = []
        fits = self.append(probe, tokens)
        if not fits:
            with pytest.raises(RadixCacheFullError):
                self.tree.open(tokens)
            self.shorten(probe, 0, keep=True)
            del self.texts[probe]
            return multiple()
        branch = self.tree.open(tokens)
        self.texts[branch] = self.texts.pop(probe)
        assert self.tree.live - live == expected
        return branch

    @rule(branch=branches, tokens=texts)
    def extend(self, branch: Branch, tokens: list[int]) -> None:
        if self.append(branch, tokens):
            self.tree.extend(branch, tokens)
        else:
            with pytest.raises(RadixCacheFullError):
                self.tree.extend(branch, tokens)

    @rule(target=branches, branch=branches, length=st.none() | st.integers(0, 6))
    def fork(self, branch: Branch, length: int | None) -> Branch:
        twin = self.tree.fork(branch, length)
        self.texts[twin] = self.texts[branch][:length]
        return twin

    @rule(branch=branches, length=st.integers(0, 6))
    def rollback(self, branch: Branch, length: int) -> None:
        self.tree.rollback(branch, length)
        self.shorten(branch, length, keep=False)

    @rule(branch=branches, tokens=texts, length=st.integers(0, 6), run=st.booleans())
    def draft_and_commit(self, branch: Branch, tokens: list[int], length: int, run: bool) -> None:
        draft = self.fork(branch, None)
        self.extend(draft, tokens)
        if run:
            self.mark_computed(draft, len(draft))
        length = len(branch) + min(length, len(draft) - len(branch))
        self.tree.commit(branch, draft, length)
        self.texts[branch] = self.texts[draft][:length]
        self.shorten(draft, 0, keep=False)

    @rule(branch=branches)
    def release(self, branch: Branch) -> None:
        self.tree.release(branch)
        self.shorten(branch, 0, keep=True)

    @rule(tokens=texts)
    def serve(self, tokens: list[int]) -> None:
        """A text's whole life, so that the cache gets full."""
        branch = self.open(tokens)
        if isinstance(branch, Branch):
            self.mark_computed(branch, len(branch))
            self.release(branch)

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.computed -= self.cached.keys()
        self.cached.clear()

    @rule(branch=branches, length=st.integers(1, 8))
    def mark_computed(self, branch: Branch, length: int) -> None:
        self.tree.mark_computed(branch.slots[:length])
        self.computed |= prefixes(self.texts[branch][:length])

    @invariant()
    def branches_hold_their_texts(self) -> None:
        slot_of: dict[Text, int] = {}
        for branch, text in self.texts.items():
            assert self.tree.tokens(branch) == text
            for length, slot in enumerate(branch.slots, 1):
                assert slot_of.setdefault(tuple(text[:length]), slot) == slot
        assert len(set(slot_of.values())) == len(slot_of)
        assert self.tree.live == len(slot_of) == len(self.live())
        assert self.tree.peak_live == self.peak
        for text, slot in slot_of.items():
            assert self.tree.is_computed(slot) == (text in self.computed)

    @invariant()
    def holds_what_is_live_or_cached_and_nothing_else(self) -> None:
        slots = slots_of_stored(self.tree)
        assert slots.keys() == self.stored()
        assert self.tree.stored == len(slots) <= self.tree.capacity
        assert sorted([*slots.values(), *self.tree._free]) == list(range(1, self.tree.capacity + 1))
        assert len(self.tree._evictable) <= 2 * self.tree.capacity


KVTreeMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
test_tree_does_what_sets_of_texts_do = KVTreeMachine.TestCase


def cached(tree: RadixCache, *tokens: int) -> None:
    """Put a text into the cache: computed, and no branch's."""
    branch = tree.open(tokens)
    tree.mark_computed(branch.slots)
    tree.release(branch)


def computed(tree: RadixCache, *tokens: int) -> int:
    """How many tokens of a text the tree can give back; leaves no trace."""
    branch = tree.open(tokens)
    length = tree.computed_length(branch)
    tree.release(branch)
    return length


def test_released_text_is_found_again_up_to_where_it_was_computed() -> None:
    tree = RadixCache(10)
    branch = tree.open([5, 6, 7, 8])
    tree.mark_computed(branch.slots[:3])
    assert tree.computed_length(branch) == 3
    tree.release(branch)
    assert (tree.live, tree.stored) == (0, 3)
    again = tree.open([5, 6, 7, 8, 9])
    assert tree.computed_length(again) == 3
    assert tree.computed_length(again, start=4) == 4


def test_least_recently_released_leaf_goes_first() -> None:
    tree = RadixCache(6)
    for text in ([1, 1], [2, 2], [3, 3]):
        cached(tree, *text)
    cached(tree, 1, 1)  # used again: [2, 2] is the oldest now
    tree.open([9])
    assert [computed(tree, 2, 2), tree.stored] == [
        1,
        5,
    ]  # its leaf went, and looking dropped the token that was missing


def test_cached_texts_are_evicted_from_their_ends() -> None:
    tree = RadixCache(6)
    cached(tree, 1, 2, 3)
    cached(tree, 1, 2, 4)
    held = tree.open([7, 8, 9])
    assert tree.computed_length(tree.open([1, 2, 4])) == 3
    assert tree.stored == len(held) + 3


def test_a_live_branch_is_never_evicted_and_full_means_all_slots_live() -> None:
    tree = RadixCache(4)
    branch = tree.open([1, 2, 3])
    tree.mark_computed(branch.slots)
    other = tree.open([4])
    with pytest.raises(RadixCacheFullError, match="all 4"):
        tree.extend(other, [5])
    assert tree.tokens(other) == [4]
    with pytest.raises(RadixCacheFullError):
        tree.open([1, 2, 9])
    assert tree.live == 4
    assert tree.computed_length(branch) == 3


def test_a_refused_text_leaves_nothing_behind() -> None:
    tree = RadixCache(3)
    with pytest.raises(RadixCacheFullError):
        tree.open([1, 2, 3, 4])
    assert (tree.live, tree.stored) == (0, 0)


def test_rollback_frees_at_once_what_release_would_keep() -> None:
    tree = RadixCache(8)
    branch = tree.open([1, 2, 3, 4])
    tree.mark_computed(branch.slots)
    sibling = tree.fork(branch, 3)
    tree.rollback(branch, 1)
    assert (tree.live, tree.stored) == (3, 3)  # the sibling still runs through 2 and 3
    tree.rollback(sibling, 1)
    assert (tree.live, tree.stored) == (1, 1)
    assert computed(tree, 1, 2, 3) == 1


def test_commit_moves_a_branch_along_its_draft_and_drops_the_rest() -> None:
    tree = RadixCache(8)
    branch = tree.open([1, 2])
    draft = tree.fork(branch)
    tree.extend(draft, [3, 4, 5])
    slots = list(draft.slots)
    tree.commit(branch, draft, 4)
    assert list(branch.slots) == slots[:4]
    assert (len(draft), tree.live, tree.stored) == (0, 4, 4)


@pytest.mark.parametrize(("text", "length"), [([1, 3, 4], 3), ([1, 2, 3], 1)])
def test_commit_refuses_a_draft_that_does_not_extend_the_branch(text: list[int], length: int) -> None:
    tree = RadixCache(8)
    branch = tree.open([1, 2])
    with pytest.raises(ValueError, match="extends it"):
        tree.commit(branch, tree.open(text), length)


def test_long_service_does_not_grow_the_books() -> None:
    tree = RadixCache(8)
    for turn in range(100):
        cached(tree, 1, 2, turn % 3)
    assert len(tree._evictable) <= 16
    assert (tree.live, tree.peak_live, tree.stored) == (0, 3, 5)
