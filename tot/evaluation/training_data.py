"""Training data from searched trees, in the dataset formats of trl: conversations, preferences, and labelled steps.

A leaf is right or wrong if the task verified it or a reference scored it 1 or 0. Other trees give no rows. A thought is
right if a right leaf follows it (Math-Shepherd, Wang et al., 2024, section 3.2, hard estimation).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tot.config import SearchConfig
from tot.decoders.errors import OptionError, TaskError, reason
from tot.decoders.files import write_text
from tot.decoders.request import Message
from tot.evaluation.folder import installed, read_config, read_samples
from tot.evaluation.leaves import read_leaves
from tot.task.checked import CheckedTask
from tot.tree.calls import Call
from tot.tree.saved import read_run
from tot.tree.tree import Node, ThoughtTree

Format = Literal["sft", "preferences", "steps"]
Prompt = tuple[Message, ...]
_WRITING = ("generate", "escalate")
"""The purposes of calls that write thoughts."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A tree, whether its leaves are right, and the provenance of its rows."""

    tree: ThoughtTree
    leaves: dict[int, bool]
    about: dict[str, str]


def export(out: Path, runs: Sequence[Path], form: Format, task: str | None = None) -> str:
    """Write a JSON line for each example, and return the numbers of rows and trees as text.

    `task` is the task of the folders if it is not an installed one, because no code that a folder names is run.
    Raises OptionError, and writes no file, if there is no example.
    """
    lines: list[str] = []
    trees = unjudged = 0
    for judged in (tree for run in runs for tree in (_evaluated(run, task) if run.is_dir() else _saved(run))):
        trees, unjudged = trees + 1, unjudged + (not judged.leaves)
        rows = (json.dumps(row, ensure_ascii=False) for row in examples(judged, form))
        lines += [row.encode("utf-8", "replace").decode() + "\n" for row in rows]
    numbers = f"rows: {len(lines)}, trees: {trees}, without a verified or scored solution: {unjudged}"
    if not lines:
        raise OptionError(
            f"no row of format {form} ({numbers}): give a folder of `tot eval`, or trees of a task that verifies its "
            "answers, with right solutions that a model wrote, and wrong ones for preferences"
        )
    write_text(out, lines)
    return numbers


def _saved(path: Path) -> Iterator[Judged]:
    """Yield a saved tree. Without a verified leaf nothing is known: its task may not verify answers."""
    run = read_run(path)
    tree = ThoughtTree.from_json(run["tree"])
    parents = {node.parent for node in tree}
    last = {node.depth for node in tree if node.verified and not node.terminal}  # of a task without terminal states
    ends = [node for node in tree if node.id not in parents and (node.terminal or node.depth in last)]
    leaves = {node.id: node.verified for node in ends} if any(node.verified for node in ends) else {}
    about = {name: str(run.get(name, "")) for name in ("task", "model")}
    yield Judged(tree, leaves, about | {"question": path.stem, "tree": str(path), "right": "verified"})


def _evaluated(folder: Path, named: str | None) -> Iterator[Judged]:
    config = read_config(folder)
    about = {name: str(config.get(name, "")) for name in ("task", "model")}
    chosen = installed(folder, {"task": config.get("task")}, named)["task"]
    task = SearchConfig.of(None, {"prompts": config["prompts"]}).suited(chosen)
    judge = CheckedTask(task).score
    try:
        for sample in read_samples(folder):
            tree, scored = read_leaves(folder, sample, task)
            for node in tree.leaves():  # answers that the model was asked for
                if node.id not in scored and node.answer is not None and isinstance(sample["answer"], str):
                    scored[node.id] = node.answer, judge(node.answer, sample["reference"])
            leaves = {leaf: score == 1 for leaf, (_, score) in scored.items() if score in (0, 1)}
            place = {"question": str(sample["index"]), "tree": f"{folder}/trees/{sample['id']}.json"}
            yield Judged(tree, leaves, about | place | {"right": "reference"})
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TaskError(f"{folder} has no readable samples: {reason(error)}; give another folder") from None


