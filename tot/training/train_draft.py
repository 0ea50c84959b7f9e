"""`tot train-draft`: a small draft model for a target, distilled on what the target writes when searches ask it.

Each question is searched breadth first, and whatever that asks of the target, thoughts and evaluations, is recorded
while it is decoded. All work is kept in the folder of the draft, and gone on with where it was stopped.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from rich.console import Console

from tot.decoders.decoder import LocalDecoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import OptionError
from tot.decoders.files import hold, write_json
from tot.decoders.methods.method import OpenedMethod
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.models.loading import load_model, quiet_transformers
from tot.decoders.models.model_names import draft_folder
from tot.decoders.training.distill.record import Record, Recorder, load, save
from tot.decoders.training.distill.train import agreement, student, train
from tot.decoders.training.options import DraftOptions
from tot.decoders.training.resuming import check_settings
from tot.evaluation.data import rows
from tot.generators.sample import Sample
from tot.report.terminal import counting
from tot.search import BFS
from tot.solver import asolve
from tot.task.task import Task
from tot.training.questions import rows_of_task

TEMPERATURES = (0.3, 0.7, 1.0)
TOGETHER = 4
"""Questions searched at once."""
_HELD_OUT = 40
"""Every so many records one is not trained on, to measure with."""


def run(
    model: str,
    questions: Sequence[str],
    given: Sequence[Path],
    options: DraftOptions,
    out: Path | None,
    console: Console,
) -> Path:
    """Record, train, write the draft and a report of it to `out`; the folder of this target's drafts by default.

    `questions` are "task=file" pairs, `given` files of texts to read besides what the target writes.
    """
    if not questions and not given:
        raise OptionError("there is nothing to train on: give --questions gsm8k=FILE, or --text FILE, or both")
    asked = _questions(questions)
    for path in given:
        if next(rows(path), None) is None:
            raise OptionError(f"{path} has no rows: give a file of texts")
    folder = draft_folder(model) if out is None else out
    work = folder / ".training"
    if (folder / "config.json").exists() and not work.exists():  # which goes last
        raise OptionError(f"{folder} holds a model already: delete it to train anew, or give another folder by --out")
    work.mkdir(parents=True, exist_ok=True)
    settings = {"model": model, "questions": list(questions), "text": list(map(str, given)), **options.model_dump()}
    with ExitStack() as stack:
        refusal = OptionError(f"{work} is in use by another tot train-draft: wait for it, or give --out")
        stack.callback(hold(work / "lock", refusal))
        check_settings(work / "settings.json", settings)
        target = load_model(model)
        with counting("recording", options.tokens) as tell:
            records = _record(target, asked, given, options, work, tell)
        kept = [record for i, record in enumerate(records) if i % _HELD_OUT]
        draft = student(target, options)
        with counting("training", None) as tell:
            train(
                draft,
                kept or records,
                options,
                work / "checkpoint.safetensors",
                lambda step, steps, loss: tell(step, f"step {step} of {steps}, loss {loss:.2f} nats", steps),
            )
        report = {
            **settings,
            "recorded": sum(len(record.top) for record in records),
            "parameters": sum(weight.numel() for weight in draft.parameters()),
            **agreement(draft, records[::_HELD_OUT]),
        }
        with quiet_transformers():
            draft.to(target.dtype).save_pretrained(folder)
            target.tokenizer.save_pretrained(folder)
        write_json(folder / "report.json", report)
    shutil.rmtree(work)
    console.print(
        f"{folder}: {report['parameters'] / 1e6:.1f}M parameters, {report['recorded']} tokens recorded; on texts "
        f"kept apart its distribution overlaps the target's by {report['overlap']:.2f} at T=1, and the likeliest token "
        f"is the same at {report['greedy']:.2f} of places"
    )
    return folder


def _questions(sources: Sequence[str]) -> list[tuple[Task, str]]:
    """Questions of all sources, taking turns; those of the shorter ones come again."""
    lists = []
    for source in sources:
        lists.append([(task, question) for task, question, *_ in rows_of_task(source)])
        if not lists[-1]:
            name, _, path = source.partition("=")
            raise OptionError(f"{path} has no rows: give a file of {name} questions")
    longest = max(map(len, lists), default=0)
    return [source[i % len(source)] for i in range(longest) for source in lists]


def _record(
    target: LoadedModel,
    asked: Sequence[tuple[Task, str]],
    given: Sequence[Path],
    options: DraftOptions,
    work: Path,
    tell: Callable[..., None],
) -> list[Record]:
    """Records for as many tokens as wanted: those in the folder already, then new ones, written batch by batch."""
    files = sorted(work.glob("texts-*.safetensors"))
    records = [record for path in files for record in load(path)]
    known = sum(len(record.top) for record in records)
    tell(known, f"{known} tokens")
    if known < options.tokens:
        with Engine(target) as engine:
            share = options.tokens // 2 if asked else options.tokens
            windows = _windows(engine, given, options.window, share)
            for number in count(len(files)):
                recorder = Recorder(options.window)
                begun = TOGETHER * (number - len(windows))
                if number < len(windows):
                    recorder.read(engine, windows[number])
                elif asked:
                    numbers = range(begun, begun + TOGETHER)
                    asyncio.run(_ask(engine, recorder, [(options.seed + i, *asked[i % len(asked)]) for i in numbers]))
                else:
                    break
                if recorder.records:
                    save(recorder.records, work / f"texts-{number:05d}.safetensors")
                records += recorder.records
                known += sum(len(record.top) for record in recorder.records)
                tell(known, f"{known} tokens")
                if known >= options.tokens or (not known and number > len(windows) + len(asked)):
                    break
    if not records:
        raise OptionError("nothing came of it: give texts, or questions that the model has something to say about")
    return records


def _windows(engine: Engine, given: Sequence[Path], window: int, most: int) -> list[list[list[int]]]:
    """Batches of texts as token ids, each of at most `window`, together about `most`."""
    pieces, total = [], 0
    for path in given:
        for row in rows(path):
            ids = engine.codec.encode(" ".join(str(value) for value in row.values()))
            parts = [ids[at : at + window] for at in range(0, len(ids), window)]
            pieces += [part for part in parts if len(part) > 1]
            total += len(ids) - len(parts)  # nothing is said of a part's first token
            if total >= most:
                break
    return [pieces[at : at + 32] for at in range(0, len(pieces), 32)]


async def _ask(engine: Engine, recorder: Recorder, asked: Sequence[tuple[int, Task, str]]) -> None:
    """Search each (seed, task, question), all at once, and record what is said."""
    decoder = LocalDecoder("ar", engine, OpenedMethod(recorder.policy), ExitStack(), owns_engine=False)

    async def ask(seed: int, task: Task, question: str) -> None:
        chance = random.Random(seed)
        valued = "value" in task.templates and chance.random() < 0.25
        await asolve(
            task,
            question,
            decoder=decoder,
            prompts="papers",
            search=BFS(thoughts=24, breadth=1),  # many samples of few prompts: what packs best
            generator=Sample(temperature=chance.choice(TEMPERATURES)),
            evaluator="value" if valued else "random",
            seed=seed,
        )

    await asyncio.gather(*(ask(*one) for one in asked))
