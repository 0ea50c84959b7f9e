"""`tot train-draft`: train a draft on the completions and hidden states of a target during searches.

Half of the questions get the task's default search, the others breadth-first search with few-shot prompts. All
completions are recorded while they are decoded. Intermediate files are in the draft's folder, so that an interrupted
run can resume.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain, count
from pathlib import Path
from typing import Any

from rich.console import Console

from tot.decoders.decoder import LocalDecoder, load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.files import hold, write_json
from tot.decoders.methods.method import OpenedMethod
from tot.decoders.models.loading import open_model
from tot.decoders.models.model_names import draft_folder
from tot.decoders.training.distill.record import Record, Recorder, load, save
from tot.decoders.training.distill.train import agreement, new_draft, save_draft, train
from tot.decoders.training.options import DraftOptions
from tot.decoders.training.resuming import check_settings
from tot.evaluation.data import rows
from tot.generators.sample import Sample
from tot.report.terminal import counting
from tot.search.bfs import BFS
from tot.solver import asolve
from tot.task.task import Task
from tot.training.questions import rows_of_task

TEMPERATURES = (0.3, 0.7, 1.0)
TOGETHER = 16
"""Number of concurrent searches."""
_WINDOW = 512
"""Maximum tokens of a given text's part."""


def run(
    model: str,
    questions: Sequence[str],
    given: Sequence[Path],
    options: DraftOptions,
    out: Path | None,
    console: Console,
) -> Path:
    """Record completions, train a draft, and write it with a report to `out`, by default the target's draft folder.

    `questions` are "task=file" pairs; `given` are files of additional texts to train on.
    """
    if not questions and not given:
        raise OptionError("there is no training data: give --questions gsm8k=FILE, or --text FILE, or both")
    parsed = _questions(questions)
    for path in given:
        if next(rows(path), None) is None:
            raise OptionError(f"{path} has no rows: give a file of texts")
    folder = draft_folder(model) if out is None else out
    work = folder / ".training"
    if (folder / "config.json").exists() and not work.exists():  # which is deleted last
        raise OptionError(f"{folder} already holds a model: delete it to train again, or give another --out")
    work.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {"model": model, "questions": list(questions), "text": list(map(str, given))}
    settings |= options.model_dump(mode="json")
    with ExitStack() as stack:
        refusal = OptionError(f"{work} is in use by another tot train-draft: wait for it, or give --out")
        stack.callback(hold(work / "lock", refusal))
        check_settings(work / "settings.json", settings)
        target = open_model(model, unread=True)
        total = int(target.config.num_hidden_layers)
        layers = options.layers or sorted({max(1, total // 3), max(1, 2 * total // 3), total})
        if missing := [layer for layer in layers if not 0 <= layer <= total]:
            raise OptionError(f"the target has no layer {missing[0]}: give --layers from 0 to {total}")
        with counting("recording", options.tokens) as tell:
            batches = _record(model, layers, parsed, given, options, work, tell)
        training = list(chain(*(batches[:-1] or batches)))
        draft = new_draft(target, training, options)
        with counting("training", None) as tell:
            train(
                draft,
                training,
                options,
                work / "checkpoint.safetensors",
                lambda step, steps, loss: tell(step, f"step {step} of {steps}, loss {loss:.2f} nats", steps),
            )
        report = {
            **settings,
            "recorded": sum(map(_tokens, batches)),
            "parameters": sum(weight.numel() for weight in draft.parameters()),
            "agreement": agreement(draft, batches[-1], options.steps),
        }
        write_json(folder / "report.json", report)
        save_draft(draft, layers, target, folder)
    shutil.rmtree(work)
    overlaps = ", ".join(f"{one['overlap']:.2f}" for one in report["agreement"])
    console.print(
        f"{folder}: {report['parameters'] / 1e6:.1f}M parameters, {report['recorded']} tokens recorded; on the last "
        f"batch, its distribution overlaps the target's by {overlaps} at T=1, by the number of drafted tokens"
    )
    return folder


def _questions(sources: Sequence[str]) -> list[tuple[Task, str]]:
    """Interleave the questions of all sources, repeating the questions of shorter sources."""
    lists = []
    for source in sources:
        lists.append([(task, question) for task, question, *_ in rows_of_task(source)])
        if not lists[-1]:
            name, _, path = source.partition("=")
            raise OptionError(f"{path} has no rows: give a file of {name} questions")
    longest = max(map(len, lists), default=0)
    return [source[i % len(source)] for i in range(longest) for source in lists]


def _record(
    model: str,
    layers: Sequence[int],
    questions: Sequence[tuple[Task, str]],
    texts: Sequence[Path],
    options: DraftOptions,
    work: Path,
    tell: Callable[..., None],
) -> list[list[Record]]:
    """Return records for `options.tokens` tokens in batches of questions or texts: load the stored ones, add others."""
    batches = [load(path) for path in sorted(work.glob("texts-*.safetensors"))]
    recorded = sum(map(_tokens, batches))
    tell(recorded, f"{recorded} tokens")
    if recorded < options.tokens:
        with load_decoder("ar", model, prefix_cache=False) as decoder:
            engine = decoder.engine
            share = options.tokens // 2 if questions else options.tokens
            windows = _windows(engine, texts, share)
            for number in count(len(batches)):
                recorder = Recorder(layers)
                start = TOGETHER * (number - len(windows))
                if number < len(windows):
                    recorder.read(engine, windows[number])
                elif questions:
                    numbers = range(start, start + TOGETHER)
                    batch = [(options.seed + i, *questions[i % len(questions)]) for i in numbers]
                    asyncio.run(_ask(engine, recorder, batch))
                else:
                    break
                records = [record for record in recorder.records if len(record.tokens) > options.steps]
                if records:
                    save(records, work / f"texts-{number:05d}.safetensors")
                    batches.append(records)
                recorded += _tokens(records)
                tell(recorded, f"{recorded} tokens")
                if recorded >= options.tokens or (not recorded and number > len(windows) + len(questions)):
                    break
    if not batches:
        raise OptionError("no tokens were recorded: give texts, or questions that the model can answer")
    return batches


def _tokens(records: Sequence[Record]) -> int:
    return sum(len(record.tokens) for record in records)


def _windows(engine: Engine, texts: Sequence[Path], max_tokens: int) -> list[list[list[int]]]:
    """Return batches of texts of at most `_WINDOW` token ids each, with about `max_tokens` in total."""
    pieces, total = [], 0
    for path in texts:
        for row in rows(path):
            ids = engine.codec.encode(" ".join(str(value) for value in row.values()))
            parts = [ids[at : at + _WINDOW] for at in range(0, len(ids), _WINDOW)]
            pieces += [part for part in parts if len(part) > 1]
            total += len(ids) - len(parts)  # a part's first token is not predicted
            if total >= max_tokens:
                break
    return [pieces[at : at + 32] for at in range(0, len(pieces), 32)]


async def _ask(engine: Engine, recorder: Recorder, questions: Sequence[tuple[int, Task, str]]) -> None:
    """Search each (seed, task, question) concurrently, and record the completions."""
    decoder = LocalDecoder("ar", engine, OpenedMethod(recorder.policy), ExitStack(), owns_engine=False)

    async def ask(seed: int, task: Task, question: str) -> None:
        if seed % 2:
            await asolve(task, question, decoder=decoder, seed=seed)
            return
        rng = random.Random(seed)
        papers = task.in_papers()
        use_values = rng.random() < 0.25 and papers.has_template(papers.value)
        await asolve(
            task,
            question,
            decoder=decoder,
            prompts="papers",
            search=BFS(thoughts=6, breadth=1),
            generator=Sample(temperature=rng.choice(TEMPERATURES)),
            evaluator="value" if use_values else "random",
            seed=seed,
        )

    await asyncio.gather(*(ask(*question) for question in questions))
