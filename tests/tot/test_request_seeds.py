"""Every sample of a search has its own noise: no two sampled texts are one request with one seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from tot import SelfConsistency, Task, solve
from tot.decoders import Completion, Request, Usage
from tot.decoders.request import ChoiceLogprob


class Ideas(Task):
    """Two ways to write a solution, and thoughts that can be counted."""

    templates: ClassVar = {
        "thought": "think {{ thoughts }}",
        "value": "value {{ thoughts[-1] }}",
        "answer": "answer {{ thoughts[-1] }}",
        "vote": "vote",
        "chain": "write it",
        "program": "program it",
    }
    depth = 4


class Distinct:
    """Replies with a text that depends on the whole request, and counts its samples of temperature above 0."""

    def __init__(self) -> None:
        self.samples: Counter[tuple[str, int, int]] = Counter()
        self.greedy = 0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._reply(request, j) for request in requests for j in range(request.sampling.n)]

    def _reply(self, request: Request, sample: int) -> Completion:
        prompt = "\n".join(message.content for message in request.prompt)  # type: ignore[union-attr]
        if request.sampling.temperature > 0:
            self.samples[prompt, request.sampling.seed, sample] += 1
        else:
            self.greedy += not request.choices
        number = 1 + hash((prompt, request.sampling.seed, sample)) % 10**9
        scores = tuple(ChoiceLogprob(-1.0 - place, 1) for place, _ in enumerate(request.choices))
        return Completion(
            f"{number} \\boxed{{{number}}}\n", (), -1.0, "eos", Usage(new_tokens=2), choice_logprobs=scores
        )


MIXED = "solutions=program+chain+program"
SEARCHES = [
    f"self-consistency:samples=12,{MIXED}",
    "auto:samples=12,until=1,together=5",
    "self-consistency:samples=8",
    f"best-of-n:samples=9,{MIXED}",
    "bfs:thoughts=3,breadth=2",
    "dfs:thoughts=3",
    "best-first:thoughts=3",
    "mcts:iterations=12,thoughts=3",
    "mcts:iterations=6,thoughts=2,rollout=greedy",
    "rap:iterations=6",
    "ab-mcts:iterations=12,together=4",
    "refine:thoughts=3",
]


@pytest.mark.parametrize("search", SEARCHES)
def test_no_two_samples_of_a_search_are_one_request(search: str) -> None:
    decoder = Distinct()
    solve(Ideas, "q", decoder=decoder, search=search, generator="sample", evaluator="random")
    assert decoder.samples
    assert max(decoder.samples.values()) == 1, decoder.samples.most_common(3)


@pytest.mark.parametrize(("solutions", "texts"), [((), 1), (("program", "chain", "program"), 2)])
def test_greedy_copies_are_one_vote(solutions: tuple[str, ...], texts: int) -> None:
    decoder: Any = Distinct()
    search = SelfConsistency(samples=8, solutions=solutions)
    generator = "sample:temperature=0"
    solution = solve(Ideas, "q", decoder=decoder, search=search, generator=generator, evaluator="random")
    assert (decoder.greedy, len(decoder.samples)) == (texts, 0)
    assert [node.id for node in solution.tree.leaves()] == list(range(1, 1 + texts))
