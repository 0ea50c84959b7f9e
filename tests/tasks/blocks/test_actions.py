"""Blocksworld's actions: their effects and how texts are parsed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tot.tasks.blocks import Action, Facts, apply, legal_actions, parse_action

WORDS = ("pick", "up", "put", "down", "stack", "unstack", "a", "the", "block", "on", "from", "table", "(", ")", ",")


def test_every_action_matches_the_domain_definition(
    reachable: Callable[..., list[Facts]], start_of: Callable[..., Facts], simulate: Callable[..., set[str] | None]
) -> None:
    actions = [
        *(Action(name, (x,)) for name in ("pick-up", "put-down") for x in "abc"),
        *(Action(name, (x, y)) for name in ("stack", "unstack") for x, y in itertools.permutations("abc", 2)),
    ]
    states = reachable(start_of("abc"))
    assert len(states) == 13 + 9  # 13 with an empty hand; 3 held times 3 arrangements of the others
    for facts in states:
        legal = []
        for action in actions:
            expected = simulate({" ".join(fact) for fact in facts}, action.pddl)
            after = apply(facts, action)
            assert (after and {" ".join(fact) for fact in after}) == expected
            legal += [action.pddl] if after else []
        assert sorted(legal) == sorted(action.pddl for action in legal_actions(facts))


def test_legal_actions_have_a_fixed_order(three: Any) -> None:
    assert [action.text for action in legal_actions(three.init)] == ["unstack b from a", "pick up c"]
    held = apply(three.init, Action("unstack", ("b", "a")))
    assert held is not None
    assert [action.pddl for action in legal_actions(held)] == ["(put-down b)", "(stack b a)", "(stack b c)"]


@pytest.mark.parametrize(
    ("text", "pddl"),
    [
        ("(pick-up a)", "(pick-up a)"),
        ("pick up a", "(pick-up a)"),
        ("Pick up the block A.", "(pick-up a)"),
        ("pick up the red block", "(pick-up red)"),
        ("pick up a block", "(pick-up a)"),
        ("pick up a block b", "(pick-up b)"),
        ("pick b up from the table", "(pick-up b)"),
        ("PICKUP b", "(pick-up b)"),
        ("put down a", "(put-down a)"),
        ("put the b block down on the table.", "(put-down b)"),
        ("put block b on the table", "(put-down b)"),
        (" (put-down b1) ", "(put-down b1)"),
        ("stack a on b", "(stack a b)"),
        ("stack the a block on top of the b block!", "(stack a b)"),
        ("**stack b onto a**", "(stack b a)"),
        ("(stack a, b)", "(stack a b)"),
        ("stack a b", "(stack a b)"),
        ("unstack b from c", "(unstack b c)"),
        ("Unstack Block B from on top of the C Block", "(unstack b c)"),
        ("unstack b off c", "(unstack b c)"),
        ("( UNSTACK   b\tc )", "(unstack b c)"),
        ("", None),
        ("pick up", None),
        ("pick up a and b", None),
        ("pick up the table", None),
        ("stack a", None),
        ("stack a on", None),
        ("stack a under b", None),
        ("stack a on b on c", None),
        ("unstack b c d", None),
        ("unstack a on b", None),
        ("(pick-up a b)", None),
        ("put a", None),
        ("move a", None),
        ("pick up é", None),
        ("I think we should pick up a", None),
    ],
)
def test_actions_are_parsed_in_words_and_in_pddl(text: str, pddl: str | None) -> None:
    action = parse_action(text)
    assert (action and action.pddl) == pddl


@given(st.text() | st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_a_parsed_action_parses_back_to_itself(text: str) -> None:
    action = parse_action(text)
    if action:
        assert parse_action(action.pddl) == parse_action(action.text) == action
