"""Export the paths of evaluations as training data, in the JSON Lines formats of TRL.

A thought is right if a right answer is below it, and wrong if only wrong answers are (the hard estimate of
Math-Shepherd, Wang et al., 2024, section 3.2). Without a known answer below it, it is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from tot.decoders.errors import OptionError, TaskError
from tot.decoders.files import sync, writing
from tot.decoders.request import Message
from tot.evaluation.folder import read_config, read_samples
from tot.registry import load_task, refuse_code
from tot.task.checked import CheckedTask
from tot.task.task import Task, answer_text
from tot.tree.calls import Call
from tot.tree.thought import State, Thought
from tot.tree.tree import Node, ThoughtTree

_Text = tuple[int, list[dict[str, Any]], dict[str, Any]]
"""A message of the model: a node on the path, the messages of the prompt, and the message."""


def export(
    folders: Sequence[str | Path],
    out: str | Path,
    task: Task | type[Task] | str | None = None,
    held_out: float = 0.1,
) -> dict[str, int]:
    """Write `sft.jsonl`, `preference.jsonl` and `steps.jsonl` to the folders `train` and `held_out` of a new folder.

    Args:
        folders: Finished evaluations of one task.
        out: The folder to create.
        task: The evaluations' task, if it is not an installed one.
        held_out: Share of the questions to hold out. A hash of the question's words decides.

    Returns:
        The number of lines by file, such as "train/sft.jsonl". A file without lines is not written.

    Raises:
        OptionError: An option is invalid, `out` exists, or a folder is not a finished evaluation of the task.
        TaskError: A tree can't be read, there is no right text, or `out` can't be written.
    """
    out, configs = Path(out), {folder: read_config(folder) for folder in map(Path, folders)}
    if not 0 <= held_out < 1:
        raise OptionError(f"held_out is {held_out}: give a share of the questions, at least 0 and less than 1")
    if len(names := {str(config.get("task")) for config in configs.values()}) != 1:
        raise OptionError(f"{len(names)} tasks to export ({', '.join(sorted(names))}): give folders of one task")
    for folder in configs:
        if not (folder / "results.json").exists() or not (folder / "samples.jsonl").is_file():
            raise OptionError(f"{folder} is not finished: continue the evaluation with --resume")
        if task is None:
            refuse_code({"task": configs[folder].get("task")}, folder / "config.yaml")
    if out.exists():
        raise OptionError(f"{out} exists: give another folder")
    loaded, seen, counts = load_task(task or names.pop()), set[bytes](), Counter[str]()
    with writing(out, "give another folder"):
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary, ExitStack() as stack:
            begun, files = Path(temporary) / "new", dict[str, IO[bytes]]()
            for question, kind, row in chain.from_iterable(_rows(*one, loaded, seen) for one in configs.items()):
                place = hashlib.sha256(" ".join(question.split()).encode("utf-8", "replace")).digest()
                name = f"{'held_out' if int.from_bytes(place) < held_out * 2**256 else 'train'}/{kind}.jsonl"
                if name not in files:
                    (begun / name).parent.mkdir(parents=True, exist_ok=True)
                    files[name] = stack.enter_context((begun / name).open("xb"))
                files[name].write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
                counts[name] += 1
            if not any(name.endswith("/sft.jsonl") for name in counts):
                raise TaskError(f"no right text in {', '.join(map(str, configs))}: evaluate more questions or samples")
            for name, file in files.items():
                file.close()
                sync(begun / name)
            begun.rename(out)
    return dict(sorted(counts.items()))


def _rows(
    folder: Path, config: Mapping[str, Any], loaded: Task, seen: set[bytes]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the question, the kind and the content of each row whose texts are not in `seen`."""
    task = CheckedTask(loaded.with_prompts(config.get("prompts")))
    generators = task.generator, config.get("record", {}).get("generator", {}).get("name")
    pieces = any(str(name).startswith("continue") for name in generators)
    for _, repeats in groupby(read_samples(folder), key=itemgetter("index")):
        texts: defaultdict[str, dict[str, bool]] = defaultdict(dict)
        for sample in repeats:
            question = sample["question"]
            if sample["error"] is not None:
                continue
            try:
                tree = ThoughtTree.load(folder / "trees" / f"{sample['id']}.json")
            except TaskError as error:
                raise TaskError(f"{error}; restore the file, or leave {folder} out") from None
            ends = _ends(task, tree, sample.get("reference"))
            labels = _labels(tree, ends)
            for end in ends:
                path = [(node, node.thought) for node in tree.path(tree[end]) if node.thought is not None]
                if any(thought.messages for _, thought in path):  # saved prompts lack the calls of functions
                    continue
                steps = [thought.answer_text.strip() for _, thought in path]
                if len(path) > 1 and _is_new(seen, question, steps):
                    right = [labels[node.id] for node, _ in path]
                    yield question, "steps", {"prompt": tree.question, "completions": steps, "labels": right}
                for node_id, prompt, text in _texts(task, tree, path, pieces):
                    same = texts[json.dumps(prompt)]
                    same[json.dumps([text])] = same.get(json.dumps([text]), False) or labels[node_id]
        for asked, same in texts.items():
            new = {text: is_right for text, is_right in same.items() if _is_new(seen, asked, text)}
            chosen, rejected = ([json.loads(one) for one in new if new[one] is side] for side in (True, False))
            begin = {"prompt": json.loads(asked)}
            yield from ((question, "sft", {**begin, "completion": one}) for one in chosen)
            for one, other in zip(chosen, rejected, strict=False):
                yield question, "preference", {**begin, "chosen": one, "rejected": other}


