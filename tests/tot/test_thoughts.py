"""Thought generators: sampling with votes, lists in one reply, and legal actions ranked by likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from tot import BFS, Enumerate, Prior, Propose, Random, Sample, Solution, State, Task, Thought, Value, solve
from tot.decoders import Request, TaskError
from tot.decoders.request import ChoiceLogprob

ONE_LEVEL = BFS(thoughts=None, breadth=9, depth=2)
PATH = "{{ thoughts | map(attribute='thought') | join('/') }}"


def grow(task: Any, decoder: Any, generator: Any, search: Any = ONE_LEVEL, **options: Any) -> Solution:
    return solve(task, "q", decoder=decoder, search=search, generator=generator, evaluator=Random(), **options)


def thoughts(solution: Solution) -> list[str]:
    """Return the texts after the root, in order of arrival."""
    return [node.thought.text for node in solution.tree if node.thought]


def generations(decoder: Any) -> list[Request]:
    return [request for request in decoder.requests if request.purpose == "generate"]


# -- Sample -----------------------------------------------------------------------------------------------------


def test_the_n_of_the_generator_is_the_default(letters: Any, scripted: Any) -> None:
    decoder = scripted({"grow": ["a", "b", "c", "d"]})
    solution = grow(letters, decoder, Sample(thoughts=4))
    assert [request.sampling.n for request in generations(decoder)] == [4]
    assert thoughts(solution) == ["a", "b", "c", "d"]
    assert [node.prior for node in solution.tree] == [None, 0.25, 0.25, 0.25, 0.25]
    assert [node.confidence for node in solution.tree] == [None] * 5
    fewer = scripted({"grow": ["a", "b"]})
    grow(letters, fewer, Sample(thoughts=4), BFS(thoughts=2, depth=2))
    assert [request.sampling.n for request in generations(fewer)] == [2]


def test_votes_keep_the_most_frequent_text_of_each_thought_and_its_share(letters: Any, scripted: Any) -> None:
    decoder = scripted({"grow": ["a", "b", "b", "c", "c", "c"]})
    solution = grow(letters, decoder, Sample(thoughts=2, samples=3))
    assert [request.sampling.n for request in generations(decoder)] == [6]
    assert thoughts(solution) == ["b", "c"]
    assert [node.confidence for node in solution.tree][1:] == pytest.approx([2 / 3, 1])
    assert [node.prior for node in solution.tree][1:] == [0.5, 0.5]
    assert [node.new_tokens for node in solution.tree][1:] == [15, 15]


@pytest.fixture
def numeric(letters: Any) -> type[Task]:
    """Letters with answers: the digits of a text."""

    class Numeric(letters):  # type: ignore[misc]
        def parse_answer(self, text: str) -> str | None:
            return "".join(filter(str.isdigit, text)) or None

    return Numeric


@pytest.mark.parametrize(
    ("samples", "thought", "confidence"),
    [
        (["5", "it is 7", "so 7"], "it is 7", 2 / 3),
        (["5", "7", "9"], "5", 1 / 3),
        (["who knows", "no idea", "it is 7"], "it is 7", 1 / 3),  # a text without an answer has no vote
        (["", "7", "7"], "7", 2 / 3),
    ],
)
def test_votes_are_for_answers_and_the_first_text_of_the_winner_is_the_thought(
    numeric: Any, scripted: Any, samples: list[str], thought: str, confidence: float
) -> None:
    solution = grow(numeric, scripted({"grow": samples}), Sample(thoughts=1, samples=3))
    assert thoughts(solution) == [thought]
    assert solution.tree[1].confidence == pytest.approx(confidence)
    assert solution.parse_failures == samples.count("")


def test_a_sample_cut_off_by_a_budget_has_no_vote(letters: Any, scripted: Any) -> None:
    cut = scripted.completion("a", "budget")
    solution = grow(letters, scripted({"grow": [cut, cut, "b"]}), Sample(thoughts=1, samples=3))
    assert thoughts(solution) == ["b"]
    assert solution.parse_failures == 0


class Steps(Task):
    """A thought is a sub-question and its sub-answer."""

    templates: ClassVar = {"ask": "ask", "tell": "tell {{ ask }}", "propose": "list {{ count }}", "answer": "answer"}
    thought = ("ask", "tell")
    depth = 2


def test_only_the_last_template_is_sampled_for_votes(scripted: Any) -> None:
    second_replies = {"tell why": ["so", "thus", "thus"], "tell how": ["well", "well", "well"]}
    decoder = scripted({"ask": ["why", "how"]} | second_replies)
    solution = grow(Steps, decoder, Sample(thoughts=2, samples=3))
    assert [(request.prompt[-1].content, request.sampling.n) for request in generations(decoder)] == [
        ("ask", 2),
        ("tell why", 3),
        ("tell how", 3),
    ]
    assert [node.thought.parts for node in solution.tree if node.thought] == [
        {"ask": "why", "tell": "thus"},
        {"ask": "how", "tell": "well"},
    ]
    assert [node.confidence for node in solution.tree][1:] == pytest.approx([2 / 3, 1])


def test_every_thought_of_a_level_has_its_own_seed(scripted: Any) -> None:
    decoder = scripted({"ask": ["why", "how"], "tell why": "so", "tell how": "thus"})
    grow(Steps, decoder, Sample(thoughts=2))
    assert len({request.sampling.seed for request in generations(decoder)}) == 3


# -- Propose ----------------------------------------------------------------------------------------------------


@pytest.fixture
def listing(letters: Any) -> type[Task]:
    """Letters with a template that asks for several thoughts."""
    templates = {**letters.templates, "propose": f"list {{{{ count }}}} {PATH}"}
    return type("Listing", (letters,), {"templates": templates})


def test_one_reply_lists_the_thoughts_of_a_state(listing: Any, scripted: Any) -> None:
    decoder = scripted({"list 3": "1. a\n2. b", "list 3 a": "c", "list 3 b": "d"})
    solution = grow(listing, decoder, Propose(temperature=0.4), BFS(thoughts=3, breadth=2, depth=3))
    prompts = [(request.prompt[-1].content, request.sampling.n) for request in generations(decoder)]
    assert prompts[0] == ("list 3", 1)
    assert sorted(prompts[1:]) == [("list 3 a", 1), ("list 3 b", 1)]
    assert {request.sampling.temperature for request in generations(decoder)} == {0.4}
    assert len({request.sampling.seed for request in generations(decoder)}) == 3
    assert sorted(thoughts(solution)) == ["a", "b", "c", "d"]
    assert [node.prior for node in solution.tree] == [None, 0.5, 0.5, 1, 1]
    assert solution.tree.root.new_tokens == 5  # the call belongs to the state, not to a thought
    assert [node.new_tokens for node in solution.tree if node.depth == 2] == [0, 0]


@pytest.mark.parametrize(
    ("reply", "listed"),
    [
        ("1. a\n2) b\n(3) c", ["a", "b", "c"]),
        ("- a\n* b\n• c", ["a", "b", "c"]),
        ("10: a\n\n  \n 11. b", ["a", "b"]),
        ("2 apples\n3.5 pears\n4+1", ["2 apples", "3.5 pears", "4+1"]),  # not list numbers
        ("a\nb\na\n", ["a", "b"]),
        ("a\nb\nc\nd\ne", ["a", "b", "c"]),
        ("", []),
        ("\n \n", []),
    ],
)
def test_a_reply_is_parsed_line_by_line(listing: Any, scripted: Any, reply: str, listed: list[str]) -> None:
    solution = grow(listing, scripted({"list 3": reply}), Propose(thoughts=3))
    assert thoughts(solution) == listed
    assert [node.prior for node in solution.tree][1:] == pytest.approx([1 / max(len(listed), 1)] * len(listed))
    assert solution.parse_failures == solution.tree.root.parse_failures == (not listed)


@pytest.mark.parametrize(
    ("reason", "reply", "listed"),
    [
        ("length", "1. a\n2. b\n3. c and th", ["a", "b"]),
        ("length", "1. a and th", ["a and th"]),  # better than nothing
        ("length", "a\nb\nc\nd\ne and th", ["a", "b", "c"]),
        ("stop", "1. a\n2. b\n3. c", ["a", "b", "c"]),
        ("budget", "1. a\n2. b\n3. c", []),
        ("cancelled", "1. a\n2. b", []),
    ],
)
def test_a_truncated_line_is_dropped(listing: Any, scripted: Any, reason: str, reply: str, listed: list[str]) -> None:
    solution = grow(listing, scripted({"list 3": scripted.completion(reply, reason)}), Propose(thoughts=3))
    assert thoughts(solution) == listed
    assert solution.parse_failures == 0


def test_rejected_lines_are_counted(listing: Any, scripted: Any) -> None:
    def parse_thought(self: Task, template: str, text: str) -> str | None:
        return text.upper() if len(text) == 1 else None

    task = type("Short", (listing,), {"parse_thought": parse_thought})
    solution = grow(task, scripted({"list 4": "a\nlong\nb\nlonger"}), Propose(thoughts=4))
    assert thoughts(solution) == ["A", "B"]
    assert [node.prior for node in solution.tree][1:] == [0.5, 0.5]
    assert solution.parse_failures == 2


def test_remaining_templates_of_listed_thoughts_are_one_batch(scripted: Any) -> None:
    decoder = scripted({"list 2": "- why\n- how", "tell why": "so", "tell how": "thus"})
    solution = grow(Steps, decoder, Propose(thoughts=2))
    assert decoder.prompts[:2] == [["list 2"], ["tell why", "tell how"]]
    assert [node.thought.parts for node in solution.tree if node.thought] == [
        {"ask": "why", "tell": "so"},
        {"ask": "how", "tell": "thus"},
    ]
    assert [node.new_tokens for node in solution.tree] == [5, 5, 5]


# -- Enumerate --------------------------------------------------------------------------------------------------


class Walk(Task):
    """Steps on the number line: the world is the current position."""

    templates: ClassVar = {"thought": f"at {PATH}", "answer": f"answer {PATH}"}
    depth = 2
    moves: ClassVar[tuple[str, ...]] = ("left", "right", "stay")

    def start(self, question: str) -> State:
        return State(question=question, world=0)

    def actions(self, state: State) -> tuple[str, ...]:
        return self.moves

    def step(self, state: State, thought: Thought) -> State:
        assert isinstance(state.world, int)
        return state.then(thought, state.world + {"left": -1, "right": 1}.get(thought.text, len(thought.text) + 1))


@pytest.fixture
def walk() -> Callable[..., type[Task]]:
    """Walk with these moves: walk("left", "right")."""
    return lambda *moves, **fields: type("Walk", (Walk,), {"moves": moves or Walk.moves, **fields})


@pytest.fixture
def weighed(scripted: Any) -> Callable[..., Any]:
    """A decoder with these likelihoods of the actions at the root: weighed(0.1, 0.3)."""

    def make(*likelihoods: float) -> Any:
        scores = tuple(ChoiceLogprob(math.log(p) if p else -math.inf, 2) for p in likelihoods)
        return scripted({"at": scripted.completion("", "stop", 3, choice_logprobs=scores)})

    return make


def priors(solution: Solution) -> dict[str, float | None]:
    return {node.thought.text: node.prior for node in solution.tree if node.thought}


def test_priors_are_normalized_likelihoods_of_the_actions_in_descending_order(walk: Any, weighed: Any) -> None:
    decoder = weighed(0.02, 0.05, 0.03)
    solution = grow(walk(), decoder, Enumerate())
    assert thoughts(solution) == ["right", "stay", "left"]
    assert priors(solution) == pytest.approx({"right": 0.5, "stay": 0.3, "left": 0.2})
    assert [node.world for node in solution.tree] == [0, 1, 5, -1]
    assert [len(request.choices) for request in decoder.requests if request.choices] == [3]
    assert solution.tree.root.new_tokens == 3  # the tokens count at the state
    assert {node.decoder for node in solution.tree if node.thought} == {type(decoder).__name__}


@pytest.mark.parametrize(
    ("template", "space"), [("at", ""), ("{% block user %}u{% endblock %}{% block assistant %}at{% endblock %}", " ")]
)
def test_an_action_is_scored_as_a_line_of_the_models_text(walk: Any, weighed: Any, template: str, space: str) -> None:
    decoder = weighed(0.1, 0.3, 0.6)
    grow(walk(templates=Walk.templates | {"thought": template}), decoder, Enumerate())
    (request,) = generations(decoder)
    assert request.choices == (f"{space}left\n", f"{space}right\n", f"{space}stay\n")
    assert not request.close_choices


@pytest.mark.parametrize(("n", "best"), [(1, ["right"]), (2, ["right", "stay"]), (7, ["right", "stay", "left"])])
def test_the_best_n_actions_keep_their_priors_among_all(walk: Any, weighed: Any, n: int, best: list[str]) -> None:
    by_generator = grow(walk(), weighed(0.02, 0.05, 0.03), Enumerate(thoughts=n))
    by_search = grow(walk(), weighed(0.02, 0.05, 0.03), Enumerate(), BFS(thoughts=n, depth=2))
    assert thoughts(by_generator) == thoughts(by_search) == best
    assert by_generator.tree[1].prior == pytest.approx(0.5)


@pytest.mark.parametrize("likelihood", [0.25, 0.0])
def test_ties_keep_the_order_of_the_task(walk: Any, weighed: Any, likelihood: float) -> None:
    solution = grow(walk("stay", "right", "left"), weighed(*[likelihood] * 3), Enumerate())
    assert thoughts(solution) == ["stay", "right", "left"]
    assert list(priors(solution).values()) == pytest.approx([1 / 3] * 3)


def test_a_single_action_needs_no_request(walk: Any, weighed: Any) -> None:
    decoder = weighed(0.5)
    solution = grow(walk("right"), decoder, Enumerate())
    assert generations(decoder) == []
    assert priors(solution) == {"right": 1.0}
    assert solution.tree[1].decoder is None


@pytest.mark.parametrize("prior", ["model", "uniform", "random"])
def test_without_actions_there_is_no_request_and_no_thought(walk: Any, scripted: Any, prior: Any) -> None:
    decoder = scripted({})
    nowhere = walk(actions=lambda self, state: [])
    assert len(grow(nowhere, decoder, Enumerate(prior=prior)).tree) == 1
    assert generations(decoder) == []


def test_uniform_priors_keep_the_order_of_the_task_and_need_no_model(walk: Any) -> None:
    solution = grow_without_a_model(walk(), "uniform")
    assert thoughts(solution) == ["left", "right", "stay"]
    assert list(priors(solution).values()) == pytest.approx([1 / 3] * 3)


def grow_without_a_model(task: Any, prior: Any, seed: int = 0) -> Solution:
    generator = Enumerate(prior=prior)
    return solve(task, "q", model=None, search=ONE_LEVEL, generator=generator, evaluator=Prior(), seed=seed)


def test_random_priors_depend_on_the_seed_and_need_no_model(walk: Any) -> None:
    solutions = [grow_without_a_model(walk(), "random", seed) for seed in range(8)]
    assert all(sum(node.prior or 0 for node in solution.tree) == pytest.approx(1) for solution in solutions)
    assert all(
        thoughts(solution) == sorted(priors(solution), key=lambda text: -(priors(solution)[text] or 0))
        for solution in solutions
    )
    assert priors(solutions[3]) == priors(grow_without_a_model(walk(), "random", 3))
    assert len({str(sorted(priors(solution).items())) for solution in solutions}) == 8
    assert len({thoughts(solution)[0] for solution in solutions}) > 1


def test_scores_equal_those_of_single_requests(walk: Any, tiny: Any) -> None:
    task = walk("left", "right", "right now", "left on")
    with tiny() as decoder:
        solution = grow(task, decoder, Enumerate(), max_tokens=2)
        prompt = task().prompt("thought", solution.tree.state(solution.tree.root))
        alone = {
            move: decoder.generate([Request(prompt=prompt, choices=(f"{move}\n",))])[0].choice_logprobs[0].total
            for move in task.moves
        }
    weights = {move: math.exp(total - max(alone.values())) for move, total in alone.items()}
    expected = {move: weight / sum(weights.values()) for move, weight in weights.items()}
    assert priors(solution) == pytest.approx(expected, abs=1e-5)
    assert thoughts(solution) == sorted(task.moves, key=lambda move: -expected[move])
    assert max(expected.values()) > 1.1 * min(expected.values())
    assert solution.tree.root.new_tokens == 0


def test_remaining_templates_are_asked_for_each_action(scripted: Any) -> None:
    task = type("Both", (Steps,), {"actions": lambda self, state: ["why", "how"]})
    scores = (ChoiceLogprob(math.log(0.2), 1), ChoiceLogprob(math.log(0.6), 1))
    reply = scripted.completion("", "stop", 0, choice_logprobs=scores)
    decoder = scripted({"ask": reply, "tell why": "so", "tell how": "thus"})
    solution = grow(task, decoder, Enumerate())
    assert decoder.prompts[1] == ["tell how", "tell why"]
    assert [(node.thought.text, node.prior) for node in solution.tree if node.thought] == [
        ("how\nthus", pytest.approx(0.75)),
        ("why\nso", pytest.approx(0.25)),
    ]


def test_a_task_without_actions_is_rejected_with_a_remedy(letters: Any, scripted: Any) -> None:
    with pytest.raises(TaskError, match=r"task Letters has no `actions` to enumerate: define it, or sample thoughts"):
        grow(letters, scripted({}), Enumerate())


@pytest.mark.parametrize("generator", [Sample(), Propose()])
def test_a_missing_template_of_a_generator_is_named(generator: Any, scripted: Any) -> None:
    with pytest.raises(TaskError, match=r"task Bare has no template 'thought': define it"):
        grow(type("Bare", (Task,), {}), scripted({}), generator)


@pytest.mark.parametrize("generator", [Propose(), Enumerate(prior="uniform")])
def test_generators_without_votes_give_no_confidence(listing: Any, scripted: Any, generator: Any) -> None:
    task = type("Either", (listing,), {"actions": lambda self, state: ["a", "b"]})
    solution = grow(task, scripted({"list 3": "a\nb"}), generator)
    assert [node.confidence for node in solution.tree] == [None] * 3


def test_value_prompts_differ_after_each_generator(listing: Any, scripted: Any) -> None:
    decoder = scripted({"list 3": "a\nb", "value a": "2", "value b": "6"})
    solution = solve(listing, "q", decoder=decoder, search=ONE_LEVEL, generator=Propose(thoughts=3), evaluator=Value())
    assert [node.value for node in solution.tree] == [None, 2, 6]
