"""Read saved runs as JSON data: a tree, a finished run with its tree, or the trace of a killed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tot.decoders.errors import TaskError, reason
from tot.tree.calls import Call, calls_from_json, calls_to_json

FORMAT = "tot.tree"
VERSION = 2


def read_run(path: str | Path) -> dict[str, Any]:
    """Read a saved run as JSON data with the key `tree`. A tree or an unfinished run has no other key.

    Raises TaskError if the file can't be read as JSON, or if the trace is damaged.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = text[: text.rfind("\n")].split("\n") if _is_trace(text) else [text]
        data = [json.loads(line) for line in lines]
    except (OSError, ValueError, RecursionError) as error:
        raise TaskError(f"{path} can't be read as JSON: {error}") from None
    run: dict[str, Any] = data[-1] if isinstance(data[-1], dict) else {}
    if "run" in run:
        run = run["run"]
    elif len(data) > 1:
        try:
            run = _from_steps(data)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise TaskError(f"{path} is damaged: {reason(error)}") from None
    return run if "tree" in run else {"tree": run}


def _is_trace(text: str) -> bool:
    return '"tot.checkpoint"' in text.partition("\n")[0]


def _from_steps(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Build a tree from the steps of a trace. Each step holds the nodes that it changed."""
    nodes: dict[int, Any] = {0: {"id": 0}}
    links: dict[tuple[int, int], Any] = {}
    calls_by_node: dict[int, list[Call]] = {}
    for line in lines[1:]:
        nodes |= {node["id"]: node for node in line.get("tree", ())}
        links |= {(link["parent"], link["node"]): link for link in line.get("links", ())}
        for node, calls in calls_from_json(**line.get("asked", {"texts": [], "calls": {}})).items():
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
