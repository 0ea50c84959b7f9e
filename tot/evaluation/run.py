"""evaluate(): search many questions concurrently on one engine, and write each sample when it is finished.

Each search derives its seed from (seed, row, repeat), so results depend neither on the order nor on other searches.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from tot.config import SearchConfig
from tot.decoders.errors import OptionError, TotError
from tot.evaluation import fingerprint
from tot.evaluation.attempt import search_here
from tot.evaluation.config import EvaluationRun
from tot.evaluation.data import located
from tot.evaluation.folder import Folder
from tot.evaluation.progress import Progress
from tot.evaluation.questions import BadRow, Question, Questions
from tot.evaluation.results import Results, summarise
from tot.run import Run
from tot.running import run_to_end
from tot.task.task import Task


def evaluate(
    task: Task | type[Task] | str,
    data: str | Path | None = None,
    config: SearchConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    **options: Any,
) -> Results:
    """Search every question of a data set, score the answers, and write all results to a folder.

    A failed search is recorded with its error, and an invalid row is reported; neither stops the run.

    Args:
        task: A task, its class or its name.
        data: A local file, or `org/name:split` on the hub; by default the task's own data set.
        config: How to search; by default from `options`, as for `solve`. The budget applies to each search.
        out: The folder to write; by default a new folder in `runs/`.
        resume: Continue an interrupted run in `out`; if the folder doesn't exist, start a new run.
        **options: Fields of `SearchConfig` and `EvaluationOptions`. The latter are `limit` (rows), `offset`,
            `repeats`, `concurrency` (searches that share forward passes, 16 by default), and `executor="ray"` with
            `ray_address` and `replicas`.

    Raises:
        TotError: For errors that the caller can correct, such as resuming with another configuration.
    """
    evaluation = EvaluationRun.of({**options, "task": task, "data": data}, config)
    return run_evaluation(evaluation, results_folder(out, resume, evaluation), resume)


def results_folder(out: str | Path | None, resume: bool, evaluation: EvaluationRun) -> Path:
    """Return the folder to write: `out`, or a new folder in runs/ named after the task and the time."""
    if out is not None:
        return Path(out)
    if resume:
        raise OptionError("--resume needs the folder of the run to continue: name it with --out")
    readable = re.sub(r"[^\w-]+", "-", evaluation.name).strip("-")
    name = f"{readable}-{datetime.now():%Y%m%d-%H%M%S}"
    paths = (Path("runs") / (f"{name}-{number}" if number else name) for number in count())
    return next(path for path in paths if not path.exists())


def run_evaluation(evaluation: EvaluationRun, out: Path, resume: bool) -> Results:
    """Run an evaluation in the folder `out`. Ctrl-C stops the running searches, then raises KeyboardInterrupt."""
    options, task = evaluation.options, evaluation.task
    path = located(options.data)
    if local := path.is_file():
        options = options.model_copy(update={"data": str(path.resolve())})
    config = evaluation.config.exact()
    filters = config.filters_for(task)
    config = config.model_copy(update=filters["generate"])
    evaluation = replace(evaluation, config=config, options=options, filters=filters)
    questions = Questions(task, options.data, options.limit, options.offset)
    valid, bad = questions.survey()
    record = {
        **evaluation.used,
        "verdict": task.verdict,
        **fingerprint.hash_models(config.model.weights),
        **({"escalate_filters": filters["escalate"]} if "escalate" in filters else {}),
        "data_sha256": fingerprint.hash_path(path) if local else None,
        "versions": fingerprint.versions(),
    }
    with Folder(out, evaluation.to_json(), record, resume) as folder:
        left = max(valid * options.repeats - len(folder.done), 0)
        return _Session(evaluation, folder, questions, record, Progress(left)).run(left, bad)


@dataclass(eq=False)
class _Session:
    """One process's run of an evaluation in its folder: searches the questions that have no sample."""

    evaluation: EvaluationRun
    folder: Folder
    questions: Questions
    record: dict[str, Any]
    progress: Progress

    def run(self, left: int, bad: list[BadRow]) -> Results:
        folder, finished = self.folder, len(self.folder.done)
        total = left + finished
        folder.log(f"starts: {self.evaluation.name}, {total} samples, {finished} of them finished")
        began = time.monotonic()
        with self.progress:
            for change in folder.changed_versions:
                self.note(f"resumes with another version: {change}")
            for row in bad:
                self.note(f"{self.evaluation.options.data}, {row.place} {row.reason}")
            for sample in folder.samples:
                self.progress.recall(sample)
            try:
                if left:
                    run_to_end(self.search())
                results = replace(
                    summarise(folder.samples, len(bad)),
                    verdict=self.evaluation.task.verdict,
                    searched=left,
                    wall_seconds=time.monotonic() - began if left else None,
                    folder=folder.path,
                )
                folder.finish(results.to_json())
                folder.log(f"finished: score {results.score_text}")
            except (KeyboardInterrupt, asyncio.CancelledError) as interrupt:
                folder.log(f"interrupted with {len(folder.done)} of {total} samples")
                raise KeyboardInterrupt(*interrupt.args) from None
            except Exception as error:
                with suppress(TotError):  # the disk may have failed
                    folder.log(f"stopped with {len(folder.done)} of {total} samples: {error}")
                raise
        return results

    async def search(self) -> None:
        """Search the pending questions on the configured executor. Raises OptionError if Ray is needed but missing."""
        if self.evaluation.options.executor == "local":
            return await search_here(self.evaluation, self.pending(), self.finish, self.progress.running.add)
        if find_spec("ray") is None:
            raise OptionError("--executor ray needs Ray, which is not installed: pip install ray")
        from tot.evaluation.ray_executor import search_on_ray

        return await search_on_ray(self.evaluation, self.record, self.pending(), self.finish, self.note)

    def note(self, text: str) -> None:
        """Log a warning, and print it."""
        self.folder.log(text)
        self.progress.warn(text)

    def pending(self) -> Iterator[tuple[Question, int]]:
        for question in self.questions:
            for repeat in range(self.evaluation.options.repeats):
                if isinstance(question, Question) and (question.index, repeat) not in self.folder.done:
                    yield question, repeat

    def finish(self, sample: dict[str, Any], tree: dict[str, Any] | None, session: Run | None) -> None:
        """Write a finished sample and its tree."""
        self.folder.add(sample, tree)
        self.progress.finish(sample, session)
        if sample["error"] is not None:
            self.note(f"sample {sample['id']} failed: {sample['error']}")
