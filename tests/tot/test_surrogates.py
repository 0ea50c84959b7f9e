"""Half of a surrogate pair, which tokenizers, servers and files do not take, stops nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tot import ThoughtTree, solve
from tot.decoders import Message, Request

HALF = "half \ud835 a letter"


def test_a_thought_with_half_a_pair_is_saved_and_read_back(letters: Any, scripted: Any, tmp_path: Path) -> None:
    decoder = scripted({"grow": [HALF, HALF], f"answer {HALF}": "end"})
    solution = solve(letters, "q", decoder=decoder, search="bfs:thoughts=2,depth=2", evaluator="random")
    solution.tree.save(tmp_path / "run.json")
    assert [node.thought.text for node in ThoughtTree.load(tmp_path / "run.json") if node.thought] == [HALF]
    solution.tree.report(tmp_path / "run.html")
    (tmp_path / "run.html").read_text(encoding="utf-8")


def test_a_prompt_has_a_question_mark_for_it() -> None:
    assert Message(role="user", content=HALF).content == "half ? a letter"
    assert Request(prompt=HALF).prompt == "half ? a letter"
