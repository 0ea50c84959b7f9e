"""SEED: drafts are verified first come, first served, checked with a scripted clock."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

import pytest

from tot.decoders import Completion, Request
from tot.decoders.methods.seed import Rounds, SEEDOptions
from tot.decoders.methods.speculative import Speculative
from tot.decoders.timeline import Timeline

LONG = "The sum of 10 and 11 is in the range on and on, and the other one: "
ROUNDS: dict[str, Any] = {"policy": "rounds", "adapt": False, "k_config": (2, 1)}


class Script(Executor):
    """An executor whose drafts take scripted times. Each verification advances the clock by one second.

    It detects a verification by the call that follows: the next draft of the same text, or the text's end. If no draft
    waits for verification, time advances to the end of the next draft.
    """

    def __init__(self, seconds: Callable[[int, int], float]) -> None:
        self._seconds = seconds
        """By text and draft, both counted from 0."""
        self.now = 0.0
        self.drafting: dict[int, tuple[float, Callable[[], None]]] = {}
        """Finish time and finishing function of a running draft, by key."""
        self.queued: list[int] = []
        self.finished: list[int] = []
        """Keys, in the order in which their drafts were finished."""
        self.number: dict[int, int] = {}
        self._drafts: Counter[int] = Counter()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        key, is_draft = args[0], len(args) == 2
        if key in self.queued:  # the draft was verified
            self.queued.remove(key)
            self.now += 1.0
        if is_draft:
            assert key not in self.drafting, "a second draft of a text whose first is not finished"
            number = self.number.setdefault(key, len(self.number))
            self.drafting[key] = (
                self.now + self._seconds(number, self._drafts[key]),
                lambda: future.set_result(fn(*args)),
            )
            self._drafts[key] += 1
        else:
            assert key not in self.drafting
            future.set_result(fn(*args))
        self._finish()
        return future

    def _finish(self) -> None:
        while self.drafting:
            key = min(self.drafting, key=lambda key: self.drafting[key][0])
            due, finish = self.drafting[key]
            if due > self.now and self.queued:
                return
            self.now = max(self.now, due)
            del self.drafting[key]
            self.finished.append(key)
            self.queued.append(key)
            finish()


def scripted(bench: Any, requests: Sequence[Request], script: Script, drafter: Any) -> tuple[list[int], Any]:
    """Return the keys in the order in which their drafts were verified, and the decoded tokens."""
    engine = bench.engine()
    engine.timeline = Timeline(clock=lambda: script.now)
    rounds = Rounds(engine, drafter, SEEDOptions(**ROUNDS), script)
    handles = engine.submit_all(requests, [partial(Speculative, speculation=rounds)] * len(requests))
    tokens = [completion.tokens for handle in handles for completion in handle.result(30)]
    rounds.close()
    spans = [span for span in engine.timeline.spans if span.branch is not None and span.kind == "verify"]
    return [span.branch for span in spans if span.branch is not None], tokens


def one_slow(text: int, draft: int) -> float:
    return 200.0 if text == 2 else 0.1


def slower_and_slower(text: int, draft: int) -> float:
    return 0.3 * (text + 1) * (draft + 1)


def any_time(text: int, draft: int) -> float:
    return random.Random(100 * text + draft).expovariate(0.3)


def all_at_once(text: int, draft: int) -> float:
    return 0.0


@pytest.mark.parametrize("seconds", [one_slow, slower_and_slower, any_time, all_at_once])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_are_verified_in_the_order_in_which_they_were_finished(
    bench: Any, seconds: Callable[[int, int], float], noise: float, branches: Callable[..., list[Request]]
) -> None:
    script = Script(seconds)
    requests = branches(5)
    verified, tokens = scripted(bench, requests, script, bench.model_drafter(noise))
    assert verified == script.finished
    assert tokens == bench.expected(requests)
    assert len({*verified}) == 5


@pytest.mark.parametrize("seconds", [one_slow, any_time, all_at_once])
def test_no_draft_waits_for_more_verifications_than_there_are_other_branches(
    bench: Any,
    seconds: Callable[[int, int], float],
    results: Callable[..., list[Completion]],
    plain: Callable[..., Request],
    branches: Callable[..., list[Request]],
) -> None:
    script = Script(seconds)
    finished_after: dict[int, list[int]] = {}
    verifications: list[int] = []
    engine = bench.engine()
    rounds = Rounds(engine, bench.model_drafter(0.02), SEEDOptions(**ROUNDS), script)

    class Seen(Speculative):
        def take(self, sequence: Any, rows: Any) -> None:
            verifications.append(sequence.key)
            super().take(sequence, rows)

    enqueue = rounds._enqueue

    def noted(key: int, future: Any) -> None:
        finished_after.setdefault(key, []).append(len(verifications))
        enqueue(key, future)

    rounds._enqueue = noted  # type: ignore[method-assign]
    requests = [plain(LONG, max_tokens=18, temperature=1.0, n=2), *branches(4)]
    results(engine.submit_all(requests, [partial(Seen, speculation=rounds)] * len(requests)))
    rounds.close()
    waits = []
    for key, finished in finished_after.items():
        turns = [turn for turn, whose in enumerate(verifications) if whose == key]
        waits += [turn - after for turn, after in zip(turns, finished, strict=True)]
    assert min(waits) >= 0
    assert max(waits) <= 5  # of six branches
    assert max(waits) >= 3  # some drafts did wait


def test_a_slow_branch_delays_no_other(bench: Any, branches: Callable[..., list[Request]]) -> None:
    script = Script(one_slow)
    verified, _ = scripted(bench, branches(4), script, bench.model_drafter(0.3))
    slow = next(key for key, number in script.number.items() if number == 2)
    first = verified.index(slow)
    assert verified[first:] == [slow] * (len(verified) - first)
    assert set(verified[:first]) == set(script.number) - {slow}


def test_a_branch_never_drafts_past_unverified_tokens(
    bench: Any, watching: Any, branches: Callable[..., list[Request]]
) -> None:
    """Each drafted text is a prefix of the target's text, longer than at the branch's previous draft."""
    for overlap in (False, True):
        watched = watching()
        requests = branches(6)
        got = bench.seed(watched, **ROUNDS, overlap=overlap).generate(requests)
        written = [tuple(bench.engines[-1].codec.encode_prompt(request.prompt)) for request in requests]
        texts = [prompt + one.tokens for prompt, one in zip(written, got, strict=True)]
        asked: dict[int, list[list[int]]] = {}
        for key, text in watched.asked:
            asked.setdefault(key, []).append(text)
        assert len(asked) == 6
        for (key, growing), whole in zip(sorted(asked.items()), texts, strict=True):
            assert all(tuple(text) == whole[: len(text)] for text in growing), key
            assert all(len(before) < len(after) for before, after in itertools.pairwise(growing))
