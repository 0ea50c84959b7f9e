"""An evaluation's HTML page: scores, distributions, a table of the questions, and all trees in one file.

The page parses a tree only when the reader opens it. Writing the page holds one tree in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tot.decoders.errors import TaskError, reason
from tot.evaluation.folder import read_config, read_samples
from tot.evaluation.questions import parsed_reference
from tot.evaluation.results import Results, summarise, tokens_of
from tot.registry import is_installed, load_task
from tot.report.page import Block, page, tree_block
from tot.task.task import Task
from tot.tree.tree import ThoughtTree

_BARS = 12


def evaluation_page(folder: Path, task: str | None = None) -> Iterator[str]:
    """Yield the page of an evaluation's folder, finished or not, in pieces.

    `task` reads the references; by default the folder's, if it is an installed one. Raises OptionError for any other
    folder, and TaskError if the samples can't be read or are missing.
    """
    config = read_config(folder)
    try:
        samples = list(read_samples(folder))
        if not samples:
            raise ValueError("no sample is finished")
        record = config.get("record", {})
        results = replace(summarise(samples), verdict=record.get("verdict", "verified"), **_ended(folder))
        named = task or config["task"]
        reader = load_task(named) if task or is_installed(named) else None
        samples = [{**sample, "reference": _reference(reader, sample)} for sample in samples]
        search = config.get("search", record.get("search", {}).get("name"))
        parts = ", ".join(str(one) for one in (config.get("model"), search) if one is not None)
        overview: dict[str, Any] = {
            "title": f"{config['task']} on {Path(str(config['data'])).name}{f' with {parts}' if parts else ''}",
            "finished": (folder / "results.json").exists(),
            "figures": results.figures,
            "charts": _charts(samples, results),
            "samples": [_row(order, sample, results) for order, sample in enumerate(samples)],
            "config": (folder / "config.yaml").read_text(encoding="utf-8"),
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TaskError(
            f"{folder} has no readable samples: {reason(error)}; continue the evaluation with --resume"
        ) from None
    return page(overview["title"], _blocks(folder, samples, overview))


def _blocks(folder: Path, samples: Sequence[dict[str, Any]], overview: dict[str, Any]) -> Iterator[Block]:
    """Yield the trees, then the overview, which records for each sample whether its tree exists."""
    for row, sample in zip(overview["samples"], samples, strict=True):
        path, name = folder / "trees" / f"{sample['id']}.json", f"tree-{row['order']}"
        if not path.exists():
            continue
        names = ("answer", "certainty", "reference", "score", "solved", "stopped", "error")
        run = {name: sample.get(name) for name in names}
        run["usage"] = {"new_tokens": row["tokens"], "seconds": row["seconds"]}
        try:
            block = tree_block(ThoughtTree.load(path), run)
        except TaskError as error:
            row["error"] = row["error"] or str(error)
        else:
            row["tree"] = name
            yield name, block
    yield "evaluation", overview


def _ended(folder: Path) -> dict[str, Any]:
    """Return the results that only a finished evaluation's results.json records."""
    try:
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    wall = results.get("wall_seconds")
    return {
        "bad_rows": int(results["bad_rows"]),
        "searched": int(results.get("searched", 0)),
        "wall_seconds": None if wall is None else float(wall),
    }


def _row(order: int, sample: dict[str, Any], results: Results) -> dict[str, Any]:
    return {
        "order": order,
        "name": sample["id"] if results.samples > results.questions else str(sample["index"]),
        "question": str(sample["question"]),
        "answer": _text(sample["answer"]),
        "reference": _text(sample["reference"]),
        "score": sample["score"],
        "certainty": sample.get("certainty"),
        "error": sample["error"],
        "tokens": tokens_of(sample),
        "seconds": sample["measured"]["seconds"],
        "tree": None,
    }


def _reference(task: Task | None, sample: dict[str, Any]) -> Any:
    """The reference as the task reads it; as it is stored without a task or if the question is the reference."""
    stored = sample["reference"]
    return stored if task is None or stored == sample["question"] else parsed_reference(task, stored)


def _text(value: Any) -> str | None:
    """Render an answer or reference, which may be text, a number or a list of actions."""
    if value is None or isinstance(value, str):
        return value
    return "  ".join(map(str, value)) if isinstance(value, list) else json.dumps(value, ensure_ascii=False)


def _charts(samples: Sequence[dict[str, Any]], results: Results) -> list[dict[str, Any]]:
    charts = [
        _histogram("New tokens per sample", [tokens_of(sample) for sample in samples]),
        _histogram("Latency in seconds", [sample["measured"]["seconds"] for sample in samples]),
    ]
    if results.score is not None:
        charts.insert(0, _histogram("Scores", [sample["score"] for sample in samples], (0.0, 1.0)))
    if results.score is not None and results.certainty is not None:
        bins = results.certainty.bins
        bars = [
            (one.score, f"{one.score:.0%}", f"{one.certainty:.0%} sure: {one.score:.1%} of {one.samples:,}")
            for one in bins
        ]
        charts.append(_chart("Score by certainty", f"{bins[0].certainty:.0%}", f"{bins[-1].certainty:.0%}", bars))
    return charts


def _histogram(title: str, values: Sequence[float], ends: tuple[float, float] | None = None) -> dict[str, Any]:
    counts, edges = np.histogram(values, bins=_BARS, range=ends)
    bars = [
        (int(count), f"{count:,}", f"{low:,.4g} to {high:,.4g}: {count:,}")
        for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True)
    ]
    return _chart(title, f"{edges[0]:,.4g}", f"{edges[-1]:,.4g}", bars)


def _chart(title: str, first: str, last: str, bars: Sequence[tuple[float, str, str]]) -> dict[str, Any]:
    """Return a chart of the page: the ends of its axis, and (height, text, note) of each bar."""
    described = [{"height": height, "text": text, "note": note} for height, text, note in bars]
    return {"title": title, "ends": [first, last], "bars": described}
