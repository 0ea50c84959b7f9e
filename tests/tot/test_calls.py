"""Calls about a thought: recorded at its node, saved compactly, and loaded in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tot import BFS, Propose, State, Thought, ThoughtTree, Value, Vote, solve
from tot.decoders import Message, TaskError
from tot.decoders.request import Part
from tot.tree.calls import Call, calls_from_json, calls_to_json

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(["aaa", "aab", "aab\0🙂"])
parts = st.builds(
    Part, st.sampled_from(["exact", "approximate", "undecoded", "step", "trigger"]), texts, st.integers(0)
)
calls = st.builds(
    Call,
    purpose=st.sampled_from(["generate", "evaluate", "answer"]),
    template=texts,
    prompt=st.lists(st.builds(Message, role=st.sampled_from(["user", "assistant"]), content=texts)).map(tuple),
    output=texts,
    parts=st.lists(parts, max_size=2).map(tuple),
    choices=st.dictionaries(texts, st.floats(max_value=0, allow_nan=False), max_size=3),
)


def test_shared_prompt_parts_are_saved_once() -> None:
    examples = "Question: how many? Answer: 4.\n" * 200
    saved = {
        i: [Call(purpose="generate", template="t", prompt=(Message(role="user", content=f"{examples}{i}"),))]
        for i in range(100)
    }
    assert len(json.dumps(calls_to_json(saved))) < 3 * len(examples)
    assert calls_from_json(**calls_to_json(saved)) == saved


def test_every_sample_and_evaluation_is_recorded_at_its_node(letters: Any, scripted: Any) -> None:
    decoder = scripted({"grow": ["b", "a"], "value a": "3", "value b": "7", "grow b": ["c", "d"], "answer b/c": "!"})
    tree = solve(letters, "Q", decoder=decoder, search=BFS(thoughts=2, breadth=1), evaluator=Value()).tree
    at = {node.thought.text if node.thought else "": tree.calls.get(node.id, []) for node in tree}
    by_text = {
        text: [(call.purpose, call.prompt[-1].content, call.output) for call in some] for text, some in at.items()
    }
    assert by_text["a"] == [("generate", "grow", "a"), ("evaluate", "value a", "3")]
    assert by_text["b"] == [("generate", "grow", "b"), ("evaluate", "value b", "7")]
    assert by_text["c"] == [
        ("generate", "grow b", "c"),
        ("evaluate", "value b/c", "value b/c"),
        ("answer", "answer b/c", "!"),
    ]
    assert ThoughtTree.from_json(json.loads(json.dumps(tree.to_json()))).calls == tree.calls


def test_a_reply_with_several_thoughts_and_a_vote_are_recorded_once(letters: Any, scripted: Any) -> None:
    class Listed(letters):  # type: ignore[misc]
        templates = letters.templates | {"propose": "list {{ count }}", "vote": "best of {{ candidates | join(', ') }}"}
        depth = 2

    decoder = scripted({"list 2": "a\nb", "best of a, b": "1", "best of b, a": "1"})
    tree = solve(
        Listed, "Q", decoder=decoder, search=BFS(thoughts=2), generator=Propose(), evaluator=Vote(samples=3)
    ).tree
    assert [(call.template, call.output) for call in tree.calls[0]] == [("propose", "a\nb")]
    assert [call.template for call in tree.calls[1] if call.purpose == "evaluate"] == ["vote"] * 3
    assert not [call for call in tree.calls.get(2, []) if call.purpose == "evaluate"]


@pytest.mark.parametrize(
    "damage",
    [
        {"calls": {"9": [{"purpose": "generate", "template": "t", "prompt": []}]}},
        {"calls": {"x": []}},
        {"calls": [1]},
        {"calls": {"0": [{"purpose": "steal", "template": "t", "prompt": []}]}},
        {"calls": {"0": [{"purpose": "generate", "template": "t", "prompt": [["user", 5]]}]}, "texts": []},
        {"calls": {"0": [{"purpose": "generate", "template": "t", "prompt": [["user"]]}]}},
        {"calls": {"0": [3]}},
        {"texts": [3]},
        {"texts": [[0, 3]]},
    ],
)
def test_damaged_calls_are_rejected(tmp_path: Path, damage: dict[str, Any]) -> None:
    tree = ThoughtTree(State(question="q"))
    tree.add(tree.root, Thought(parts={"thought": "a"}))
    (tmp_path / "t.json").write_text(json.dumps(tree.to_json() | damage))
    with pytest.raises(TaskError, match=r"^the tree is damaged: "):
        ThoughtTree.load(tmp_path / "t.json")
