"""Jacobi trajectories of a model on given prompts: what a consistency LLM is trained on (CLLM, Algorithm 1).

Prompts are decoded by Jacobi iteration, many at once, and every n-token window's points on the way to its fixed point
are kept, with copies whose wrong tokens are corrected by chance. Texts that repeat themselves are left out. Shards are
Parquet files that `datasets` reads; a run that was killed goes on after its last whole shard.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import parquet

from tot.decoders.decoder import load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.engine.text import TextCodec
from tot.decoders.errors import ModelError, OptionError
from tot.decoders.files import replacing
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.request import Completion, Request
from tot.decoders.training.options import CollectOptions
from tot.decoders.training.resuming import check_settings

_T = TypeVar("_T")
FORMAT = 2
"""1 had neither windows at a text's end nor texts without a whole window; it is read as it is."""
_IDS = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    {"prompt": _IDS, "response": _IDS, "starts": _IDS}
    | dict.fromkeys(("points", "corrected"), pa.list_(pa.list_(_IDS)))
)
_GIVEN = 1000
"""Texts of a shard that are not the model's own."""


def collect(
    engine: Engine,
    requests: Iterable[Request],
    out: Path,
    options: CollectOptions,
    tell: Callable[[int, int, int], None] = lambda texts, windows, dropped: None,
) -> None:
    """Write trajectories of all requests to the folder `out`. Only one shard's are in memory at a time.

    A shard's name tells what was asked, so those of other requests are written anew. `tell` hears (requests done,
    windows kept, texts left out) after every shard. Raises OptionError where `out` was begun with other options and for
    requests with an answer trigger, and ModelError where it was begun with another model.
    """
    _begin(out, options.model_dump(), engine.loaded)
    windows = dropped = 0
    with load_decoder("jacobi", engine=engine, n=options.n, adapt=False, trajectory=True) as decoder:
        for number, batch in enumerate(_batches(requests, options.together)):
            if any(request.answer_trigger for request in batch):
                raise OptionError("trajectories go to the end of a text: leave the answer trigger out")
            asked = [request for request in batch for _ in range(request.sampling.n)]
            path = _shard(out, number, batch)
            if not path.exists():
                rows = []
                for i, (request, completion) in enumerate(zip(asked, decoder.generate(batch), strict=True)):
                    chance = random.Random(f"{options.seed}/{number}/{i}")
                    row = _row(engine.codec.encode_prompt(request.prompt), completion, options, chance)
                    if row is not None:
                        rows.append(row)
                _write(rows, path)
            kept = _windows(path)
            windows += sum(kept)
            dropped += len(asked) - len(kept)
            tell(number * options.together + len(batch), windows, dropped)


def given(
    loaded: LoadedModel,
    texts: Iterable[tuple[Request, str]],
    out: Path,
    tell: Callable[[int], None] = lambda texts: None,
) -> None:
    """Write texts that the model did not write itself, as (request, what it should have written) pairs, in the same
    form: without windows, so that `train` has only the AR loss and fine-tunes on them."""
    _begin(out, {"given": True}, loaded)
    codec = TextCodec(loaded.tokenizer)
    count = 0
    for number, batch in enumerate(_batches(texts, _GIVEN)):
        count += len(batch)
        path = _shard(out, number, batch)
        if not path.exists():
            rows = []
            for request, text in batch:
                response = [*codec.encode(text), codec.end_of(request)]
                prompt = codec.encode_prompt(request.prompt)
                rows.append({"prompt": prompt, "response": response, "starts": [], "points": [], "corrected": []})
            _write(rows, path)
        tell(count)


def trajectories(folder: Path, model: LoadedModel) -> Iterator[dict[str, Any]]:
    """The rows in a folder that `collect` wrote: `prompt` and `response` (token ids), `starts` (where in the response
    each window begins), `points` (for each window, its points, of n tokens or what the text's end leaves of them) and
    `corrected` (the same, partly corrected).

    Raises OptionError where there are none and for those of a later format, ModelError where they were collected with
    another model or tokenizer.
    """
    path = folder / "settings.json"
    if not path.is_file():
        raise OptionError(f"{folder} holds no trajectories: give a folder that `tot cllm collect` wrote")
    settings = json.loads(path.read_text())
    if settings["format"] > FORMAT:
        raise OptionError(
            f"{folder} holds trajectories in format {settings['format']}, and formats up to {FORMAT} are read here: "
            "collect them again, or take a later version"
        )
    _same_model(folder, settings, identity(model))
    for shard in sorted(folder.glob("shard-*.parquet")):
        yield from parquet.read_table(shard).to_pylist()


