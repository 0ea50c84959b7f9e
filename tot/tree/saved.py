"""Read saved runs as JSON data: a tree, a finished run with its tree, or the trace of a killed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tot.decoders.errors import TaskError, reason
from tot.decoders.files import regular
from tot.tree.calls import Call, calls_from_json, calls_to_json

FORMAT = "tot.tree"
VERSION = 2
RUN = {"format": "tot.run", "version": 2}
"""Identifies a finished run with its tree."""
TRACE = {"format": "tot.checkpoint", "version": 2}
"""Identifies the steps of a run, finished or not."""
_READABLE = {"tot.tree": (1, 2), "tot.run": (1, 2), "tot.checkpoint": (2,)}
"""Versions by format. Version 1 of a tree had fewer fields, and no links."""


def check_format(what: str | Path, data: Any, *formats: str) -> None:
    """Raise TaskError unless the data has one of these formats, by default any saved run, and a known version."""
    form = data.get("format") if isinstance(data, dict) else None
    if form is None:
        raise TaskError(f"{what} is not a tree of thoughts: save one with `tree.save(...)` or `tot solve --out`")
    if form not in (known := formats or (*_READABLE,)):
        raise TaskError(f"{what} has the format {form!r}: this program reads {', '.join(known)} here")
    if (version := data.get("version")) not in _READABLE[form]:
        raise TaskError(f"{what} has version {version!r} of {form}: this program reads {_READABLE[form][-1]}")


def read_run(path: str | Path) -> dict[str, Any]:
    """Read a saved run as JSON data with the key `tree`. A tree or an unfinished run has no other key.

    Raises TaskError if the file can't be read as JSON, is not a run, or has an unknown version.
    """
    try:
        text = regular(Path(path)).read_text(encoding="utf-8")
        lines = text[: text.rfind("\n")].split("\n") if _is_trace(text) else [text]
        data = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path} can't be read as JSON: {reason(error)}") from None
    run = data[0]
    check_format(path, run)
    if run["format"] == TRACE["format"]:
        try:
            run = data[-1]["run"] if "run" in data[-1] else _from_steps(data)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TaskError(f"{path} is damaged: {reason(error)}") from None
        check_format(path, run)
    if run["format"] == FORMAT:
        return {"tree": run}
    if "tree" not in run:
        raise TaskError(f"{path} is damaged: it has no tree")
    return {name: value for name, value in run.items() if name not in RUN}


def _is_trace(text: str) -> bool:
    return f'"{TRACE["format"]}"' in text.partition("\n")[0]


def _from_steps(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Build a tree from the steps of a trace. Each step holds the nodes that it changed."""
    nodes: dict[int, Any] = {0: {"id": 0}}
    links: dict[tuple[int, int], Any] = {}
    calls_by_node: dict[int, list[Call]] = {}
    for line in lines[1:]:
        nodes |= {node["id"]: node for node in line.get("tree", ())}
        links |= {(link["parent"], link["node"]): link for link in line.get("links", ())}
        for node, calls in calls_from_json(**line.get("requests", {"texts": [], "calls": {}})).items():
            calls_by_node.setdefault(node, []).extend(calls)
    # Skip links that later became the edge from the parent.
    links = {ends: link for ends, link in links.items() if nodes[ends[1]].get("parent") != ends[0]}
    root: dict[str, Any] = next((line["root"] for line in lines if line.get("step") == "start"), {})
    return {
        "format": FORMAT,
        "version": VERSION,
        "root": root,
        "nodes": [nodes[i] for i in sorted(nodes)],
        "links": [*links.values()],
        **(calls_to_json(calls_by_node) if calls_by_node else {}),
    }
