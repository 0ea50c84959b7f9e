"""An OpenEvolve worker: evolves programs with a model behind `tot serve`. It reads one JSON command per line on stdin.

The first command names the problem and the model, and starts the server. Each other command is one evolution.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import openevolve  # type: ignore[import-not-found,import-untyped,unused-ignore]
from openevolve import config as of  # type: ignore[import-not-found,import-untyped,unused-ignore]
from openevolve import process_parallel
from openevolve.evaluation_result import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    EvaluationResult,
)

from tot.tasks.optimize import Optimize

EVALUATOR = """
from pathlib import Path
from benchmarks.workers.openevolve_worker import Evaluator

evaluator = Evaluator(Path({folder!r}), {minimize!r}, Path({log!r}))


def evaluate(path):
    return evaluator.evaluate(Path(path))
"""


class Evaluator:
    """Rates the programs in a process of OpenEvolve, with the problem's scorer."""

    def __init__(self, folder: Path, minimize: bool, log: Path) -> None:
        self.task = Optimize(folder=folder, minimize=minimize, repeats=1)
        self._start = self.task.value_of(self.task.scorer.score((folder / "start.py").read_text("utf-8")))
        self._log = log

    def evaluate(self, path: Path) -> EvaluationResult:
        """Return the fitness and the scorer's output. The log gets a letter for each program that works."""
        scored = self.task.scorer.score(path.read_text("utf-8"))
        value = self.task.value_of(scored)
        if value is not None:
            with self._log.open("a") as log:
                log.write("x")
        output = scored.text if scored.score is None else f"Score: {scored.score:.6g}\n{scored.text}"
        return EvaluationResult(metrics={"combined_score": self.fitness(value)}, artifacts={"output": output})

    def fitness(self, value: float | None) -> float:
        """Return a positive number that grows with the value: 1 for the start, 0 for a program that fails.

        OpenEvolve draws parents by fitness, and treats all negative numbers alike.
        """
        if value is None:
            return 0.0
        start = self._start or 0.0
        return math.exp(max(-50.0, min((value - start) / (abs(start) or 1.0), 50.0)))


class Evolution(openevolve.OpenEvolve):  # type: ignore[misc,unused-ignore]
    """An evolution whose seconds begin when all of its processes run."""

    def __init__(self, address: str, limit: float | None, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self._address, self._limit = address, limit
        self.counted: dict[str, Any] = {}
        """The seconds, the new tokens, and the replies whose programs were rated or refused."""

    async def _run_evolution_with_checkpoints(self, *options: Any) -> None:
        controller, processes = self.parallel_controller, self.config.evaluator.parallel_evaluations
        ready: set[int] = set()
        while len(ready) < processes:
            ready |= set(controller.executor.map(prepared, range(processes)))
        before, began = new_tokens(self._address), time.perf_counter()
        if self._limit is not None:
            asyncio.get_running_loop().call_later(self._limit, controller.request_shutdown)
        await super()._run_evolution_with_checkpoints(*options)
        self.counted = {"seconds": time.perf_counter() - began, "thoughts": controller.completed_iterations}
        self.counted["tokens"] = new_tokens(self._address) - before


def prepared(_: int) -> int:
    """Load the evaluator of a process of OpenEvolve, and return the process's id."""
    process_parallel._lazy_init_worker_components()
    time.sleep(0.1)  # long enough for the other processes to take a task
    return os.getpid()


def start_server(model: str) -> str:
    """Start `tot serve`, which ends with this process, and return its address."""
    command = [sys.executable, "-m", "tot.cli.app", "serve", "--model", model, "--port", "0", "--no-prefix-cache"]
    process = subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    lines = []
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r" is served at (http://\S+)/v1$", line.strip()):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the server
            return found[1]
    raise RuntimeError(f"tot serve did not start: {' '.join(lines)}")


def configuration(load: dict[str, Any], address: str, seed: int, description: str) -> Any:
    """Return OpenEvolve's configuration: its example function_minimization's for small models, with whole programs."""
    with urllib.request.urlopen(f"{address}/v1/models") as reply:
        name = json.load(reply)["data"][0]["id"]
    server: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": "none", "timeout": 600}
    sampling = {"temperature": 0.7, "top_p": 0.95, "max_tokens": 1024}
    better = "lower" if load["minimize"] else "higher"
    system = f"{description}\n\nThe {better} the score, the higher the fitness. Use only Python's standard library."
    return of.Config(
        log_level="ERROR",
        random_seed=seed,
        max_iterations=load["iterations"],
        diff_based_evolution=False,
        llm=of.LLMConfig(**server, **sampling, models=[of.LLMModelConfig(name=name, **server)]),
        prompt=of.PromptConfig(system_message=system),
        database=of.DatabaseConfig(
            population_size=50, archive_size=20, num_islands=3, elite_selection_ratio=0.2, log_prompts=False
        ),
        evaluator=of.EvaluatorConfig(parallel_evaluations=load["parallel"], cascade_evaluation=False),
    )


def new_tokens(address: str) -> int:
    """Return the number of tokens that the server has sampled."""
    with urllib.request.urlopen(f"{address}/metrics") as reply:
        found = re.search(r"^tot_completion_tokens_total (\S+)$", reply.read().decode(), re.MULTILINE)
    return round(float(found[1])) if found else 0


async def evolve(load: dict[str, Any], address: str, seed: int) -> dict[str, Any]:
    """Evolve until the iterations or the seconds end. Return the best program."""
    folder = Path(load["folder"])
    with tempfile.TemporaryDirectory() as out:
        evaluator, log = Path(out) / "evaluator.py", Path(out) / "working"
        evaluator.write_text(EVALUATOR.format(folder=str(folder), minimize=load["minimize"], log=str(log)))
        config = configuration(load, address, seed, Optimize(folder=folder).example())
        start = str(folder / "start.py")
        running = Evolution(address, load["seconds"], start, str(evaluator), config, output_dir=out)
        await running.run()
        best = running.database.get_best_program()
        working = len(log.read_text()) - 1  # without the start
    failed = max(0, running.counted["thoughts"] - working)
    return {"program": best.code if best is not None else None, "failed": failed, **running.counted}


def serve(replies: Any) -> None:
    load = json.loads(sys.stdin.readline())
    address = start_server(load["model"])
    replies({"about": f"OpenEvolve {openevolve.__version__}"})
    for line in sys.stdin:
        try:
            replies(asyncio.run(evolve(load, address, json.loads(line)["seed"])))
        except (RuntimeError, OSError) as error:
            replies({"error": str(error)})


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep library output out of the replies
    serve(lambda reply: out.write(json.dumps(reply) + "\n"))
