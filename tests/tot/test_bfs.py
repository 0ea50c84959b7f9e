"""Breadth-first search (SEED, Algorithm 1) over a scripted decoder: every tree and every call is worked out by hand.

Letters' prompts name the path they are about: "grow b/c", "value b/c", "answer b/c".
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from tot import BFS, Budget, Sample, Solution, State, Task, ThoughtTree, Value, solve
from tot.backends import Backend
from tot.decoders.budget import Meter
from tot.search.problem import Problem

TWO_LEVELS = {
    "grow": ["a", "b"],
    "value a": "3",
    "value b": "7",
    "grow b": ["c", "d"],
    "grow a": ["e", "f"],
    "value b/c": "2",
    "value b/d": "9",
    "value a/e": "9",
    "value a/f": "5",
    "answer b/d": "the end",
}


def grow(task: Any, decoder: Any, *, thoughts: int = 2, breadth: int = 2, depth: int = 3, **options: Any) -> Solution:
    search = BFS(thoughts=thoughts, breadth=breadth, depth=depth)
    return solve(task, "q", decoder=decoder, search=search, evaluator=Value(), **options)


def paths(tree: ThoughtTree) -> list[str]:
    """Every node's thoughts, in the order in which the nodes were added."""
    return ["/".join(thought.text for thought in tree.state(node).thoughts) for node in tree]


def values(tree: ThoughtTree) -> dict[str, float | None]:
    return {path: node.value for path, node in zip(paths(tree), tree, strict=True) if path}


# -- the algorithm ----------------------------------------------------------------------------------------------


def test_the_tree_the_order_of_calls_and_the_answer_are_those_of_algorithm_1(letters: Any, scripted: Any) -> None:
    decoder = scripted(TWO_LEVELS)
    solution = grow(letters, decoder)
    assert decoder.asked == [
        ["grow"],
        ["value a", "value b"],
        ["grow b", "grow a"],  # the better state first
        ["value b/c", "value b/d", "value a/e", "value a/f"],
        ["answer b/d"],
    ]
    assert paths(solution.tree) == ["", "a", "b", "b/c", "b/d", "a/e", "a/f"]
    assert values(solution.tree) == {"a": 3, "b": 7, "b/c": 2, "b/d": 9, "a/e": 9, "a/f": 5}
    assert [solution.tree.place(node) for node in solution.tree] == [
        "0",
        "0.0",
        "0.1",
        "0.1.0",
        "0.1.1",
        "0.0.0",
        "0.0.1",
    ]
    assert [node.depth for node in solution.tree] == [0, 1, 1, 2, 2, 2, 2]
    assert [path for path, node in zip(paths(solution.tree), solution.tree, strict=True) if node.chosen] == [
        "",
        "b",
        "b/d",
    ]
    assert (solution.answer, solution.value, solution.stopped) == ("the end", 9, None)


def test_all_thoughts_of_a_state_are_samples_of_one_request(letters: Any, scripted: Any) -> None:
    decoder = scripted(TWO_LEVELS)
    solution = grow(letters, decoder)
    assert [(request.purpose, request.sampling.n) for request in decoder.requests] == [
        ("generate", 2),
        *[("evaluate", 1)] * 2,
        *[("generate", 2)] * 2,
        *[("evaluate", 1)] * 4,
        ("answer", 1),
    ]
    assert solution.calls == 13
    assert solution.usage.new_tokens == 13 * 5


