"""An OpenEvolve worker: evolves programs with a model behind `tot serve`. It reads one JSON command per line on stdin.

The first command names the problem and the model, and starts the server. Each other command is one evolution.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from openevolve import OpenEvolve, __version__  # type: ignore[import-not-found,import-untyped,unused-ignore]
from openevolve.config import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    Config,
    DatabaseConfig,
    EvaluatorConfig,
    LLMConfig,
    LLMModelConfig,
    PromptConfig,
)

from tot.tasks.optimize import Optimize

FAILED = -1e9
"""The score of a program that fails; OpenEvolve needs a number."""
EVALUATOR = """
from pathlib import Path
from openevolve.evaluation_result import EvaluationResult
from tot.tasks.optimize import Optimize

task = Optimize(folder=Path({folder!r}), minimize={minimize!r})


def evaluate(path):
    scored = task.scorer.score(Path(path).read_text())
    value = task.value_of(scored)
    if value is None:
        value = {failed!r}
    return EvaluationResult(metrics={{"combined_score": value}}, artifacts={{"output": scored.text}})
"""


def start_server(model: str) -> str:
    """Start `tot serve`, which ends with this process, and return its address."""
    command = [sys.executable, "-m", "tot.cli.app", "serve", "--model", model, "--port", "0"]
    process = subprocess.Popen(command, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    lines = []
    for line in process.stderr or ():
        lines.append(line)
        if found := re.search(r" is served at (http://\S+)/v1$", line.strip()):
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop the server
            return found[1]
    raise RuntimeError(f"tot serve did not start: {' '.join(lines)}")


def configuration(load: dict[str, Any], address: str, seed: int, description: str) -> Config:
    """Return OpenEvolve's configuration: its defaults, except for the model, the description and whole programs."""
    with urllib.request.urlopen(f"{address}/v1/models") as reply:
        name = json.load(reply)["data"][0]["id"]
    server: dict[str, Any] = {"api_base": f"{address}/v1", "api_key": "none", "timeout": 600}
    return Config(
        log_level="ERROR",
        random_seed=seed,
        max_iterations=load["iterations"],
        diff_based_evolution=load["diffs"],
        llm=LLMConfig(**server, max_tokens=1024, models=[LLMModelConfig(name=name, **server)]),
        prompt=PromptConfig(system_message=f"{description}\n\nUse only Python's standard library."),
        database=DatabaseConfig(log_prompts=False),
        evaluator=EvaluatorConfig(parallel_evaluations=load["parallel"], cascade_evaluation=False),
    )


def new_tokens(address: str) -> int:
    """Return the number of tokens that the server has sampled."""
    with urllib.request.urlopen(f"{address}/metrics") as reply:
        found = re.search(r"^tot_completion_tokens_total (\S+)$", reply.read().decode(), re.MULTILINE)
    return round(float(found[1])) if found else 0


async def evolve(load: dict[str, Any], address: str, seed: int) -> dict[str, Any]:
    """Evolve until the iterations or the seconds end. Return the best program."""
    folder = Path(load["folder"])
    task = Optimize(folder=folder, minimize=load["minimize"])
    before = new_tokens(address)
    with tempfile.TemporaryDirectory() as out:
        evaluator = Path(out) / "evaluator.py"
        evaluator.write_text(EVALUATOR.format(folder=str(folder), minimize=load["minimize"], failed=FAILED))
        config = configuration(load, address, seed, task.example())
        running = OpenEvolve(str(folder / "start.py"), str(evaluator), config, output_dir=out)
        began = time.perf_counter()
        with suppress(TimeoutError):
            await asyncio.wait_for(running.run(), load["seconds"])
        seconds = time.perf_counter() - began
        best = running.database.get_best_program()
    scores = [program.metrics.get("combined_score", FAILED) for program in running.database.programs.values()]
    return {
        "seconds": seconds,
        "program": best.code if best is not None else None,
        "thoughts": len(scores) - 1,
        "failed": sum(score <= FAILED for score in scores),
        "tokens": new_tokens(address) - before,
    }


def serve(replies: Any) -> None:
    load = json.loads(sys.stdin.readline())
    address = start_server(load["model"])
    replies({"about": f"OpenEvolve {__version__}"})
    for line in sys.stdin:
        try:
            replies(asyncio.run(evolve(load, address, json.loads(line)["seed"])))
        except (RuntimeError, OSError) as error:
            replies({"error": str(error)})


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep library output out of the replies
    serve(lambda reply: out.write(json.dumps(reply) + "\n"))
