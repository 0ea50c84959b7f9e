"""Collect Jacobi trajectories of a model, the training data of a consistency LLM (CLLM, Algorithm 1).

Prompts are decoded by Jacobi iteration in batches. The trajectory of each n-token window to its fixed point is saved,
with copies in which wrong tokens are corrected at random. Repetitive texts are dropped. Shards are Parquet files, which
`datasets` can read; a killed run resumes after its last complete shard.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import parquet

from tot.decoders.decoder import load_decoder
from tot.decoders.engine.engine import Engine
from tot.decoders.errors import ModelError, OptionError
from tot.decoders.files import replacing, write_json
from tot.decoders.models.loaded import LoadedModel
from tot.decoders.request import Completion, Request
from tot.decoders.training.cllm.settings import CollectOptions

_T = TypeVar("_T")
FORMAT = 2
_IDS = pa.list_(pa.int32())
_SCHEMA = pa.schema(
    {"prompt": _IDS, "response": _IDS, "starts": _IDS}
    | dict.fromkeys(("points", "corrected"), pa.list_(pa.list_(_IDS)))
)


def collect(
    engine: Engine,
    requests: Iterable[Request],
    out: Path,
    options: CollectOptions,
    tell: Callable[[int, int, int], None] = lambda texts, windows, dropped: None,
) -> None:
    """Write the trajectories of all requests to the folder `out`, with one shard in memory at a time.

    A shard's name has a digest of its requests, so shards of other requests are replaced. `tell` is called after every
    shard with (requests done, windows saved, texts dropped).

    Raises:
        OptionError: `out` was started with other options, or a request has an answer trigger.
        ModelError: `out` was started with another model.
    """
    begin(out, options.model_dump(), engine.loaded)

    def rows_of(number: int, batch: Sequence[Request]) -> list[dict[str, Any]]:
        if any(request.answer_trigger for request in batch):
            raise OptionError("trajectories do not support an answer trigger: remove it")
        prompts = [engine.codec.encode_prompt(one.prompt) for one in batch for _ in range(one.sampling.n)]
        texts = enumerate(zip(prompts, decoder.generate(batch), strict=True))
        rows = [_row(prompt, completion, options, f"{number}/{i}") for i, (prompt, completion) in texts]
        return [row for row in rows if row is not None]

    done = windows = dropped = 0
    with load_decoder("jacobi", engine=engine, n=options.n, adapt=False, trajectory=True) as decoder:
        for batch, shard in shards(out, requests, options.together, rows_of):
            counts = [len(starts) for starts in parquet.read_table(shard, columns=["starts"])["starts"].to_pylist()]
            done += len(batch)
            windows += sum(counts)
            dropped += sum(request.sampling.n for request in batch) - len(counts)
            tell(done, windows, dropped)


def trajectories(folder: Path, model: LoadedModel) -> Iterator[dict[str, Any]]:
    """Yield the rows of a folder that `collect` wrote.

    A row has `prompt` and `response` (token ids), `starts` (position of each window in the response), `points` (the
    points of each window, of n tokens or fewer at the end of the text) and `corrected` (the points, partly corrected).

    Raises:
        OptionError: The folder has no trajectories, or they have a later format.
        ModelError: They were collected with another model or tokenizer.
    """
    path = folder / "settings.json"
    if not path.is_file():
        raise OptionError(f"{folder} holds no trajectories: give a folder that `tot train collect` wrote")
    settings = json.loads(path.read_text())
    if settings["format"] != FORMAT:
        raise OptionError(
            f"{folder} holds trajectories in format {settings['format']}, and this version reads format {FORMAT}: "
            "collect them again"
        )
    _check_model(folder, settings, identity(model))
    for shard in sorted(folder.glob("shard-*.parquet")):
        yield from parquet.read_table(shard).to_pylist()


def identity(model: LoadedModel) -> dict[str, str]:
    """Return a model's name and the digests of its weights and vocabulary.

    The digest of the weights does not depend on how they are stored: packed or not, as bfloat16 or float32.
    """
    vocabulary = json.dumps(sorted(model.tokenizer.get_vocab().items()), ensure_ascii=True)
    return {
        "model": model.name,
        "weights": model.identity[:16],
        "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16],
    }


def windows(completion: Completion, n: int) -> list[tuple[int, list[list[int]], list[int]]]:
    """Split the trajectory of a completion into windows of (start, points before the fixed point, fixed point).

    The completion is decoded by Jacobi iteration with its trajectory. Windows have n tokens, or fewer at the end.
    """
    result: list[tuple[int, list[list[int]], list[int]]] = []
    for at, guesses in completion.trajectory:
        if not result or at >= result[-1][0] + n:  # the previous window is fixed
            result.append((at, [], list(completion.tokens[at : at + len(guesses)])))
        start, points, fixed = result[-1]
        point = [*fixed[: at - start], *guesses][: len(fixed)]
        if point != fixed:
            points.append(point)
    return [window for window in result if window[2]]


def repeats_itself(tokens: Sequence[int], text: str) -> bool:
    """Return True for a repetitive text.

    It has a run of 2 to 8 tokens four times in a row, one token eight times in a row, or a sentence three times.
    """
    if re.search(r"(.)\1{7}|(.{2,8}?)\2{3}", "".join(map(chr, tokens)), re.DOTALL):  # four zeros are a number
        return True
    sentences = [" ".join(sentence.lower().split()) for sentence in re.split(r"[.!?\n]+", text)]
    return any(len(sentence) > 12 and sentences.count(sentence) >= 3 for sentence in set(sentences))


def _row(prompt: Sequence[int], completion: Completion, options: CollectOptions, number: str) -> dict[str, Any] | None:
    """Return one text with its windows, or None for a repetitive text. `number` seeds its corrections."""
    rng, response = random.Random(f"{options.seed}/{number}"), list(completion.tokens)
    if repeats_itself(response, completion.text):
        return None
    trajectory = [(start, points) for start, points, _ in windows(completion, options.n) if points]

    def correct(start: int, point: Sequence[int]) -> list[int]:
        return [
            correct_token if guess != correct_token and rng.random() < options.augment else guess
            for guess, correct_token in zip(point, response[start:], strict=False)
        ]

    return {
        "prompt": list(prompt),
        "response": response,
        "starts": [start for start, _ in trajectory],
        "points": [points for _, points in trajectory],
        "corrected": [[correct(start, point) for point in points] for start, points in trajectory],
    }


def shards(
    out: Path, source: Iterable[_T], size: int, rows_of: Callable[[int, list[_T]], list[dict[str, Any]]]
) -> Iterator[tuple[list[_T], Path]]:
    """Write a shard for each batch, unless it exists, and yield the batch and its shard.

    A shard with the same number for another batch is deleted. A shard without rows records that its batch is done.
    """
    items = iter(source)
    for number in count():
        if not (batch := list(islice(items, size))):
            return
        digest = hashlib.sha256(repr(batch).encode()).hexdigest()[:12]
        path = out / f"shard-{number:05d}-{digest}.parquet"
        for other in set(out.glob(f"shard-{number:05d}-*.parquet")) - {path}:
            other.unlink()
        if not path.exists():
            rows = rows_of(number, batch)
            with replacing(path) as file:
                parquet.write_table(pa.Table.from_pylist(rows, _SCHEMA), file)
        yield batch, path


def begin(out: Path, options: dict[str, Any], model: LoadedModel) -> None:
    """Create a folder of trajectories, or check that it belongs to this model and these options."""
    path, settings = out / "settings.json", {"format": FORMAT, **options, **identity(model)}
    saved = json.loads(path.read_text()) if path.exists() else settings
    _check_model(out, saved, settings)
    for name, value in settings.items():
        if saved.get(name) != value:
            raise OptionError(
                f"{out} was started with {name}={saved.get(name)!r}, not {value!r}: resume with the same options, or "
                "give another folder"
            )
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


def _check_model(folder: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    for name in ("weights", "tokenizer"):
        if saved.get(name) != current[name]:
            raise ModelError(
                f"{folder} holds trajectories of {saved.get('model')} ({name} {saved.get(name)}), not of "
                f"{current['model']} ({name} {current[name]}): collect them with this model, or train the other one"
            )
