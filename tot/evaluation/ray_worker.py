"""A Ray actor: a process with an engine of its own, which searches the questions that it is sent, many at once.

It knows nothing of the others. Samples and trees leave it as JSON text, as they will be written.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tot.decoders.errors import ModelError, OptionError
from tot.evaluation import fingerprint
from tot.evaluation.attempt import attempt
from tot.evaluation.questions import Question
from tot.evaluation.work import Work


class Worker:
    """Unpickles its work and opens decoders once, when it is first asked to; again wherever it is started again."""

    def __init__(self, packed: bytes, model_sha256: str | None, folder: str) -> None:
        self._packed = packed
        self._model_sha256 = model_sha256
        self._folder = folder
        self._opening: asyncio.Task[None] | None = None
        self._stack = ExitStack()

    async def begin(self) -> str:
        """Where it runs; an answer means that it does."""
        import ray

        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"

    async def open(self) -> dict[str, str]:
        """Have the engine ready; the versions here. Raises TotError where it can't be, or where the model's name means
        other weights here."""
        if self._opening is None:
            self._opening = asyncio.create_task(asyncio.to_thread(self._open))
        await asyncio.shield(self._opening)
        return fingerprint.versions()

    def _open(self) -> None:
        if Path(self._folder).is_dir():  # relative paths mean the same here
            os.chdir(self._folder)
        try:
            self._work: Work = pickle.loads(self._packed)
        except (ImportError, AttributeError) as error:
            raise OptionError(f"a Ray worker can't load the task ({error}): install that on every node") from None
        work = self._work
        if (here := fingerprint.of_model(work.config.weights)) != self._model_sha256:
            raise ModelError(
                f"model {work.configuration.model} has the SHA-256 {str(here)[:16]} on a Ray worker, and "
                f"{str(self._model_sha256)[:16]} where the run was started: put the same files on every node"
            )
        self._decoders = work.config.open(self._stack)

    async def attempt(self, question: Question, repeat: int) -> tuple[str, str | None]:
        """A sample, and its tree, where there is one. Raises what `attempt` raises."""
        await self.open()
        sample, problem = await attempt(self._work, question, repeat, self._decoders)
        return json.dumps(sample, default=str), None if problem is None else json.dumps(problem.tree.to_json())


def unpacked(sample: str, tree: str | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `Worker.attempt` gave, as data."""
    return json.loads(sample), None if tree is None else json.loads(tree)