def _is_new(seen: set[bytes], *texts: Any) -> bool:
    """Add the digest of texts to `seen`. Return whether it was not there."""
    count = len(seen)
    seen.add(hashlib.blake2b(json.dumps(texts).encode(), digest_size=16).digest())
    return len(seen) > count


def _ends(task: CheckedTask, tree: ThoughtTree, reference: Any) -> dict[int, bool]:
    """Return whether the answer is right, for each node at which a path ends with a known result."""
    ends, known = {}, dict[str, bool]()
    for node in tree:
        if node.thought is None or not (node.terminal or node.answer is not None):
            continue
        with suppress(TaskError):  # the task can't read or score it: its result is not known
            state = _typed(task, tree, node)
            answer = task.answer_at(state)
            if answer is None and node.answer is not None:
                answer = task.answer_in(node.answer)  # of the same type, if the task reads its own answers
                if answer is None or answer_text(answer) != node.answer:
                    answer = task.read("answer", node.answer)
            finished = task.is_whole(node.thought) and not node.thought.truncated
            if answer is None and not finished and task.is_goal(state):
                continue
            if (text := json.dumps(answer, default=str)) not in known:
                verified = node.verified and task.verdict == Task.verdict
                known[text] = verified or task.score(answer, reference) == 1
            ends[node.id] = known[text]
    return ends


def _typed(task: CheckedTask, tree: ThoughtTree, node: Node) -> State:
    """Return the state of a node with the objects of its thoughts, which are not saved."""
    state = tree.state(node)
    return state.model_copy(update={"thoughts": tuple(task.typed(one) or one for one in state.thoughts)})


def _labels(tree: ThoughtTree, ends: Mapping[int, bool]) -> dict[int, bool]:
    """Return whether a right end is below, for each node with an end below it."""
    parents = {node.id: [] if node.parent is None else [node.parent] for node in tree}
    for tail, head, _ in tree.links():
        parents[head.id].append(tail.id)
    labels: dict[int, bool] = {}
    for right in (True, False):  # one right end outweighs the wrong ones
        above = [node for node, is_right in ends.items() if is_right is right]
        while above:
            if (node := above.pop()) not in labels:
                labels[node] = right
                above += parents[node]
    return labels


def _texts(task: CheckedTask, tree: ThoughtTree, path: Sequence[tuple[Node, Thought]], pieces: bool) -> list[_Text]:
    """Return the messages that the model finished on a path. With `pieces`, its thoughts are pieces of one message."""
    found: list[_Text] = []

    def add(node: Node, prompt: Sequence[Message], text: str, call: Call | None = None) -> None:
        """Add a text. If the prompt has the beginning of the message, it replaces the earlier texts of the message."""
        *before, last = [message.model_dump(include={"role", "content"}) for message in prompt]
        begin = ""
        if last["role"] == "assistant":
            begin = last["content"] if call or last["content"][-1:].isspace() else last["content"] + " "
            found[:] = [one for one in found if one[1] != before]
        else:
            before.append(last)
        thinking = "".join(part.text for part in (call.parts if call else ()) if part.kind == "thinking")
        apart = {"reasoning_content": thinking} if thinking.strip() and thinking not in text else {}
        found.append((node.id, before, {"role": "assistant", "content": begin + text, **apart}))

    for node, thought in path:
        calls, begun = tree.calls.get(node.id, []), dict[str, str]()
        for name, text in () if pieces and not thought.ended else thought.parts.items():
            own = [call for call in calls if call.purpose in ("generate", "escalate") and call.template == name]
            one = thought.ended or len(own) == 1  # otherwise the thought is one of several samples
            if call := next((call for call in reversed(own) if call.output and (one or text in call.output)), None):
                add(node, call.prompt, call.output, call)
            else:  # listed with others, or chosen
                with suppress(TaskError):  # the task may lack the template
                    add(node, task.prompt(name, _typed(task, tree, tree[node.parent or 0]), **begun), text)
            begun[name] = text
        for call in calls:
            if call.purpose == "answer" and call.output:
                add(node, call.prompt, call.output, call)
    return [] if any(thought.truncated for _, thought in path) else found
