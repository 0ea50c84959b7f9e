"""evaluate(): search many questions concurrently on one engine, and write each sample when it is finished.

Each search derives its seed from (seed, row, repeat), so results depend neither on the order nor on other searches.
"""

from __future__ import annotations

import asyncio
import difflib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from tot.config import SearchConfig
from tot.decoders.errors import OptionError, TotError, describe, unknown
from tot.evaluation import fingerprint
from tot.evaluation.attempt import Finish, Pending, attempt, running
from tot.evaluation.data import located
from tot.evaluation.folder import Folder
from tot.evaluation.options import EvaluationOptions, EvaluationRun
from tot.evaluation.progress import Progress, Tracker, tracker
from tot.evaluation.questions import BadRow, Question, Questions
from tot.evaluation.results import Results, summarise
from tot.running import run_to_end
from tot.search.session import SearchSession, Watcher
from tot.task.task import Task


def evaluate(
    task: Task | type[Task] | str,
    data: str | Path | None = None,
    config: SearchConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    track: str | Tracker | None = None,
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
        track: "wandb" (Weights & Biases), "trackio" or a `Tracker` that receives the progress.
        **options: Fields of `SearchConfig` and `EvaluationOptions`. The latter are `limit` (rows), `offset`,
            `shuffle_seed`, `repeats`, `concurrency` (searches that share forward passes, 16 by default), and
            `executor="ray"` with `ray_address`, `replicas`, `gpus_per_replica` and `cpus_per_replica`.

    Raises:
        TotError: For errors that the caller can correct, such as resuming with another configuration.
    """
    fields = EvaluationOptions.model_fields
    own = {name: options.pop(name) for name in fields if name in options}
    for name in options.keys() - SearchConfig.names():  # an option of the decoder, or mistyped
        if difflib.get_close_matches(name, fields, n=1, cutoff=0.8):
            raise OptionError(unknown("option", name, {*fields, *SearchConfig.model_fields}))
    evaluation = EvaluationRun.of(task, SearchConfig.of(config, options), {**own, "data": data})
    return run_evaluation(evaluation, results_folder(out, resume, evaluation), resume, tracker(track))


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


def run_evaluation(evaluation: EvaluationRun, out: Path, resume: bool, tracker: Tracker | None) -> Results:
    """Run an evaluation in the folder `out`. Ctrl-C stops the running searches, then raises KeyboardInterrupt."""
    options, task = evaluation.options, evaluation.task
    path = located(options.data)
    if local := path.is_file():
        options = options.model_copy(update={"data": str(path.resolve())})
    config = evaluation.config.exact()
    filters = config.filters_for(task)
    config = config.model_copy(update=filters["generate"])
    evaluation = replace(evaluation, config=config, options=options, filters=filters)
    questions = Questions(task, options.data, options.limit, options.offset, options.shuffle_seed, evaluation.columns)
    valid, bad = questions.survey()
    record = {
        **evaluation.used,
        "verdict": task.verdict,
        **fingerprint.hash_models(config.weights),
        **({"escalate_filters": filters["escalate"]} if "escalate" in filters else {}),
        "data_sha256": fingerprint.hash_path(path) if local else None,
        "versions": fingerprint.versions(),
    }
    with Folder(out, evaluation.to_json(), record, resume) as folder:
        return _Session(evaluation, folder, questions, record, tracker).run(valid, bad)


async def search_here(evaluation: EvaluationRun, pending: Pending, finish: Finish, watch: Watcher) -> None:
    """Search all pending questions on one engine, with the configured concurrency.

    Calls `watch` with each search when it starts, and `finish` when it ends, in any order. On cancellation, stops the
    running searches. Raises TotError for problems that affect every question.
    """
    with ExitStack() as stack:
        decoders = await evaluation.config.aopen(stack)

        async def work() -> None:
            for question, repeat in pending:
                sample, session = await attempt(evaluation, question, repeat, decoders, watch)
                finish(sample, None if session is None else session.tree.to_json(), session)

        async with running(work() for _ in range(evaluation.options.concurrency)) as workers:
            await asyncio.gather(*workers)


@dataclass(eq=False)
class _Session:
    """One process's run of an evaluation in its folder."""

    evaluation: EvaluationRun
    folder: Folder
    questions: Questions
    record: dict[str, Any]
    tracker: Tracker | None
    progress: Progress = field(init=False)

    def run(self, questions: int, bad: Sequence[BadRow]) -> Results:
        folder, options = self.folder, self.evaluation.options
        total, finished = questions * options.repeats, len(folder.done)
        folder.log(f"starts: {self.evaluation.name}, {total} samples, {finished} of them finished")
        numbers: dict[str, float] = {}
        began = time.monotonic()
        self._introduce()
        with Progress(total - finished) as self.progress:
            try:
                self._recall(bad)
                if finished < total:
                    run_to_end(self._search())
                wall = time.monotonic() - began if finished < total else None
                results = summarise(folder.samples, len(bad))
                about: dict[str, Any] = {"verdict": self.evaluation.task.verdict, "searched": total - finished}
                results = replace(results, **about, folder=folder.path, wall_seconds=wall)
                folder.finish(results.to_json())
                folder.log(f"finished: score {results.score_text}")
                numbers = {"parse_failures": results.parse_failures.mean}
                numbers |= {} if results.score is None else {"score": results.score.mean}
            except (KeyboardInterrupt, asyncio.CancelledError) as interrupt:
                folder.log(f"interrupted with {len(folder.done)} of {total} samples")
                raise KeyboardInterrupt(*interrupt.args) from None
            except Exception as error:
                with suppress(TotError):  # the disk may have failed
                    folder.log(f"stopped with {len(folder.done)} of {total} samples: {error}")
                raise
            finally:
                self._track(lambda tracker: tracker.finish(numbers))
        return results

    async def _search(self) -> None:
        """Search the pending questions on the configured executor. Raises OptionError if Ray is needed but missing."""
        if self.evaluation.options.executor == "local":
            return await search_here(self.evaluation, self._pending(), self._finish, self.progress.running.add)
        if find_spec("ray") is None:
            raise OptionError("--executor ray needs Ray, which is not installed: pip install ray")
        from tot.evaluation.ray_executor import search_on_ray

        return await search_on_ray(self.evaluation, self.record, self._pending(), self._finish, self._note)

    def _recall(self, bad: Sequence[BadRow]) -> None:
        """Report changed versions and invalid rows, and count the samples of an earlier run."""
        for change in self.folder.changed_versions:
            self._note(f"resumes with another version: {change}")
        for row in bad:
            self._note(f"{self.evaluation.options.data}, {row.place} {row.reason}")
        for sample in self.folder.samples:
            self.progress.recall(sample)

    def _introduce(self) -> None:
        try:
            if self.tracker is not None:
                self.tracker.start(self.folder.path.name, self.evaluation.to_json())
        except Exception as error:  # third-party code may raise anything
            reason = describe(error)
            raise OptionError(f"the tracker can't start ({reason}): set it up, or leave --track out") from error

    def _track(self, event: Callable[[Tracker], None]) -> None:
        """Send an event to the tracker, and drop a tracker that fails. The folder has all results."""
        try:
            if self.tracker is not None:
                event(self.tracker)
        except Exception as error:  # third-party code may raise anything  # noqa: BLE001
            self.tracker = None
            self._note(f"the tracker failed and is disabled: {describe(error)}")

    def _note(self, text: str) -> None:
        self.folder.log(text)
        self.progress.warn(text)

    def _pending(self) -> Iterator[tuple[Question, int]]:
        for question in self.questions:
            for repeat in range(self.evaluation.options.repeats):
                if isinstance(question, Question) and (question.index, repeat) not in self.folder.done:
                    yield question, repeat

    def _finish(self, sample: dict[str, Any], tree: dict[str, Any] | None, session: SearchSession | None) -> None:
        self.folder.add(sample, tree)
        self.progress.finish(sample, session)
        if sample["error"] is not None:
            self._note(f"sample {sample['id']} failed: {sample['error']}")
        score = self.progress.score
        numbers = {"latency": sample["measured"]["seconds"], **({} if score is None else {"score": score})}
        self._track(lambda tracker: tracker.log(len(self.folder.done), numbers))
