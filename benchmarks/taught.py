"""A model that is taught to think, for the benchmark `thinking`: it thinks no better, but in the form of such models.

The texts are the model's own right solutions of training questions. Where several
samples are right, another one follows as a check, as in the thinking of such models. The last line is the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from benchmarks.rationales import Question
from benchmarks.texts import write_texts
from tot.decoders.decoder import load_decoder
from tot.decoders.models.loading import load_model
from tot.decoders.request import Request, Sampling
from tot.decoders.training.cllm.settings import TrainOptions
from tot.decoders.training.cllm.train import train
from tot.evaluation.data import rows
from tot.registry import load_task
from tot.task.checked import CheckedTask

TAGS = ("<think>", "</think>")
_CHECK = "\n\nLet me check this in another way.\n\n"
_SAMPLES = 4
_TEXTS = 100
"""Number of texts to train on, the shortest ones: they are enough for the form."""
_AT_ONCE = 10
"""Questions whose samples are decoded together."""


def questions(task: str, data: str, offset: int, limit: int, max_tokens: int) -> list[Question]:
    """Return plain requests for the solutions of some rows of a file."""
    checked = CheckedTask(load_task(task).with_prompts("chat"))

    def question(row: dict[str, str]) -> Question:
        reference = checked.reference_of(row)
        request = Request(
            prompt=checked.prompt("chain", checked.start(checked.question_of(row))),
            sampling=Sampling(max_tokens=max_tokens),
        )
        return Question(
            request, checked.parse_answer, checked.canonical, lambda answer: checked.score(answer, reference)
        )

    return [question(row) for row in islice(rows(data), offset, offset + limit)]


def teach(model: str, asked: Sequence[Question], folder: Path, tell: Callable[[str], None]) -> Path:
    """Return the folder of the taught model; it is made unless it exists, and a stopped run is resumed."""
    out = folder / "model"
    if not (out / "config.json").exists():
        written = _solutions(model, asked, folder / "solutions.jsonl", tell)
        texts = [
            (one.request, _text(thinking))
            for one, solutions in zip(asked, written, strict=True)
            for thinking in _thoughts(solutions)
        ]
        texts = sorted(texts, key=lambda text: len(text[1]))[:_TEXTS]
        tell(f"{len(texts)} texts")
        loaded = load_model(model)
        write_texts(loaded, texts, folder / "texts")
        options = TrainOptions(learning_rate=2e-4, ar_weight=1.0, lora=16)
        train(loaded, folder / "texts", out, options, lambda step, steps, loss: tell(f"{step} of {steps}: {loss:.3f}"))
    return out


def _solutions(model: str, asked: Sequence[Question], path: Path, tell: Callable[[str], None]) -> list[list[str]]:
    """Return the right solutions among samples for each question."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found: list[list[str]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if len(found) >= len(asked):
        return found
    with load_decoder("ar", model, prefix_cache=False) as decoder, path.open("a") as file:
        for at in range(len(found), len(asked), _AT_ONCE):
            batch = asked[at : at + _AT_ONCE]
            sampling = {"n": _SAMPLES, "temperature": 0.8, "top_p": 0.95, "seed": at}
            requests = [
                one.request.model_copy(update={"sampling": one.request.sampling.model_copy(update=sampling)})
                for one in batch
            ]
            completions = iter(decoder.generate(requests))
            for one in batch:
                samples = list(islice(completions, _SAMPLES))
                right = [
                    sample.text.strip()
                    for sample in samples
                    if sample.finish_reason == "eos" and one.score(one.parse(sample.text)) == 1
                ]
                found.append(list(dict.fromkeys(right)))
                file.write(json.dumps(found[-1]) + "\n")
            file.flush()
            tell(f"{at + len(batch)} of {len(asked)} questions: {sum(map(len, found))} right solutions")
    return found


def _thoughts(solutions: Sequence[str]) -> Iterator[str]:
    """Yield each solution followed by another one as its check."""
    if len(solutions) > 1:
        for number, solution in enumerate(solutions):
            yield solution + _CHECK + solutions[(number + 1) % len(solutions)]


def _text(thinking: str) -> str:
    opening, closing = TAGS
    return f"{opening}\n{thinking}\n{closing}\n\n{thinking.splitlines()[-1]}"
