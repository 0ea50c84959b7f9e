"""Every task with every prompt style, search, generator and evaluator: each combination works or is rejected early.

A rejection is one line, is raised before the first request, and names a remedy that works.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

from tot import MCTS, Confidence, Heuristic, SearchConfig, Solution, load_task, solve
from tot.decoders import Completion, OptionError, Request, TaskError, TotError, Usage
from tot.decoders.request import ChoiceLogprob
from tot.registry import EVALUATORS, GENERATORS, SEARCHES
from tot.registry import TASKS as REGISTERED
from tot.task.world import HasActions

pytestmark = pytest.mark.filterwarnings("ignore:the thought generator returns no log-probabilities", "ignore:Game")
SEARCH = {
    "act": "act:depth=3",
    "auto": "auto:samples=2",
    "bfs": "bfs:thoughts=2,breadth=2,depth=3",
    "dfs": "dfs:thoughts=2,depth=3",
    "best-first": "best-first:thoughts=2,depth=3",
    "best-first by cost": "best-first:rank=cost,depth=3",
    "best-first by value": "best-first:rank=value,thoughts=2,depth=3",
    "best-first by prior": "best-first:rank=prior,thoughts=2,depth=3",
    "mcts": "mcts:iterations=2,thoughts=2,depth=3",
    "mcts with fast heuristics": MCTS(iterations=2, thoughts=2, depth=3, fast=Heuristic()),
    "mcts with fast confidence": MCTS(iterations=2, thoughts=2, depth=3, fast=Confidence()),
    "ab-mcts": "ab-mcts:iterations=3,together=2,depth=3",
    "refine": "refine:thoughts=2,depth=3",
    "rap": "rap:iterations=2,depth=3",
    "cot": "cot",
    "self-consistency": "self-consistency:samples=2",
    "self-consistency, weighted": "self-consistency:samples=2,weighted=true",
    "best-of-n": "best-of-n:samples=2",
}
TASKS = [name for name in REGISTERED if name != "optimize"]  # which needs a scorer
SLOW = ("code", "humaneval", "mbpp")
GENERATOR = (None, *GENERATORS, "sample:samples=2")
EVALUATOR = (None, *EVALUATORS)
REPLIES = (
    "How many eggs are left?",
    "3 + 4 = 7, so the answer is A.\n\n",
    "Plan: a walk.\n\nPassage:\nIt ends well. #### 9",
    "```python\ndef f(x):\n    return x\n```",
    "good, 7",
)


class Combination(NamedTuple):
    task: str
    prompts: str
    search: str
    generator: str | None
    evaluator: str | None

    @property
    def options(self) -> dict[str, Any]:
        own = self._asdict()
        return {**own, "search": SEARCH[self.search]}


MATRIX = [Combination(*one) for one in product(TASKS, ("papers", "chat"), SEARCH, GENERATOR, EVALUATOR)]


class Replies:
    """A decoder that selects from a few texts by the request's seed, and scores choices."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [self._reply(request, sample) for request in requests for sample in range(request.sampling.n)]

    def _reply(self, request: Request, sample: int) -> Completion:
        text = self.texts[(request.sampling.seed + sample) % len(self.texts)]
        scores = tuple(ChoiceLogprob(-1.0 - place, 1) for place, _ in enumerate(request.choices))
        reason: Any = "stop" if request.sampling.keep_stop and text.endswith("\n") else "eos"
        logprobs = (-1.0, -2.0)
        return Completion(text, (1, 2), -3.0, reason, Usage(new_tokens=2), choice_logprobs=scores, logprobs=logprobs)


@cache
def example(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a question, and replies that the task can parse. Skip tasks that this machine cannot run."""
    task = load_task(name)
    question = task.example()
    try:
        start = task.start(question)
    except OptionError as error:
        pytest.skip(str(error))
    return question, (*(task.actions(start)[:3] if isinstance(task, HasActions) else ()), *REPLIES)


def refusal(options: dict[str, Any]) -> TotError | None:
    """Return the error of building the parts, or None."""
    config = SearchConfig.of(None, {name: value for name, value in options.items() if name != "task"})
    try:
        config.parts(config.suited(options["task"]))
    except (OptionError, TaskError) as error:
        return error
    return None


def searched(options: dict[str, Any], texts: Sequence[str] = ()) -> tuple[Solution, Replies]:
    question, replies = example(options["task"])
    decoder = Replies(texts or replies)
    return solve(question=question, decoder=decoder, budget={"nodes": 6}, **options), decoder


def works_or_is_refused(one: Combination) -> bool:
    """Check that a combination gives a solution, or is rejected in one line without a request."""
    refused = refusal(one.options)
    if refused is None:
        return isinstance(searched(one.options)[0], Solution)
    assert "\n" not in str(refused)
    decoder = Replies(["7"])
    with pytest.raises(type(refused), match=re.escape(str(refused))):
        solve(question="4 9 10 13", decoder=decoder, **one.options)
    return decoder.requests == []


def test_the_matrix_has_every_search() -> None:
    assert {text.partition(":")[0] for text in SEARCH.values() if isinstance(text, str)} == set(SEARCHES)


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_of_the_matrix_works_or_is_rejected_before_any_request(task: str) -> None:
    rows = [one for one in MATRIX if one.task == task]
    for one in random.Random(task).sample(rows, 12 if task in SLOW else 40):
        assert works_or_is_refused(one), one


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_whole_matrix_works_or_is_rejected_before_any_request(task: str) -> None:
    for one in MATRIX:
        if one.task == task:
            assert works_or_is_refused(one), one


REMEDY = re.compile(r"\b(prompts|search|generator|evaluator)='([^']+)'")


def test_remedies_in_errors_work() -> None:
    """Each `option='value'` in an error leads to a combination that works, possibly after further errors."""
    tasks = ("blocksworld", "code", "creative_writing", "gsm8k")
    rows = [one for one in MATRIX if one.task in tasks and None in (one.generator, one.evaluator)]
    refused: dict[tuple[str, str, str], Combination] = {}
    for one in rows:
        error = str(refusal(one.options) or "")
        if REMEDY.search(error) and "leave" not in error:
            refused.setdefault((one.task, one.prompts, error), one)
    assert len(refused) > 20
    for (*_, error), one in refused.items():
        for option, value in REMEDY.findall(error):
            options, seen = one.options | {option: value}, {error}
            while (failure := refusal(options)) is not None and str(failure) not in seen:
                seen.add(str(failure))
                options |= dict(REMEDY.findall(str(failure))[:1])
            assert failure is None, (one, option, value, str(failure))


@pytest.mark.parametrize("task", ["gsm8k", "creative_writing"])
def test_continue_needs_thoughts_of_one_template(task: str) -> None:
    refused = refusal({"task": task, "prompts": "papers", "generator": "continue"})
    assert isinstance(refused, OptionError)
    assert re.search(
        r"writes one message, but a thought of \w+ has 2 templates .*: choose prompts='chat', or", str(refused)
    )
    assert refusal({"task": task, "prompts": "chat", "generator": "continue"}) is None
    assert refusal({"task": task, "prompts": "papers", "generator": "continue", "search": "cot"}) is None