@pytest.mark.parametrize(
    ("breadth", "expanded"), [(1, ["b"]), (2, ["b", "a"]), (3, ["b", "a", "c"]), (4, ["b", "a", "c", "d"])]
)
def test_breadth_keeps_the_most_valuable_states_and_ties_go_to_the_first_come(
    letters: Any, scripted: Any, breadth: int, expanded: list[str]
) -> None:
    level = {"grow": ["a", "b", "c", "d"], "value a": "5", "value b": "8", "value c": "5", "value d": "5"}
    kept = {f"grow {path}": ["x", "y", "z", "w"] for path in "abcd"}
    decoder = scripted(level | kept | {f"value {path}/{end}": "4" for path in "abcd" for end in "xyzw"})
    solution = grow(letters, decoder, thoughts=4, breadth=breadth)
    assert decoder.asked[2] == [f"grow {path}" for path in expanded]
    assert decoder.asked[4] == ["answer b/x"]  # all leaves are worth the same: the first one
    assert len(solution.tree) == 1 + 4 + 4 * breadth


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_depth_t_grows_t_minus_1_levels_and_then_asks_for_one_answer(letters: Any, scripted: Any, depth: int) -> None:
    chain = "/".join("a" * (depth - 1))
    ever_a = {f"grow {'/'.join('a' * level)}".strip(): ["a"] for level in range(depth)}
    decoder = scripted(ever_a | {f"value {'/'.join('a' * level)}": "6" for level in range(1, depth)})
    solution = grow(letters, decoder, thoughts=1, breadth=1, depth=depth)
    purposes = [batch[0].purpose for batch in decoder.batches]
    assert purposes == ["generate", "evaluate"] * (depth - 1) + ["answer"]
    assert max(node.depth for node in solution.tree) == depth - 1
    assert solution.answer == f"answer {chain}".strip()
    assert solution.value == (6 if depth > 1 else None)


def test_the_tasks_own_depth_holds_where_the_search_gives_none(letters: Any, scripted: Any) -> None:
    decoder = scripted(TWO_LEVELS)
    solution = solve(letters, "q", decoder=decoder, search=BFS(thoughts=2, breadth=2), evaluator=Value())
    assert max(node.depth for node in solution.tree) == letters.depth - 1 == 2


@pytest.fixture
def final(letters: Any) -> type[Task]:
    """As Letters; a thought that ends in "!" needs no other after it."""

    class Final(letters):  # type: ignore[misc]
        def is_terminal(self, state: State) -> bool:
            return state.text.endswith("!")

    return Final


def test_a_terminal_state_stays_in_the_running_and_is_never_expanded(final: Any, scripted: Any) -> None:
    decoder = scripted(
        {
            "grow": ["a!", "b"],
            "value a!": "8",
            "value b": "6",
            "grow b": ["c", "d"],
            "value b/c": "9",
            "value b/d": "2",
            "grow b/c": ["e", "f"],
            "value b/c/e": "3",
            "value b/c/f": "1",
        }
    )
    solution = grow(final, decoder, depth=4)
    assert [batch for batch in decoder.asked if batch[0].startswith("grow")] == [["grow"], ["grow b"], ["grow b/c"]]
    assert decoder.asked[-1] == ["answer a!"]  # 8, kept for two levels, against 3 and 1
    assert [node.id for node in solution.tree if node.terminal] == [1]
    assert solution.value == 8


def test_a_terminal_state_can_be_pushed_out_by_better_ones(final: Any, scripted: Any) -> None:
    level_1 = {"grow": ["a!", "b"], "value a!": "7", "value b": "6"}
    level_2 = {"grow b": ["c", "d"], "value b/c": "9", "value b/d": "8", "answer b/c": "done"}
    decoder = scripted(level_1 | level_2)
    assert grow(final, decoder, depth=4).answer == "answer b/c/grow b/c"  # both of level 2 before it
    assert grow(final, decoder, depth=3).answer == "done"


def test_the_search_ends_where_all_kept_states_are_terminal(final: Any, scripted: Any) -> None:
    decoder = scripted({"grow": ["a!", "b!"], "value a!": "2", "value b!": "3"})
    solution = grow(final, decoder, depth=9)
    assert decoder.asked == [["grow"], ["value a!", "value b!"], ["answer b!"]]
    assert solution.stopped is None


# -- replies that can't be used, and those that come twice ------------------------------------------------------


def test_equal_thoughts_after_a_state_are_one_node_which_is_evaluated_once(letters: Any, scripted: Any) -> None:
    children = {
        "grow a": ["x", "y", "x"],
        "grow b": ["x", "x", "x"],
        "value a/x": "6",
        "value a/y": "1",
        "value b/x": "5",
    }
    decoder = scripted({"grow": ["a", "b", "a"], "value a": "7", "value b": "6"} | children)
    solution = grow(letters, decoder, thoughts=3, breadth=3)
    assert decoder.asked[1] == ["value a", "value b"]
    assert decoder.asked[3] == ["value a/x", "value a/y", "value b/x"]
    assert values(solution.tree) == {"a": 7, "b": 6, "a/x": 6, "a/y": 1, "b/x": 5}
    assert [node.merged for node in solution.tree] == [0, 1, 0, 1, 0, 2]
    assert [node.prior for node in solution.tree][1:] == pytest.approx([2 / 3, 1 / 3, 2 / 3, 1 / 3, 1])
    assert [node.new_tokens for node in solution.tree][1:4] == [15, 10, 15]  # two samples and a value; one and one
    assert sum(node.new_tokens for node in solution.tree) + 5 == solution.usage.new_tokens  # 5: the answer's


