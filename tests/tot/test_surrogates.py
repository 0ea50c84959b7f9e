"""Lone surrogates, which tokenizers, servers and files reject, are replaced without an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tot import Checkpoint, ThoughtTree, evaluate, solve
from tot.decoders import Message, Request

HALF = "half \ud835 a letter"


def test_a_thought_with_a_lone_surrogate_round_trips(letters: Any, scripted: Any, tmp_path: Path) -> None:
    decoder = scripted({"grow": [HALF, HALF], f"answer {HALF}": "end"})
    solution = solve(letters, "q", decoder=decoder, search="bfs:thoughts=2,depth=2", evaluator="random")
    solution.tree.save(tmp_path / "run.json")
    assert [node.thought.text for node in ThoughtTree.load(tmp_path / "run.json") if node.thought] == [HALF]
    solution.tree.report(tmp_path / "run.html")
    (tmp_path / "run.html").read_text(encoding="utf-8")


def test_a_lone_surrogate_in_a_prompt_becomes_a_question_mark() -> None:
    assert Message(role="user", content=HALF).content == "half ? a letter"
    assert Request(prompt=HALF).prompt == "half ? a letter"


def test_a_lone_surrogate_in_a_question_becomes_a_question_mark(letters: Any) -> None:
    assert letters().start(HALF).question == "half ? a letter"


def test_a_checkpoint_keeps_a_lone_surrogate(letters: Any, scripted: Any, tmp_path: Path) -> None:
    def run(checkpoint: Checkpoint) -> str:
        decoder = scripted({"grow": [HALF, HALF], "answer half ? a letter": HALF})
        how = {"search": "bfs:thoughts=2,depth=2", "evaluator": "random", "checkpoint": checkpoint}
        return str(solve(letters, "q", decoder=decoder, **how).answer)

    first = run(Checkpoint.create(tmp_path / "run.jsonl"))
    assert run(Checkpoint.resume(tmp_path / "run.jsonl")) == first == HALF


def test_an_evaluation_writes_a_lone_surrogate(letters: Any, scripted: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a \\ud835", "answer": "\\udc00"}\n')
    decoder = scripted({"grow": [HALF, HALF], "answer half ? a letter": HALF})
    how = {"search": "bfs:thoughts=2,depth=2", "evaluator": "random", "decoder": decoder}
    results = evaluate(letters, tmp_path / "rows.jsonl", out=tmp_path / "out", **how)
    assert (results.samples, results.errors) == (1, 0)
    sample = json.loads((tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8"))
    assert (sample["question"], sample["reference"], sample["answer"]) == ("a ?", "?", HALF)
    (tmp_path / "out" / "trees" / "0-0.json").read_text(encoding="utf-8")
