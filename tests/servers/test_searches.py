"""Searches on real servers: their trees, prefix-cache hits, and the number of requests in flight."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from tot import BFS, Sample, Task, ThoughtTree, solve
from tot.decoders import Completion, LocalDecoder, Meter, Request
from tot.tasks.gsm8k import GSM8K

pytestmark = pytest.mark.real

QUESTION = "Hana reads 24 pages on Saturday and half as many on Sunday. How many pages does she read?"  # language: ok


class Recorded:
    """A decoder that records its requests and completions."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.name = decoder.name
        self.model = decoder.model
        self.batches: list[tuple[list[Request], list[list[Completion]]]] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        raise AssertionError("searches call start()")

    def start(self, requests: Sequence[Request], meter: Meter | None = None) -> list[Any]:
        done = asyncio.gather(*self._decoder.start(requests, meter))
        done.add_done_callback(lambda done: self.batches.append((list(requests), done.result())))

        async def completions(index: int) -> list[Completion]:
            return list((await done)[index])

        return [asyncio.ensure_future(completions(index)) for index in range(len(requests))]


class Lenient(GSM8K):
    """GSM8K with sub-questions without a question mark, which a small model writes if a server starts a new reply."""

    def parse_thought(self, template: str, text: str) -> str | None:
        return Task.parse_thought(self, template, text)


def thoughts_of(tree: ThoughtTree) -> list[Any]:
    return [node.thought for node in tree if node.thought is not None]


@pytest.mark.slow
def test_a_gsm8k_search_returns_thoughts_values_and_an_answer(server: Any, remote: Callable[..., Any]) -> None:
    decoder = Recorded(remote(server))
    solution = solve(
        Lenient,
        QUESTION,
        decoder=decoder,
        search=BFS(thoughts=2, breadth=1, depth=2),
        prompts="papers",
        max_tokens=64,
        seed=1,
    )
    thoughts = thoughts_of(solution.tree)
    assert 1 <= len(thoughts) <= 2
    assert all(thought.parts["sub_question"] for thought in thoughts)
    assert all(1 <= node.value <= 10 for node in solution.tree if node.thought is not None)
    assert solution.value == max(node.value for node in solution.tree if node.thought is not None)
    assert solution.answer is not None
    assert solution.stopped is None
    purposes = [request.purpose for requests, _ in decoder.batches for request in requests]
    assert set(purposes) == {"generate", "evaluate", "answer"}
    spent = [one.usage for _, done in decoder.batches for completions in done for one in completions]
    assert solution.usage.new_tokens == sum(usage.new_tokens for usage in spent) > 0
    assert solution.usage.prompt_tokens == sum(usage.prompt_tokens for usage in spent) > 500 * len(purposes)
    assert solution.usage.forwards == 0


@pytest.mark.servers
def test_a_greedy_search_returns_the_local_decoders_tree(
    vllm_server: Any, remote: Callable[..., Any], local: LocalDecoder
) -> None:
    here, there = (
        solve(
            "gsm8k",
            QUESTION,
            decoder=decoder,
            search=BFS(thoughts=1, breadth=1, depth=3),
            generator=Sample(temperature=0.0),
            max_tokens=16,
        )
        for decoder in (local, remote(vllm_server, logprobs=True))
    )
    assert thoughts_of(there.tree) == thoughts_of(here.tree)
    assert len(thoughts_of(here.tree)) == 2
    values = [node.value for node in here.tree if node.value is not None]
    assert [node.value for node in there.tree if node.value is not None] == pytest.approx(values, abs=0.01)
    assert there.answer == here.answer


@pytest.mark.servers
def test_a_second_level_reuses_the_first_levels_prompt_in_the_servers_cache(
    vllm_server: Any, remote: Callable[..., Any]
) -> None:
    alone = {"cache_salt": uuid.uuid4().hex}  # isolate the cache from other searches
    decoder = Recorded(remote(vllm_server, extra=alone))
    before = vllm_server.metric("vllm:prefix_cache_hits_total")
    search = BFS(thoughts=1, breadth=1, depth=3)
    solve("gsm8k", QUESTION, decoder=decoder, search=search, evaluator="random", prompts="papers", max_tokens=12)
    hits = vllm_server.metric("vllm:prefix_cache_hits_total") - before
    first, *later = [
        (completions[0].usage.prompt_tokens, completions[0].usage.reused_prompt_tokens)
        for _, done in decoder.batches
        for completions in done
    ]
    assert first[0] > 512
    assert first[1] == 0
    block = 128  # tokens per cache block of vLLM on a CPU
    assert len(later) == 4  # a sub-answer, two thoughts of the second level, and the answer
    assert all(reused >= first[0] // block * block for _, reused in later)
    assert hits >= sum(reused for _, reused in later)


class Endless(Task):
    """A task whose thoughts have exactly 24 tokens."""

    templates: ClassVar = {"thought": "{{ question }}", "answer": "{{ question }}"}
    sampling: ClassVar = {"thought": {"max_tokens": 24, "ignore_eos": True, "temperature": 1.0}}
    depth = 3


@pytest.mark.servers
@pytest.mark.parametrize(("concurrency", "most"), [(64, 12), (2, 2 * 3)])
def test_a_levels_requests_are_all_in_flight(
    concurrency: int, most: int, vllm_server: Any, remote: Callable[..., Any]
) -> None:
    """Four states have three thoughts each. The server counts each sample as one request."""
    seen: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            seen.append(
                vllm_server.metric("vllm:num_requests_running") + vllm_server.metric("vllm:num_requests_waiting")
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        decoder = Recorded(remote(vllm_server, concurrency=concurrency))
        search = BFS(thoughts=3, breadth=4, depth=4)
        tree = solve(Endless, "Tell me of the sea.", decoder=decoder, search=search, evaluator="random").tree
    finally:
        over.set()
        watcher.join()
    levels = [sum(request.sampling.n for request in requests) for requests, _ in decoder.batches]
    assert max(levels) == 12
    assert len(thoughts_of(tree)) > 12
    assert max(seen) == most