def test_a_state_met_again_at_another_level_is_not_evaluated_again(letters: Any, scripted: Any) -> None:
    last_only = type("LastOnly", (letters,), {"templates": letters.templates | {"value": "value {{ thought }}"}})
    table = {
        "grow": ["a", "b"],
        "grow a": ["b", "c"],
        "grow b": ["a", "b"],
        "value a": "3",
        "value b": "7",
        "value c": "1",
    }
    decoder = scripted(table)
    solution = grow(last_only, decoder)
    evaluated = [request.prompt[-1].content for request in decoder.requests if request.purpose == "evaluate"]
    assert evaluated == ["value a", "value b", "value c"]
    assert values(solution.tree) == {"a": 3, "b": 7, "b/a": 3, "b/b": 7, "a/b": 7, "a/c": 1}
    assert grow(last_only, decoder).value == 7
    assert sum(request.purpose == "evaluate" for request in decoder.requests) == 6  # once a problem, not once a process


def test_a_rejected_thought_is_dropped_and_counted(letters: Any, scripted: Any) -> None:
    decoder = scripted({"grow": ["  ", "b", "\n"], "value b": "4"})
    solution = grow(letters, decoder, thoughts=3, depth=2)
    assert values(solution.tree) == {"b": 4}
    assert solution.parse_failures == solution.tree.root.parse_failures == 2
    assert solution.stopped is None


def test_the_task_says_which_thoughts_are_rejected(letters: Any, scripted: Any) -> None:
    def parse_thought(self: Task, template: str, text: str) -> str | None:
        return text.upper() if template == "thought" and text != "b" else None

    shouting = type("Shouting", (letters,), {"parse_thought": parse_thought})
    solution = grow(shouting, scripted({"grow": ["a", "b"], "value A": "4"}), depth=2)
    assert values(solution.tree) == {"A": 4}
    assert solution.parse_failures == 1


@pytest.mark.parametrize("empty", [["", ""], ["\t", " "]])
def test_where_all_thoughts_are_rejected_the_search_ends_with_the_best_so_far(
    letters: Any, scripted: Any, empty: list[str]
) -> None:
    decoder = scripted({"grow": ["a", "b"], "value a": "3", "value b": "7", "grow b": empty, "answer b": "so far"})
    solution = grow(letters, decoder, breadth=1, depth=9)
    assert decoder.asked == [["grow"], ["value a", "value b"], ["grow b"], ["answer b"]]
    assert (solution.answer, solution.value, solution.parse_failures) == ("so far", 7, 2)


def test_where_not_even_one_thought_can_be_read_the_answer_is_asked_at_the_root(letters: Any, scripted: Any) -> None:
    decoder = scripted({"grow": ["", ""], "answer": "guess"})
    solution = grow(letters, decoder)
    assert decoder.asked == [["grow"], ["answer"]]
    assert (solution.answer, solution.value, len(solution.tree)) == ("guess", None, 1)


@pytest.mark.parametrize("reply", ["", "no idea", "eleven", "0", "11 of 12"])
def test_a_value_that_cannot_be_read_is_the_default_and_counted_and_never_the_end(
    letters: Any, scripted: Any, reply: str
) -> None:
    careful = type("Careful", (letters,), {"default_value": 2.5})
    decoder = scripted(TWO_LEVELS | {"value a": reply, "value b/d": reply})
    solution = grow(careful, decoder)
    assert values(solution.tree) == {"a": 2.5, "b": 7, "b/c": 2, "b/d": 2.5, "a/e": 9, "a/f": 5}
    assert solution.parse_failures == 2
    assert [node.parse_failures for node in solution.tree] == [0, 1, 0, 0, 1, 0, 0]
    assert (solution.answer, solution.stopped) == ("answer a/e", None)


# -- budgets ----------------------------------------------------------------------------------------------------


