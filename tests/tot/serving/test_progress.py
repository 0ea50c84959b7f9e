"""Progress of a running search: its leading answer, how sure it is, and the seconds left of its budget."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tot import BFS, ChainOfThought, SelfConsistency, Task, Value, solve
from tot.api import run_search
from tot.config import SearchConfig
from tot.decoders import Budget, Meter
from tot.run import Run
from tot.running import run_to_end
from tot.search.calibration import Calibration, Source, to_json
from tot.serving.live import LiveSearch, leading


class Last(Task):
    """The answer is the last word of a text, if it is a number."""

    templates: ClassVar = {"chain": "solve", "thought": "grow", "value": "value {{ thought }}"}
    depth = 2

    def parse_answer(self, text: str) -> str | None:
        word = (text.split() or [""])[-1]
        return word if word.isdigit() else None

    def answer_at(self, state: Any) -> str | None:
        return self.parse_answer(state.text)


def leaders(decoder: Any, search: Any, task: Any = Last, **options: Any) -> list[tuple[str, str] | None]:
    """Return the leading answer after each step."""
    seen = []

    def watch(session: Run) -> None:
        seen.append(leading(session))

    config = SearchConfig.of(None, {"decoder": decoder, "search": search, **options})
    run_to_end(run_search(task, "q", config, watch=watch))
    return seen


def test_the_leader_of_a_vote_has_its_certainty(scripted: Any, tmp_path: Path) -> None:
    chain = Source(weight=2, others=1, tokens=5)
    own = Calibration(task="last", model=None, questions=50, none=0, sources={"chain": chain}, gains=(0.1,))
    (tmp_path / "c.json").write_text(json.dumps(to_json([own])))
    options: dict[str, Any] = {"search": SelfConsistency(samples=4), "calibration": str(tmp_path / "c.json")}
    replies = {"solve": ["a 7", "b 7", "c none", "d 8"]}
    first, *_, last = leaders(scripted(replies), **options)
    assert first is None
    assert last is not None
    assert last[0] == "7"
    solution = solve(Last, "q", SearchConfig.of(None, options), decoder=scripted(replies))
    assert last[1] == f"{solution.certainty:.0%} sure" == "50% sure"


def test_the_leader_has_its_share_of_weights_if_its_certainty_is_not_known(scripted: Any) -> None:
    replies = {"grow": ["7", "8", "8 8"], "value 7": "6", "value 8": "2", "value 8 8": "2"}
    search = BFS(thoughts=3, breadth=3, depth=2, aggregate="vote")
    seen = leaders(scripted(replies), search, evaluator=Value())
    assert seen == [None, ("8", "67% of votes"), ("7", "60% of votes")]  # before and after the evaluation


def test_one_answer_and_a_best_state_have_no_share(scripted: Any) -> None:
    assert leaders(scripted({"solve": "it is 7"}), ChainOfThought()) == [None, ("7", "")]
    replies = {"grow": ["7", "8"], "value 7": "2", "value 8": "3"}
    best = leaders(scripted(replies), BFS(thoughts=2, breadth=2, depth=2), evaluator=Value())
    assert best[-1] == ("8", "")


def test_a_verified_answer_has_the_verdict_of_its_task(scripted: Any) -> None:
    class Checked(Last):
        verdict = "examples pass"

        def verify(self, question: str, answer: Any) -> bool:
            return bool(answer == "8")

    seen = leaders(scripted({"solve": ["7", "7", "8"]}), SelfConsistency(samples=3), Checked)
    assert seen[-1] == ("8", "examples pass")


def test_progress_follows_the_search_and_survives_a_failing_task(scripted: Any) -> None:
    class Unreliable(Last):
        fails = False

        def parse_answer(self, text: str) -> str | None:
            if self.fails:
                raise ValueError("no answer")
            return super().parse_answer(text)

    task = Unreliable()

    async def follow() -> None:
        replies = {"solve": ["7", "8", "7"]}
        config = SearchConfig.of(None, {"decoder": scripted(replies), "search": SelfConsistency(samples=3)})
        await run_search(task, "q", config, watch=progress.watch)
        async with asyncio.timeout(30):
            while progress.leading is None:
                await asyncio.sleep(0.01)
        assert progress.run is not None
        assert progress.leading[0] == "7"
        task.fails = True
        progress.watch(progress.run)
        async with asyncio.timeout(30):
            while progress.leading is not None:
                await asyncio.sleep(0.01)

    progress = LiveSearch()
    asyncio.run(follow())


def test_the_first_limit_of_a_budget_sets_the_seconds_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(after: float, **budget: Any) -> float | None:
        meter = Meter(Budget(**budget))
        meter.count(new_tokens=50, nodes=4)
        monkeypatch.setattr(Meter, "seconds", after)
        result = meter.seconds_left
        monkeypatch.undo()
        return result

    assert left(10.0) is None
    assert left(10.0, forwards=5) is None  # no forward pass yet
    assert left(10.0, seconds=30) == 20
    assert left(10.0, seconds=30, tokens=100) == 10
    assert left(10.0, seconds=30, nodes=5) == 2.5
    assert left(40.0, seconds=30) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_leader_and_the_thoughts_and_clears_them(
    tot: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["7\x1b]0;x\x07", "7\x1b]0;x\x07", "or 8."]
    decoder = scripted(SimpleNamespace(get=lambda prompt, default: texts))
    monkeypatch.setattr("tot.decoders.engine.open_models.shared_engines", lambda *_, **__: nullcontext([None]))
    monkeypatch.setattr("tot.llm.decoders.load_decoder", lambda *_, **__: nullcontext(decoder))
    monkeypatch.setattr("tot.llm.decoders.has_chat_template", lambda _: False)
    monkeypatch.setattr("tot.serving.live._PAUSE", 0)  # a slow first vote does not delay the last one
    arguments = ("solve", "ask", "How many?", "--search", "self-consistency:samples=3", "--budget-seconds", "900")
    status, _, err = tot(*arguments)
    assert (status, err) == (0, "")
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    assert tot(*arguments)[0] == 0
    lines = terminal.getvalue()
    assert lines.endswith("\r" + "\x1b[1A\x1b[2K" * 5)  # leader, progress and three thoughts are cleared
    assert "\x07" not in lines
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", lines)
    assert re.search(
        r"7�]0;x� \(67% of votes\)\nlevel 1, 3 thoughts, 15 tokens, \d+ tokens/s, \d s, \d{3} s left *\n", text
    )
    assert "or 8. (33% of votes)" in text
