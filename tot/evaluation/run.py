"""evaluate(): many questions searched at once on one engine, each sample written down as it is finished.

Every search has seeds of its own, from (seed, row, repeat), so results depend neither on the order nor on what else
was under way.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from tot.config import SearchConfig
from tot.decoders.errors import OptionError, TotError
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
    data: str | Path,
    config: SearchConfig | None = None,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    track: str | Tracker | None = None,
    **options: Any,
) -> Results:
    """Search every question of a data set, score the answers, and keep all of it in the folder `out`.

    `data` is a local file or `org/name:split` of the hub. `out` is by default a new folder in `runs/`; `resume` goes on
    with one that a kill, Ctrl-C or a full disk left, and begins where there is none. `track` tells Weights & Biases
    ("wandb"), trackio or an object of one's own.

    `options` are fields of `EvaluationOptions`: of the data `limit` (rows), `offset`, `shuffle_seed` and `repeats`;
    `concurrency`, so many searches (16) sharing forward passes; `executor="ray"` with `ray_address`, `replicas`,
    `gpus_per_replica` and `cpus_per_replica`. The others, or `config`, say how to search, as for `solve`; the budget is
    that of each search.

    A search that fails is recorded with its error, and a row that can't be read is reported; the others go on. Raises
    TotError for whatever the caller can put right: a resumed folder of another configuration, for one.
    """
    own = {name: options.pop(name) for name in EvaluationOptions.model_fields if name in options}
    evaluation = EvaluationRun.of(task, SearchConfig.of(config, options), {**own, "data": str(data)})
    return run_evaluation(evaluation, results_folder(out, resume, evaluation), resume, tracker(track))


def results_folder(out: str | Path | None, resume: bool, evaluation: EvaluationRun) -> Path:
    """The folder to write: the one named, or one in runs/ that isn't there, named for the task and the time."""
    if out is not None:
        return Path(out)
    if resume:
        raise OptionError("--resume goes on with a folder: name it by --out")
    readable = re.sub(r"[^\w-]+", "-", evaluation.name).strip("-")
    name = f"{readable}-{datetime.now():%Y%m%d-%H%M%S}"
    paths = (Path("runs") / (f"{name}-{number}" if number else name) for number in count())
    return next(path for path in paths if not path.exists())


def run_evaluation(evaluation: EvaluationRun, out: Path, resume: bool, told: Tracker | None) -> Results:
    """Do the work, in the folder `out`. Ctrl-C ends it with KeyboardInterrupt once what runs was stopped."""
    options, task = evaluation.options, evaluation.task
    place = located(options.data)
    if local := place.is_file():
        options = options.model_copy(update={"data": str(place.resolve())})
    config = evaluation.config.exact()
    config = config.model_copy(update=config.filters_for(task))
    evaluation = replace(evaluation, config=config, options=options)
    questions = Questions(task, options.data, options.limit, options.offset, options.shuffle_seed, evaluation.columns)
    found, bad = questions.survey()
    record = {
        "model_sha256": fingerprint.hash_model(config.weights),
        "data_sha256": fingerprint.hash_path(place) if local else None,
        "versions": fingerprint.versions(),
    }
    with Folder(out, evaluation.to_json(), record, resume) as folder:
        return _Session(evaluation, folder, questions, record, told).run(found, bad)


async def search_here(evaluation: EvaluationRun, pending: Pending, finish: Finish, watch: Watcher) -> None:
    """Search all of them on one engine, as many at once as the configuration says, and tell of each as it is finished,
    in any order; cancelled, stop what runs. `watch` is told of each search as it begins.

    Raises TotError for what no other question could do without.
    """
    with ExitStack() as stack:
        decoders = await evaluation.config.aopen(stack)

        async def draw() -> None:
            for question, repeat in pending:
                sample, session = await attempt(evaluation, question, repeat, decoders, watch)
                finish(sample, None if session is None else session.tree.to_json(), session)

        async with running(draw() for _ in range(evaluation.options.concurrency)) as workers:
            await asyncio.gather(*workers)


@dataclass(eq=False)
class _Session:
    """One process's work on a folder."""

    evaluation: EvaluationRun
    folder: Folder
    questions: Questions
    record: dict[str, Any]
    told: Tracker | None
    progress: Progress = field(init=False)

    def run(self, found: int, bad: Sequence[BadRow]) -> Results:
        folder, options = self.folder, self.evaluation.options
        wanted, had = found * options.repeats, len(folder.done)
        folder.log(f"begins: {self.evaluation.name}, {wanted} samples, of which {had} are there")
        numbers: dict[str, float] = {}
        self._introduce()
        with Progress(wanted - had) as self.progress:
            try:
                self._recall(bad)
                if had < wanted:
                    run_to_end(self._search())
                results = replace(summarise(folder.samples, len(bad)), folder=folder.path)
                folder.finish(results.to_json())
                folder.log(f"finished: score {results.score_text}")
                numbers = {"parse_failures": results.parse_failures.mean}
                numbers |= {} if results.score is None else {"score": results.score.mean}
            except (KeyboardInterrupt, asyncio.CancelledError) as interrupt:
                folder.log(f"interrupted with {len(folder.done)} of {wanted} samples")
                raise KeyboardInterrupt(*interrupt.args) from None
            except Exception as error:
                with suppress(TotError):  # the disk may be what has failed
                    folder.log(f"stopped with {len(folder.done)} of {wanted} samples: {error}")
                raise
            finally:
                self._tell(lambda told: told.finish(numbers))
        return results

    async def _search(self) -> None:
        """Search what is pending, where the configuration says. Raises OptionError where Ray is wanted and absent."""
        if self.evaluation.options.executor == "local":
            return await search_here(self.evaluation, self._pending(), self._finish, self.progress.running.add)
        if find_spec("ray") is None:
            raise OptionError("--executor ray needs Ray, which is not installed: pip install ray")
        from tot.evaluation.ray_executor import search_on_ray

        return await search_on_ray(self.evaluation, self.record, self._pending(), self._finish, self._note)

    def _recall(self, bad: Sequence[BadRow]) -> None:
        """Say what is amiss before anything is asked, and count what an earlier run did."""
        for change in self.folder.changed_versions:
            self._note(f"goes on with other versions: {change}")
        for row in bad:
            self._note(f"{self.evaluation.options.data}, {row.place} {row.reason}")
        for sample in self.folder.samples:
            self.progress.recall(sample)

    def _introduce(self) -> None:
        try:
            if self.told is not None:
                self.told.start(self.folder.path.name, self.evaluation.to_json())
        except Exception as error:  # another program's
            reason = f"{type(error).__name__}: {error}"
            raise OptionError(f"the tracker can't begin ({reason}): set it up, or leave --track out") from error

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        """A tracker that fails is told no more: all of it is in the folder."""
        try:
            if self.told is not None:
                what(self.told)
        except Exception as error:  # another program's  # noqa: BLE001
            self.told = None
            self._note(f"the tracker failed, and is told no more: {type(error).__name__}: {error}")

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
        now = {"seconds": sample["measured"]["seconds"], **({} if score is None else {"score": score})}
        self._tell(lambda told: told.log(len(self.folder.done), now))
