"""PrintedAnswers: tasks whose template `program` asks for a Python program that prints the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from tot.task.task import Task
from tot.tasks.code import SANDBOX
from tot.tasks.programs import program_in
from tot.tree.thought import Observation, State, Thought


class PrintedAnswers(Task):
    """Run programs in a sandbox, and read answers from their output (Program of Thoughts, Chen et al., 2023)."""

    programs: Collection[str] = ("program",)

    async def act(self, state: State, thought: Thought) -> Observation | None:
        """Run a program; its output has the answer."""
        if "program" not in thought.parts:
            return None
        run = await SANDBOX.arun(program_in(thought.parts["program"]))
        if run.ok:
            output = run.output.strip()
            return Observation(text=output, data=await asyncio.to_thread(self.parse_output, output))
        error = run.error.strip() or f"The program can't be run to its end ({run.ended})."
        return Observation(text=error.splitlines()[-1])

    def parse_output(self, output: str) -> Any | None:
        """Return the answer in the output of a program; None without one."""
        return self.parse_answer(output)

    def answer_at(self, state: State) -> Any | None:
        """Return the result of the program in the last thought; None if there is no program."""
        result = state.thoughts[-1].observation if state.thoughts else None
        return None if result is None or "program" not in state.thoughts[-1].parts else result.data