def examples(judged: Judged, form: Format) -> Iterator[dict[str, Any]]:
    """Yield the rows of a tree: right replies, pairs of a right and a wrong reply to a prompt, or labelled steps."""
    tree, right = judged.tree, dict[int, bool]()
    for leaf, good in judged.leaves.items():
        for node in tree.path(tree[leaf]):
            right[node.id] = right.get(node.id, False) or good
    replies: dict[Prompt, dict[str, list[int]]] = {}
    paths: dict[tuple[str, ...], list[int]] = {}
    for leaf in judged.leaves:
        thoughts = {node.id: node.thought.text.strip() for node in tree.path(tree[leaf]) if node.thought is not None}
        paths[tuple(thoughts.values())] = list(thoughts)
        for prompt, (text, nodes) in _messages(tree, tree.path(tree[leaf])).items():
            if text not in replies.setdefault(prompt, {}) or right[nodes[-1]]:  # of equal replies, a right one
                replies[prompt][text] = nodes
    if form == "steps":  # which trl has for plain text only
        for texts, nodes in filter(all, paths.items()):
            steps = {"completions": list(texts), "labels": [right[node] for node in nodes]}
            yield {"prompt": tree.state(tree.root).question, **steps, **_source(judged, nodes)}
        return
    for prompt, texts_of in replies.items():
        chat = {"prompt": [message.model_dump(include={"role", "content"}) for message in prompt]}
        chosen = [(_said(text), nodes) for text, nodes in texts_of.items() if right[nodes[-1]]]
        rejected = [(_said(text), nodes) for text, nodes in texts_of.items() if not right[nodes[-1]]]
        if form == "sft":
            for said, nodes in chosen:
                yield chat | {"completion": said} | _source(judged, nodes)
        elif chosen and rejected:
            for i in range(max(len(chosen), len(rejected))):  # each at least once
                (good_text, nodes), (bad_text, others) = chosen[i % len(chosen)], rejected[i % len(rejected)]
                yield chat | {"chosen": good_text, "rejected": bad_text} | _source(judged, nodes, rejected_nodes=others)


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _source(judged: Judged, nodes: list[int], **others: list[int]) -> dict[str, Any]:
    model = (judged.tree[nodes[-1]].decoder or "").partition("@")[2]  # named if the search has several
    return {"provenance": judged.about | ({"model": model} if model else {}) | {"nodes": nodes, **others}}


def _messages(tree: ThoughtTree, path: Sequence[Node]) -> dict[Prompt, tuple[str, list[int]]]:
    """Return the model's messages on a path, with their nodes, by prompt. Pieces of one message are joined."""
    messages: dict[Prompt, tuple[str, list[int]]] = {}
    calls = [
        (node, *found)
        for node in path
        for name in getattr(node.thought, "parts", ())
        if (found := _call_of(tree, node, name))
    ]
    leaf = path[-1]
    calls += [(leaf, call, call.output) for call in tree.calls.get(leaf.id, ()) if call.purpose == "answer"]
    for node, call, text in calls:
        begun = [message.content for message in call.prompt[-1:] if message.role == "assistant"]
        prompt = call.prompt[:-1] if begun else call.prompt
        if prompt and text and all(part.kind != "approximate" for part in call.parts):
            nodes = dict.fromkeys([*messages.get(prompt, ("", []))[1], node.id])
            messages[prompt] = "".join([*begun, text]).strip(), list(nodes)
    return messages


def _call_of(tree: ThoughtTree, node: Node, name: str) -> tuple[Call, str] | None:
    """Return the call that wrote a part of a node's thought, and its text; None if no model wrote it.

    A thought that was listed or ranked with others in a call about its parent is a text of its own.
    """
    assert node.thought is not None
    drawn = node.thought.drawn.get(name)
    text = (node.thought.parts[name] if drawn is None else drawn.text).strip()
    own = [call for call in reversed(tree.calls.get(node.id, [])) if call.purpose in _WRITING and call.template == name]
    above = [call for call in tree.calls.get(node.parent or 0, []) if call.purpose in _WRITING]
    found = [(call, call.output) for call in own]
    found += [(call, choice) for call in above for choice in call.choices]
    found += [(call, text) for call in above if call.template != name and text in call.output]
    found.sort(key=lambda one: one[1].strip() != text)  # parsing may change a text, which may have several calls
    return next((one for one in found if (said := one[1].strip()) and (said in text or text in said)), None)
