"""Saved runs, read as JSON data: a tree alone, a finished run with its tree, a trace of a run that was killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tot.decoders.errors import TaskError, reason
from tot.tree.calls import Call, calls_from_json, calls_to_json

FORMAT = "tot.tree"
VERSION = 2


def read_run(path: str | Path) -> dict[str, Any]:
    """A saved run as JSON data, its `tree` among it; of a tree alone, and of an unfinished run's trace, only that.

    Raises TaskError for a file that can't be read as JSON, and for a damaged trace.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = text[: text.rfind("\n")].split("\n") if _is_trace(text) else [text]
        data = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path} can't be read as JSON: {error}") from None
    found: dict[str, Any] = data[-1] if isinstance(data[-1], dict) else {}
    if "run" in found:
        found = found["run"]
    elif len(data) > 1:
        try:
            found = _from_steps(data)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TaskError(f"{path} is damaged: {reason(error)}") from None
    return found if "tree" in found else {"tree": found}


def _is_trace(text: str) -> bool:
    return '"tot.checkpoint"' in text.partition("\n")[0]


def _from_steps(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """A tree from the steps of a trace: each tells the nodes that it touched, as they were after it."""
    nodes: dict[int, Any] = {0: {"id": 0}}
    links: dict[tuple[int, int], Any] = {}
    asked: dict[int, list[Call]] = {}
    for line in lines[1:]:
        nodes |= {node["id"]: node for node in line.get("tree", ())}
        links |= {(link["parent"], link["node"]): link for link in line.get("links", ())}
        for node, calls in calls_from_json(**line.get("asked", {"texts": [], "calls": {}})).items():
            asked.setdefault(node, []).extend(calls)
    links = {ends: link for ends, link in links.items() if nodes[ends[1]].get("parent") != ends[0]}  # moved since
    root: dict[str, Any] = next((line["root"] for line in lines if line.get("step") == "start"), {})
    return {
        "format": FORMAT,
        "version": VERSION,
        "root": root,
        "nodes": [nodes[i] for i in sorted(nodes)],
        "links": [*links.values()],
        **(calls_to_json(asked) if asked else {}),
    }
