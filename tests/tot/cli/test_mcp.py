"""`tot mcp`: the SDK's client over standard input and output."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

SLOW = """
import asyncio, pathlib
from tot import Task
from tot.tree.thought import Observation

class Slow(Task):
    templates = {"thought": "{{ question }}"}
    depth = 2

    def actions(self, state):
        return ["wait"]

    def answer_at(self, state):
        return state.question if state.thoughts else None

    async def act(self, before, thought):
        try:
            await asyncio.sleep(0 if before.question == "fast" else 600)
        except asyncio.CancelledError:
            pathlib.Path("cancelled").touch()
            raise
        return Observation(text="waited")
"""
UNGUIDED = ["--model", "none", "--generator", "enumerate:prior=uniform", "--evaluator", "random"]


@pytest.fixture
def served(tmp_path: Path) -> Callable[..., Any]:
    """Run a coroutine with a client of `tot mcp ARGUMENTS`, started in the test's folder."""
    mcp = pytest.importorskip("mcp")

    def run(work: Callable[[Any], Awaitable[Any]], *arguments: str) -> Any:
        environment = {name: os.environ[name] for name in ("PYTHONPATH", "TOT_CACHE") if name in os.environ}
        server = mcp.StdioServerParameters(
            command=sys.executable,
            args=["-m", "tot.cli.app", "mcp", *arguments],
            cwd=tmp_path,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )

        async def main() -> Any:
            async with mcp.Client(mcp.stdio_client(server)) as client:
                return await work(client)

        return anyio.run(main)

    return run


def test_solve_returns_the_answer_with_growing_progress(served: Any) -> None:
    sent: list[float] = []

    async def work(client: Any) -> Any:
        async def progress(thoughts: float, total: float | None, message: str | None) -> None:
            sent.append(thoughts)

        (tool,) = (await client.list_tools()).tools
        question = {"question": "4 9 10 13", "task": "game24"}
        return tool, await client.call_tool("solve", question, progress_callback=progress)

    tool, reply = served(work, "game24", *UNGUIDED, "--search", "bfs:thoughts=40,breadth=2000")
    assert tool.name == "solve"
    assert tool.input_schema["required"] == ["question"]
    assert tool.input_schema["properties"]["task"]["default"] == "game24"
    found = reply.structured_content
    assert not reply.is_error
    assert (found["certainty"], found["solved"]) == (1.0, True)
    assert eval(found["answer"]) == 24
    assert sent[0] == 0
    assert sent == sorted(set(sent))
    assert sent[-1] == found["thoughts"] > 0
    assert found["seconds"] > 0


def test_errors_of_a_search_and_unknown_tasks_are_tool_errors(served: Any, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("raise SystemExit('it ran')")

    async def work(client: Any) -> list[Any]:
        asked: list[dict[str, Any]] = [{"question": "4 9 x"}, {"question": " "}, {"question": 4}, {}]
        asked += [{"question": "1 1 4 8", "task": "other.py:Other"}]
        return [await client.call_tool("solve", one) for one in asked]

    replies = served(work, "game24", *UNGUIDED)
    assert all(reply.is_error and reply.structured_content is None for reply in replies)
    number, empty, not_text, missing, other = [reply.content[0].text for reply in replies]
    assert number.startswith("Error executing tool solve: 'x' in the puzzle '4 9 x' is not a nonnegative number")
    assert empty.endswith("the question is empty: give some text")
    assert "valid string" in not_text
    assert "Field required" in missing
    assert "Input should be 'game24', 'ask', " in other


def test_cancelling_a_call_cancels_its_search_and_the_server_continues(served: Any, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)

    async def work(client: Any) -> Any:
        with anyio.CancelScope() as scope:

            async def cancel(*_: Any) -> None:
                scope.cancel()

            await client.call_tool("solve", {"question": "slow"}, progress_callback=cancel)
        assert scope.cancelled_caught
        with anyio.fail_after(60):
            while not (tmp_path / "cancelled").exists():
                await anyio.sleep(0.01)
        return await client.call_tool("solve", {"question": "fast"})

    found = served(work, "slow.py:Slow", *UNGUIDED).structured_content
    assert (found["answer"], found["solved"], found["thoughts"]) == ("fast", False, 1)


@pytest.mark.real
def test_the_smallest_model_answers_any_question(served: Any, smollm2: str) -> None:
    async def work(client: Any) -> Any:
        return await client.call_tool("solve", {"question": "What is the capital of France?"})

    reply = served(work, "--model", smollm2, "--max-tokens", "20")
    assert not reply.is_error
    assert reply.structured_content["answer"]
    assert reply.structured_content["certainty"] is None


def test_without_its_sdk_or_model_the_command_is_refused(
    tot: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp")
    assert refused(tot("mcp", "--model", "gpt")).startswith("unknown model 'gpt': choose one of smollm2-135m")
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert refused(tot("mcp")) == "tot mcp needs mcp: pip install mcp"


def test_a_task_of_null_is_the_default_task_and_the_server_has_a_version(served: Any) -> None:
    async def work(client: Any) -> Any:
        return client.server_info.version, await client.call_tool("solve", {"question": "4 9 10 13", "task": None})

    version, reply = served(work, "game24", *UNGUIDED, "--search", "bfs:thoughts=40,breadth=2000")
    assert version.count(".") >= 1
    assert (reply.is_error, reply.structured_content["solved"]) == (False, True)
