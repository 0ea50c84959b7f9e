"""RadixCache: the mapping from the tokens of each text to slots of the key-value store.

A trie over token ids in which each node is one slot. A branch is a path from the root. Forks share their path, and
equal texts share slots. Slots that no branch needs stay cached, and are evicted least recently used leaf first.
RadixCache does the bookkeeping only: the tensors belong to the backend.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Sequence

SCRATCH = 0
"""The slot that is never read. Rows that are computed only for their logits write there."""
_MIN_SWEEP = 16
"""Heap entries up to which stale ones are not swept."""
_ROOT = -1


class RadixCacheFullError(Exception):
    """No slot is free and none can be evicted. Admission control keeps this from happening."""


class Branch:
    """A path of slots from the root, one per token; position i of the text is `slots[i]`."""

    __slots__ = ("slots",)

    def __init__(self, slots: array[int]) -> None:
        self.slots = slots

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def tip(self) -> int:
        return self.slots[-1] if self.slots else _ROOT


class RadixCache:
    """A trie with `capacity` token slots.

    A node is *live* while a branch runs through it, and *computed* once its keys and values are in the store. Nodes
    that are neither live nor computed are freed at once; computed nodes stay cached until evicted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.most_idle = capacity
        """Maximum number of slots that stay cached without a branch."""
        self.live = 0
        """Number of slots that a branch runs through."""
        self.peak_live = 0
        # The lists have an entry for each slot used so far: a store with room for a million tokens costs nothing.
        self._token = [0] * (SCRATCH + 1)
        self._parent = [_ROOT] * (SCRATCH + 1)
        self._users = [0] * (SCRATCH + 1)
        """Number of branches that end at a node, plus its live children."""
        self._children = [0] * (SCRATCH + 1)
        self._computed = bytearray(SCRATCH + 1)
        self._last_used = [0] * (SCRATCH + 1)
        self._child_of: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        """Slots that were used before."""
        self._evictable: list[tuple[int, int]] = []
        self._sweep_size = _MIN_SWEEP
        """Heap size above which stale entries are swept: twice the size after the last sweep."""
        self._clock = 0

    @property
    def stored(self) -> int:
        """Slots in use, live or cached."""
        return len(self._token) - (SCRATCH + 1) - len(self._free)

    def is_computed(self, slot: int) -> bool:
        return bool(self._computed[slot])

    def token(self, slot: int) -> int:
        return self._token[slot]

    def tokens(self, branch: Branch) -> list[int]:
        return [self._token[slot] for slot in branch.slots]

    def computed_length(self, branch: Branch, start: int = 0) -> int:
        """Return the first position from `start` on that is not computed."""
        while start < len(branch) and self._computed[branch.slots[start]]:
            start += 1
        return start

    def new_slots(self, tokens: Sequence[int]) -> int:
        """Return how many more slots would be live if a branch of these tokens were opened."""
        return len(tokens) - sum(self._users[slot] > 0 for slot in self._known(_ROOT, tokens))

    def open(self, tokens: Sequence[int] = ()) -> Branch:
        """Open a branch that holds `tokens`, reusing cached slots. Raises RadixCacheFullError."""
        branch = Branch(array("i"))
        try:
            self.extend(branch, tokens)
        except RadixCacheFullError:
            self.release(branch)
            raise
        return branch

    def fork(self, branch: Branch, length: int | None = None) -> Branch:
        """Return a second branch over the first `length` positions (all of them by default)."""
        twin = Branch(branch.slots[:length])
        if twin.slots:
            self._acquire(twin.tip)
        return twin

    def extend(self, branch: Branch, tokens: Sequence[int]) -> None:
        """Append tokens. Raises RadixCacheFullError (the branch keeps the tokens that fitted)."""
        known = self._known(branch.tip, tokens)
        if known:
            self._move(branch, known)
        new: list[int] = []
        try:
            for token in tokens[len(known) :]:
                new.append(self._allocate(new[-1] if new else branch.tip, token))
        finally:
            if new:
                self._move(branch, new)

    def _known(self, node: int, tokens: Iterable[int]) -> list[int]:
        """Return the nodes after `node` for the longest prefix of `tokens` in the trie."""
        nodes: list[int] = []
        for token in tokens:
            child = self._child_of.get((node, token))
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes

    def _move(self, branch: Branch, slots: Sequence[int]) -> None:
        """Extend a branch along a path from its tip."""
        tip = branch.tip
        self._acquire(slots[-1])
        branch.slots.extend(slots)
        if tip != _ROOT:
            self._release(tip, keep=True)

    def rollback(self, branch: Branch, length: int) -> None:
        """Shorten to `length` positions. Slots that no other branch runs through are freed at once, not cached."""
        self._shorten(branch, length, keep=False)

    def commit(self, branch: Branch, draft: Branch, length: int) -> None:
        """Set `branch` to the first `length` positions of `draft`, which extends it, and drop the draft."""
        if length < len(branch) or draft.slots[: len(branch)] != branch.slots:
            raise ValueError("cannot commit a draft that does not extend the branch: fork the draft from it")
        tip = branch.tip
        if length > len(branch):
            self._acquire(draft.slots[length - 1])
            branch.slots = draft.slots[:length]
            if tip != _ROOT:
                self._release(tip, keep=True)
        self.rollback(draft, 0)

    def release(self, branch: Branch) -> None:
        """End a branch. Its computed slots stay cached until they are evicted."""
        self._shorten(branch, 0, keep=True)
        while self.stored - self.live > self.most_idle and self._evictable:
            self._evict_one()

    def clear(self) -> None:
        """Evict all slots that no branch runs through."""
        while self._evictable:
            self._evict_one()

    def mark_computed(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._computed[slot] = 1

    def _shorten(self, branch: Branch, length: int, keep: bool) -> None:
        if length >= len(branch):
            return
        tip = branch.tip
        branch.slots = branch.slots[:length]
        if branch.slots:
            self._acquire(branch.tip)
        self._release(tip, keep)

    def _allocate(self, parent: int, token: int) -> int:
        if not self._free:
            if len(self._token) <= self.capacity:
                self._add_slot()
            else:
                self._evict()
        slot = self._free.pop()
        self._token[slot], self._parent[slot] = token, parent
        self._child_of[parent, token] = slot
        if parent != _ROOT:
            self._children[parent] += 1
        return slot

    def _add_slot(self) -> None:
        """Free a slot that was never used."""
        self._free.append(len(self._token))
        self._parent.append(_ROOT)
        for entries in (self._token, self._users, self._children, self._computed, self._last_used):
            entries.append(0)

    def _acquire(self, slot: int) -> None:
        while slot != _ROOT:
            self._users[slot] += 1
            if self._users[slot] > 1:
                return
            self.live += 1
            self.peak_live = max(self.peak_live, self.live)
            slot = self._parent[slot]

    def _release(self, slot: int, keep: bool) -> None:
        self._clock += 1
        while slot != _ROOT:
            self._users[slot] -= 1
            if self._users[slot]:
                return
            self.live -= 1
            self._last_used[slot] = self._clock
            parent = self._parent[slot]
            if not self._children[slot]:
                if keep and self._computed[slot]:
                    self._make_evictable(slot)
                else:
                    self._remove(slot)
            slot = parent

    def _remove(self, slot: int) -> None:
        """Free the slot of a leaf. A parent without children or branches becomes evictable."""
        parent = self._parent[slot]
        del self._child_of[parent, self._token[slot]]
        self._computed[slot] = 0
        self._free.append(slot)
        if parent != _ROOT:
            self._children[parent] -= 1
            if not self._children[parent] and not self._users[parent]:
                self._make_evictable(parent)

    def _make_evictable(self, slot: int) -> None:
        """Make an unused leaf evictable. Sweep stale entries once the heap has doubled."""
        heapq.heappush(self._evictable, (self._last_used[slot], slot))
        if len(self._evictable) > self._sweep_size:
            self._evictable = [entry for entry in set(self._evictable) if self._is_evictable(*entry)]
            heapq.heapify(self._evictable)
            self._sweep_size = max(_MIN_SWEEP, 2 * len(self._evictable))

    def _is_evictable(self, used: int, slot: int) -> bool:
        idle = self._computed[slot] and not self._users[slot] and not self._children[slot]
        return bool(idle) and used == self._last_used[slot]

    def _evict_one(self) -> bool:
        """Free the least recently used leaf. Return False if its entry was stale."""
        used, slot = heapq.heappop(self._evictable)
        evictable = self._is_evictable(used, slot)
        if evictable:
            self._remove(slot)
        return evictable

    def _evict(self) -> None:
        while self._evictable:
            if self._evict_one():
                return
        raise RadixCacheFullError(f"all {self.capacity} key-value slots are in use")