def identity(model: LoadedModel) -> dict[str, str]:
    """A model's name, and digests of its weights and its vocabulary. The first does not depend on how the weights are
    held: whole or packed, as bfloat16 or as float32."""
    vocabulary = json.dumps(sorted(model.tokenizer.get_vocab().items()), ensure_ascii=True)
    return {
        "model": model.name,
        "weights": model.identity[:16],
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
    }


def windows(completion: Completion, n: int) -> list[tuple[int, list[list[int]], list[int]]]:
    """(where it begins, its points but for the fixed one, that one) of each window of a text that was decoded whole by
    Jacobi iteration, trajectory kept. All have n tokens, but for the last where the text ends sooner."""
    found: list[tuple[int, list[list[int]], list[int]]] = []
    for at, guesses in completion.trajectory:
        if not found or at >= found[-1][0] + n:  # all of the window before is fixed
            found.append((at, [], list(completion.tokens[at : at + len(guesses)])))
        start, points, fixed = found[-1]
        point = [*fixed[: at - start], *guesses][: len(fixed)]
        if point != fixed:
            points.append(point)
    return [window for window in found if window[2]]


def stationary(points: Sequence[Sequence[int]], fixed: Sequence[int]) -> int:
    """How many tokens of a window were right early: guessed while one before them was wrong, and never changed again
    (section 3.3, Table 3)."""
    count = 0
    for place, right in enumerate(fixed):
        stays = 0  # from which point on
        for number, point in enumerate(points):
            if point[place] != right:
                stays = number + 1
        early = points[stays] if stays < len(points) else fixed
        count += list(early[:place]) != list(fixed[:place])
    return count


def repeats_itself(tokens: Sequence[int], text: str) -> bool:
    """Whether a text has a short run of tokens four times in a row, one token eight times (four zeros are a number), or
    a sentence three times."""
    for size in range(1, 9):
        times = 4 if size > 1 else 8
        for at in range(len(tokens) - times * size + 1):
            run = tokens[at : at + size]
            if all(list(tokens[at + k * size : at + (k + 1) * size]) == list(run) for k in range(1, times)):
                return True
    sentences = [" ".join(sentence.lower().split()) for sentence in re.split(r"[.!?\n]+", text)]
    return any(len(sentence) > 12 and sentences.count(sentence) >= 3 for sentence in set(sentences))


def _row(
    prompt: Sequence[int], completion: Completion, options: CollectOptions, chance: random.Random
) -> dict[str, Any] | None:
    """One text with its windows, or None where it is not worth learning from."""
    response = list(completion.tokens)
    if repeats_itself(response, completion.text):
        return None
    found = [(start, points) for start, points, _ in windows(completion, options.n) if points]

    def correct(start: int, point: Sequence[int]) -> list[int]:
        return [
            right if guess != right and chance.random() < options.augment else guess
            for guess, right in zip(point, response[start:], strict=False)
        ]

    return {
        "prompt": list(prompt),
        "response": response,
        "starts": [start for start, _ in found],
        "points": [points for _, points in found],
        "corrected": [[correct(start, point) for point in points] for start, points in found],
    }


def _batches(source: Iterable[_T], size: int) -> Iterator[list[_T]]:
    source = iter(source)
    while batch := list(islice(source, size)):
        yield batch


def _shard(out: Path, number: int, batch: Sequence[object]) -> Path:
    """Where a batch is written. A shard of that number for another batch goes."""
    digest = hashlib.sha256(repr(batch).encode()).hexdigest()[:12]
    path = out / f"shard-{number:05d}-{digest}.parquet"
    for other in out.glob(f"shard-{number:05d}-*.parquet"):
        if other != path:
            other.unlink()
    return path


def _windows(shard: Path) -> list[int]:
    """How many windows each text of a shard has."""
    return [len(starts) for starts in parquet.read_table(shard, columns=["starts"])["starts"].to_pylist()]


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    """A shard, whole or not at all; one without rows says that its prompts are done."""
    with replacing(path) as unfinished:
        parquet.write_table(pa.Table.from_pylist(rows, _SCHEMA), unfinished)


def _begin(out: Path, options: dict[str, Any], model: LoadedModel) -> None:
    """Make a folder of trajectories, or see that it is of this model and these options."""
    path, settings = out / "settings.json", {"format": FORMAT, **options, **identity(model)}
    if path.exists():
        _same_model(out, json.loads(path.read_text()), settings)
    out.mkdir(parents=True, exist_ok=True)
    check_settings(path, settings)


def _same_model(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for what in ("weights", "tokenizer"):
        if before.get(what) != now[what]:
            raise ModelError(
                f"{folder} holds trajectories of {before.get('model')} ({what} {before.get(what)}), not of "
                f"{now['model']} ({what} {now[what]}): collect them with this model, or train that one"
            )