def test_a_budget_of_nodes_ends_growth_and_the_answer_is_asked_where_it_ended(letters: Any, scripted: Any) -> None:
    decoder = scripted(TWO_LEVELS)
    solution = grow(letters, decoder, budget=Budget(nodes=2))
    assert solution.stopped == "budget: nodes (2 of 2)"
    assert decoder.asked == [["grow"], ["value a", "value b"], ["answer b"]]  # thoughts that have grown are evaluated
    whole = scripted(TWO_LEVELS)
    assert grow(letters, whole, budget=Budget(nodes=3)).stopped is None  # a level that was begun is finished
    assert whole.asked[-1] == ["answer b/d"]


@pytest.mark.parametrize(
    ("budget", "stopped", "asked"),
    [
        ({"tokens": 9}, "tokens (10 of 9)", 1),
        ({"tokens": 20}, "tokens (20 of 20)", 2),
        ({"tokens": 21}, "tokens (40 of 21)", 3),
        ({"tokens": 60}, "tokens (60 of 60)", 4),
    ],
)
def test_a_spent_budget_ends_the_search_by_name_and_nothing_more_is_asked(
    letters: Any, scripted: Any, budget: dict[str, int], stopped: str, asked: int
) -> None:
    decoder = scripted(TWO_LEVELS)
    whole = scripted(TWO_LEVELS)
    grow(letters, whole)
    solution = grow(letters, decoder, budget=Budget(**budget))
    assert solution.stopped == f"budget: {stopped}"
    assert decoder.asked == whole.asked[:asked]


@pytest.mark.parametrize(
    ("tokens", "answer", "value"),
    [(10, None, None), (20, "b", 7.0), (40, "b", 7.0), (60, "b\nd", 9.0), (61, "the end", 9.0)],
)
def test_a_search_out_of_budget_answers_with_what_its_best_state_says(
    letters: Any, scripted: Any, tokens: int, answer: str | None, value: float | None
) -> None:
    solution = grow(letters, scripted(TWO_LEVELS), budget=Budget(tokens=tokens))
    assert (solution.answer, solution.value) == (answer, value)
    assert [node.value for node in solution.tree if node.chosen][-1] == value


def test_a_budget_that_the_answer_itself_uses_up_is_named_and_the_answer_kept(letters: Any, scripted: Any) -> None:
    solution = grow(letters, scripted(TWO_LEVELS), budget=Budget(tokens=65))
    assert (solution.answer, solution.stopped) == ("the end", "budget: tokens (65 of 65)")
    assert grow(letters, scripted(TWO_LEVELS), budget=Budget(tokens=66)).stopped is None


@pytest.mark.parametrize("limit", ["tokens", "forwards", "seconds", "nodes"])
def test_a_budget_of_nothing_asks_nothing(letters: Any, scripted: Any, limit: str) -> None:
    decoder = scripted(TWO_LEVELS)
    solution = grow(letters, decoder, budget=Budget(**{limit: 0}))
    assert decoder.batches == []
    assert solution.stopped is not None
    assert solution.stopped.startswith(f"budget: {limit} (")
    assert (solution.answer, solution.value, len(solution.tree), solution.calls) == (None, None, 1, 0)


def test_thoughts_that_a_budget_cut_short_are_dropped_but_are_no_parse_failures(letters: Any, scripted: Any) -> None:
    cut = scripted.completion("half a tho", "budget")
    solution = grow(letters, scripted({"grow": [cut, "b"], "value b": "4"}), depth=2)
    assert values(solution.tree) == {"b": 4}
    assert solution.parse_failures == 0


def test_states_whose_evaluations_were_all_cut_short_do_not_take_the_place_of_the_best(
    letters: Any, scripted: Any
) -> None:
    cut = dict.fromkeys(["value b/c", "value b/d", "value a/e", "value a/f"], scripted.completion("9", "budget"))
    solution = grow(letters, scripted(TWO_LEVELS | cut | {"answer b": "so far"}))
    assert (solution.answer, solution.value) == ("so far", 7)


def test_an_answer_that_a_budget_cut_short_is_not_taken_for_one(letters: Any, scripted: Any) -> None:
    cut = scripted.completion("the answer is not", "budget")
    assert grow(letters, scripted(TWO_LEVELS | {"answer b/d": cut})).answer == "b\nd"


# -- thoughts of several templates ------------------------------------------------------------------------------


