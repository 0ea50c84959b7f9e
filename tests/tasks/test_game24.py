"""Game of 24: moves, prompts and answers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tot.decoders.errors import TaskError
from tot.tasks.arithmetic import evaluate
from tot.tasks.game24 import Game24
from tot.tree.thought import State, Thought

TASK = Game24()


def after(question: str, *moves: str) -> State:
    state = TASK.start(question)
    for move in moves:
        reached = TASK.step(state, Thought(parts={"move": move}))
        assert reached is not None, move
        state = reached
    return state


def solution_of(state: State) -> str | None:
    """Return an expression for 24 by exhaustive search, or None if the puzzle has no solution."""
    if TASK.is_terminal(state):
        return TASK.answer_at(state)
    reached = (TASK.step(state, Thought(parts={"move": move})) for move in TASK.actions(state))
    return next(filter(None, (solution_of(one) for one in reached if one is not None)), None)


# -- the question -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["4 9 10 13", "4, 9, 10, 13", "[4, 9, 10, 13]", "(4 9 10 13)", " 4\t9;10\n13 "])
def test_numbers_may_be_separated_by_commas_and_enclosed_in_brackets(text: str) -> None:
    state = TASK.start(text)
    assert state.question == "4 9 10 13"
    assert state.world == {"left": ["4", "9", "10", "13"], "terms": ["4", "9", "10", "13"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4 nine 10", "'nine' in the puzzle '4 nine 10' is not a nonnegative number: give whole numbers"),
        ("4 -9 10", "'-9' in the puzzle"),
        ("4 ٣ 10", "'٣' in the puzzle"),
        ("4 8/3", "'8/3' in the puzzle"),
        ("24", r"'24' has 1 numbers: give 2 to 6"),
        ("1 2 3 4 5 6 7", "has 7 numbers: give 2 to 6"),
        ("[]", "has 0 numbers"),
        ("  ", "the question is empty"),
        ("9" * 10_000, "is not a nonnegative number"),
    ],
)
def test_an_invalid_puzzle_error_names_the_value(text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message) as error:
        TASK.start(text)
    assert len(str(error.value)) < 300


# -- moves ------------------------------------------------------------------------------------------------------


def test_proposals_are_distinct_moves() -> None:
    reply = (
        " 4 + 9 = 13\n2. 13 - 9 = 4 (left: 4 4 10)\n3. nothing\n4. 4+9=13\n5. 10 - 4 = 6, 4 * 6 = 24\n6. 1 + 2 + 3 = 6"
    )
    assert TASK.parse_proposals(reply) == ["4 + 9 = 13", "13 - 9 = 4", "10 - 4 = 6", "4 * 6 = 24"]


def test_a_move_replaces_two_numbers_by_its_result() -> None:
    state = after("4 9 10 13", "13 - 9 = 4")
    assert state.world == {"left": ["4", "4", "10"], "terms": ["4", "(13 - 9)", "10"]}
    state = after("3 3 8 8", "8 / 3 = 8/3")
    assert state.world == {"left": ["8/3", "3", "8"], "terms": ["(8 / 3)", "3", "8"]}


@pytest.mark.parametrize(
    "move",
    [
        "13 - 9 = 5",  # wrong
        "13 - 8 = 5",  # 8 is missing
        "4 + 4 = 8",  # 4 occurs only once
        "10 / 4 = 2",  # not exact
        "10 / 4 = 2.5 (left: 24)",
        "nothing",
    ],
)
def test_a_wrong_move_is_rejected_and_the_models_list_of_numbers_is_ignored(move: str) -> None:
    state = TASK.start("4 9 10 13")
    reached = TASK.step(state, Thought(parts={"move": move}))
    if "24" in move:
        assert reached is not None
        assert TASK.key(reached) == ("5/2", "9", "13")
    else:
        assert reached is None


def test_every_action_is_legal_and_parses_to_itself() -> None:
    state = TASK.start("4 9 10 13")
    actions = TASK.actions(state)
    assert len(actions) == 36
    assert actions[:3] == ["4 + 9 = 13", "4 - 9 = -5", "9 - 4 = 5"]
    assert actions == TASK.actions(state)
    for action in actions:
        assert TASK.parse_thought("move", action) == action
        assert TASK.step(state, Thought(parts={"move": action})) is not None


def test_equal_numbers_and_results_give_one_action() -> None:
    assert TASK.actions(TASK.start("2 2")) == ["2 + 2 = 4", "2 - 2 = 0", "2 / 2 = 1"]
    assert TASK.actions(TASK.start("0 5")) == ["0 + 5 = 5", "0 - 5 = -5", "0 * 5 = 0"]  # and nothing is divided by 0
    assert TASK.actions(after("4 6", "4 * 6 = 24")) == []


def test_states_with_equal_numbers_left_have_the_same_key() -> None:
    one, other = after("2 2 5 6", "2 + 2 = 4"), after("2 2 5 6", "2 * 2 = 4")
    assert TASK.key(one) == TASK.key(other) == ("4", "5", "6")
    assert TASK.key(one) != TASK.key(after("2 2 5 6", "5 - 2 = 3"))


def test_a_path_of_actions_reaches_the_goal_and_its_answer_verifies() -> None:
    def search(state: State) -> State | None:
        if TASK.is_terminal(state):
            return state if TASK.is_goal(state) else None
        for action in TASK.actions(state):
            reached = TASK.step(state, Thought(parts={"move": action}))
            assert reached is not None
            assert TASK.heuristic(reached) <= TASK.heuristic(state)
            if answer := search(reached):
                return answer
        return None

    for question in ("4 9 10 13", "3 3 8 8", "1.5 2 8", "0.5 12", "1 5 5 5"):
        goal = search(TASK.start(question))
        assert goal is not None, question
        assert TASK.verify(question, TASK.answer_at(goal)), question
    assert search(TASK.start("1 1 1 1")) is None


def test_only_24_is_the_goal() -> None:
    start, goal = TASK.start("4 6"), after("4 6", "4 * 6 = 24")
    other = after("4 6", "4 + 6 = 10")
    assert [TASK.is_terminal(state) for state in (start, goal, other)] == [False, True, True]
    assert [TASK.is_goal(state) for state in (start, goal, other)] == [False, True, False]
    assert [TASK.heuristic(state) for state in (TASK.start("4 9 10 13"), start, goal, other)] == [3, 1, 0, 1]
    assert [TASK.answer_at(state) for state in (start, goal, other)] == [None, "4 * 6", None]


def test_a_state_without_a_world_is_rejected() -> None:
    with pytest.raises(TaskError, match=r"create it with start\(\)"):
        TASK.actions(State(question="4 6"))


# -- prompts ----------------------------------------------------------------------------------------------------


def test_equal_states_have_the_same_evaluation_prompt() -> None:
    states = after("2 2 5 6", "2 + 2 = 4"), after("2 2 5 6", "2 * 2 = 4")
    assert TASK.prompt("value", states[0]) == TASK.prompt("value", states[1])


def test_the_demonstrations_are_correct() -> None:
    demonstrations = TASK.prompts.data("demonstrations")
    for solution in demonstrations["solutions"]:
        state = TASK.start(solution["question"])
        for step in solution["steps"]:
            reached = TASK.step(state, Thought(parts={"move": step["move"]}))
            assert reached is not None
            state = reached
            assert step["left"] == TASK.variables(state)["left"]
        assert TASK.answer_at(state) is not None
        assert TASK.verify(solution["question"], solution["answer"])
    for proposal in demonstrations["proposals"]:
        for move in proposal["moves"]:
            assert TASK.step(TASK.start(proposal["left"]), Thought(parts={"move": move})) is not None
    for judged in demonstrations["judgements"]:
        expression = solution_of(TASK.start(judged["left"]))
        assert judged["label"] in TASK.labels
        assert judged["label"] == "likely" or (expression is not None) == (judged["label"] == "sure")
    for check in demonstrations["checks"]:
        assert evaluate(check["expression"]) == int(check["value"])
        assert (check["label"] == "sure") == (check["value"] == "24")


def test_latex_fractions_are_divisions() -> None:
    assert TASK.verify("3 3 8 8", TASK.parse_answer(r"Answer: \frac{8}{3 - \frac{8}{3}} = 24"))


def test_a_number_may_precede_a_parenthesis() -> None:
    assert Game24().parse_answer("2(3 + 4 + 5) = 24") == "2*(3 + 4 + 5)"


def test_a_repeated_number_is_used_twice_and_digits_are_not_joined() -> None:
    assert TASK.verify("4 4 4 4", "4 * 4 + 4 + 4")
    assert not TASK.verify("4 4 4 4", "4 * (4 + 4 / 2)")
    assert not TASK.verify("1 2 12 1", "12 + 12")
    assert TASK.verify("1.5 16", "1.5 * 16")
    assert not TASK.verify("3 2 16", "1.5 * 16")
    assert not TASK.verify("a b", "24 + 0")


def test_rows_of_the_data_set_are_puzzles_and_answers_are_scored_by_their_numbers(data: Path) -> None:
    with (data / "game24.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1362
    solved = 0
    for row in rows[::40]:
        question = TASK.question_of(row)
        assert TASK.start(question).question == row["Puzzles"]
        answer = solution_of(TASK.start(question))
        solved += TASK.score(answer, TASK.reference_of(row)) == 1
        assert TASK.score("1 + 23", TASK.reference_of(row)) == 0
    assert solved == len(rows[::40])