class Steps(Task):
    """A thought is a sub-question and its sub-answer, as in GSM8K."""

    templates: ClassVar = {
        "ask": "ask {{ thoughts | map(attribute='ask') | join('/') }}",
        "tell": "tell {{ ask }}",
        "value": "value {{ thoughts[-1].ask }} {{ tell }}",
        "answer": "answer {{ thoughts | length }}",
    }
    thought = ("ask", "tell")
    depth = 2


def test_a_second_template_sees_what_the_first_one_gave(scripted: Any) -> None:
    told = {"tell why": "so", "tell how": "thus", "tell who": "we"}
    rated = {"value why so": "3", "value how thus": "8", "value who we": "5"}
    decoder = scripted({"ask": ["why", "how", "who"]} | told | rated)
    solution = grow(Steps, decoder, thoughts=3, depth=2)
    assert decoder.asked == [["ask"], list(told), list(rated), ["answer 1"]]
    assert [request.sampling.n for request in decoder.requests] == [3, 1, 1, 1, 1, 1, 1, 1]
    best = solution.tree.path(solution.tree[2])[-1]
    assert best.chosen
    assert best.thought is not None
    assert best.thought.parts == {"ask": "how", "tell": "thus"}
    assert best.new_tokens == 15  # both templates' and the evaluation's


def test_a_thought_rejected_at_its_first_template_is_not_asked_the_second(scripted: Any) -> None:
    rest = {"tell why": "so", "tell who": "we", "value why so": "3", "value who we": "8"}
    decoder = scripted({"ask": ["why", " ", "who"]} | rest)
    whole = scripted({"ask": ["why", "how", "who"]} | rest)
    solution = grow(Steps, decoder, thoughts=3, depth=2)
    grow(Steps, whole, thoughts=3, depth=2)
    assert decoder.asked[1] == ["tell why", "tell who"]
    assert [node.thought.parts["tell"] for node in solution.tree if node.thought] == ["so", "we"]
    assert solution.parse_failures == 1
    seeds = [request.sampling.seed for request in whole.batches[1]]
    assert [request.sampling.seed for request in decoder.batches[1]] == [seeds[0], seeds[2]]


def test_a_thought_rejected_at_its_second_template_is_dropped_and_counted_once(scripted: Any) -> None:
    decoder = scripted({"ask": ["why", "how"], "tell why": "", "tell how": "thus", "value how thus": "4"})
    solution = grow(Steps, decoder, depth=2)
    assert [node.value for node in solution.tree] == [None, 4]
    assert solution.parse_failures == 1


# -- sampling and seeds -----------------------------------------------------------------------------------------


def seeds(decoder: Any, purpose: str) -> dict[str, int]:
    return {r.prompt[-1].content: r.sampling.seed for r in decoder.requests if r.purpose == purpose}


def test_the_same_run_seed_makes_the_same_requests(letters: Any, scripted: Any) -> None:
    first, second = scripted(TWO_LEVELS), scripted(TWO_LEVELS)
    grow(letters, first, seed=3)
    grow(letters, second, seed=3)
    assert first.batches == second.batches


@pytest.mark.parametrize("other", [{"seed": 4}, {"problem_id": "17"}])
def test_another_run_seed_or_problem_makes_every_seed_another_one(letters: Any, scripted: Any, other: Any) -> None:
    first, second = scripted(TWO_LEVELS), scripted(TWO_LEVELS)
    grow(letters, first, **{"seed": 3} | other)
    grow(letters, second, seed=3)
    assert first.asked == second.asked
    assert not {r.sampling.seed for r in first.requests} & {r.sampling.seed for r in second.requests}


def test_every_call_of_a_search_has_a_seed_of_its_own(letters: Any, scripted: Any) -> None:
    decoder = scripted(TWO_LEVELS)
    grow(letters, decoder)
    assert len({request.sampling.seed for request in decoder.requests}) == len(decoder.requests) == 10


def test_a_thoughts_seed_depends_on_its_place_in_the_tree_even_where_prompts_are_equal(
    letters: Any, scripted: Any
) -> None:
    blind = type("Blind", (letters,), {"templates": letters.templates | {"thought": "grow"}})
    decoder = scripted({"grow": ["a", "b"], "value a": "5", "value b": "5"})
    grow(blind, decoder)
    first, second = decoder.batches[2]
    assert first.prompt == second.prompt
    assert first.sampling.seed != second.sampling.seed


def test_an_answers_seed_depends_on_the_place_it_is_asked_at(letters: Any, scripted: Any) -> None:
    at_d, at_e = scripted(TWO_LEVELS), scripted(TWO_LEVELS | {"value b/d": "1"})
    grow(letters, at_d)
    grow(letters, at_e)
    assert [decoder.asked[-1] for decoder in (at_d, at_e)] == [["answer b/d"], ["answer a/e"]]
    assert at_d.requests[-1].sampling.seed != at_e.requests[-1].sampling.seed


def test_an_evaluations_seed_depends_on_its_prompt_alone(letters: Any, scripted: Any) -> None:
    swapped = {"grow": ["b", "a"], "grow b": ["z", "d"]}  # the same states at other places, in another order
    first, second = scripted(TWO_LEVELS), scripted(TWO_LEVELS | swapped)
    grow(letters, first)
    grow(letters, second, breadth=1, depth=4, thoughts=2)
    common = seeds(first, "evaluate").keys() & seeds(second, "evaluate").keys()
    assert common == {"value a", "value b", "value b/d"}
    assert all(seeds(first, "evaluate")[prompt] == seeds(second, "evaluate")[prompt] for prompt in common)


def test_thoughts_are_sampled_and_values_and_answers_are_not(letters: Any, scripted: Any) -> None:
    decoder = scripted(TWO_LEVELS)
    grow(letters, decoder, generator=Sample(temperature=0.6))
    temperatures = {request.purpose: request.sampling.temperature for request in decoder.requests}
    assert temperatures == {"generate": 0.6, "evaluate": 0.0, "answer": 0.0}


def test_a_tasks_sampling_options_hold_and_max_tokens_caps_them(letters: Any, scripted: Any) -> None:
    options = {"thought": {"max_tokens": 50, "stop": ("\n",), "top_p": 0.9}, "answer": {"max_tokens": 7}}
    picky = type("Picky", (letters,), {"sampling": options})
    free, capped = scripted(TWO_LEVELS), scripted(TWO_LEVELS)
    grow(picky, free)
    grow(picky, capped, max_tokens=12)
    of = [{r.purpose: r.sampling for r in decoder.requests} for decoder in (free, capped)]
    assert [samplings["generate"].max_tokens for samplings in of] == [50, 12]
    assert [samplings["evaluate"].max_tokens for samplings in of] == [16, 12]
    assert [samplings["answer"].max_tokens for samplings in of] == [7, 7]
    assert all(s["generate"].stop == ("\n",) and s["generate"].top_p == 0.9 for s in of)


# -- the backend ------------------------------------------------------------------------------------------------


def test_requests_go_to_the_decoder_of_their_purpose(letters: Any, scripted: Any) -> None:
    grower, judge, speaker = scripted(TWO_LEVELS), scripted(TWO_LEVELS), scripted(TWO_LEVELS)
    backend = Backend({"generate": grower, "evaluate": judge, "answer": speaker})
    problem = Problem(letters(), "q", backend, BFS(thoughts=2, breadth=2, depth=3), Sample(), Value(), Meter())

    async def run() -> str | None:
        await problem.run()
        return await problem.answer()

    assert asyncio.run(run()) == "the end"
    for decoder, purpose, count in ((grower, "generate", 3), (judge, "evaluate", 6), (speaker, "answer", 1)):
        assert [request.purpose for request in decoder.requests] == [purpose] * count
    assert problem.meter.usage.new_tokens == problem.meter.new_tokens == 65


def test_a_watcher_sees_the_tree_grow(letters: Any, scripted: Any) -> None:
    sizes: list[int] = []
    grow(letters, scripted(TWO_LEVELS), watch=lambda problem: sizes.append(len(problem.tree)))
    assert sizes == [1, 3, 3, 7, 7]


def test_what_a_decoder_raises_ends_the_search_as_it_is(letters: Any, scripted: Any) -> None:
    class Broken(scripted):  # type: ignore[misc]
        def generate(self, requests: Any) -> Any:
            if requests[0].purpose == "evaluate":
                raise ConnectionError("the server is gone")
            return super().generate(requests)

    with pytest.raises(ConnectionError, match="the server is gone"):
        grow(letters, Broken(TWO_LEVELS))
