"""Checkpoint: a run written down as it happens, one JSON line a step, so that a killed run can go on where it was.

A resumed search is run again from the start, taking the recorded steps' results instead of asking for them: searches
are deterministic, so it comes to the same place, and goes on from there. Every line also holds the nodes it touched, so
that the tree of an unfinished run can be read without the task.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from tot.decoders.errors import TaskError, reason
from tot.decoders.files import hold, writing
from tot.decoders.request import Usage
from tot.llm.replies import Evaluation, Proposal
from tot.search.steps import Expand, Step
from tot.tree.calls import Call, calls_from_json, calls_to_json
from tot.tree.thought import State
from tot.tree.tree import ThoughtTree, link_to_json

_FORMAT = "tot.checkpoint"
_VERSION = 1
_DRAFTS: TypeAdapter[Any] = TypeAdapter(list[list[Proposal]])
_EVALUATIONS: TypeAdapter[Any] = TypeAdapter(list[Evaluation])
_ANSWERS: TypeAdapter[Any] = TypeAdapter(list[Any])
_USAGE = TypeAdapter(Usage)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What came of a step, and what it took."""

    results: list[Any]
    calls: int
    spent: Usage
    asked: Mapping[int, Sequence[Call]] = field(default_factory=dict)
    """What was asked, by node; read from a trace only, a tree that is written has it."""


class Checkpoint:
    """One run's file, open for appending; one process at a time."""

    def __init__(
        self,
        path: Path,
        file: IO[str],
        release: Callable[[], None],
        header: dict[str, Any],
        lines: Iterable[dict[str, Any]],
    ) -> None:
        self.path = path
        self._release = release
        self.header = header
        self._file = file
        self._recorded = deque(lines)
        self.empty = not self._recorded
        """True while no step was done."""
        self._nodes: dict[int, dict[str, Any]] = {}
        self._links: set[tuple[int, int]] = set()
        self._asked: dict[int, int] = {}
        """By node: how many calls are written down."""

    @classmethod
    def create(cls, path: str | Path, **header: Any) -> Checkpoint:
        """A new trace; `header` is JSON data that goes in front of it.

        Raises TaskError where there is an unfinished one already, or something else, and where none can be written.
        """
        path = Path(path)
        with _opened(path, "a+") as (file, release, text):
            found, lines = _parse(path, text)
            if found is None and text:
                raise TaskError(f"{path} holds something other than a trace: give another file")
            if any(line["step"] != "start" for line in lines) and lines[-1]["step"] != "end":
                raise TaskError(f"{path} holds an unfinished run: go on with --resume {path}, or delete it")
            file.seek(0)
            file.truncate()
            trace = cls(path, file, release, header, ())
            trace._write({"format": _FORMAT, "version": _VERSION, **header})
        return trace

    @classmethod
    def resume(cls, path: str | Path) -> Checkpoint:
        """Go on with a trace. Raises TaskError where there is none, or its run was finished."""
        path = Path(path)
        with _opened(path, "r+") as (file, release, text):
            whole = text[: text.rfind("\n") + 1]  # a killed process may leave half a line
            found, lines = _parse(path, whole)
            if found is None:
                raise TaskError(f"{path} is not a trace of a run: give the .jsonl file that `tot solve --out` wrote")
            if lines and lines[-1]["step"] == "end":
                raise TaskError(f"{path} is of a run that was finished: there is nothing to go on with")
            file.seek(len(whole.encode()))
            file.truncate()
        return cls(path, file, release, found, lines)

    def begin(self, root: State, about: dict[str, Any]) -> None:
        """Note what the run is about; resumed, check that it is about the same. Raises TaskError naming what is not."""
        line = json.loads(json.dumps({"step": "start", **about, "root": root.model_dump(mode="json")}))
        if not self._recorded:
            self._write(line)
            return
        recorded = dict(self._recorded.popleft())
        for name, wanted in line.items():
            if recorded.get(name) != wanted:
                raise TaskError(
                    f"{self.path} is of another run: its {name} is {recorded.get(name)!r}, not {wanted!r}; resume it "
                    "with what it was started with"
                )

    def step(self, step: Step | None) -> Recorded | None:
        """What was recorded of `step`, or of the answers, which come after all steps (None); None where the record
        ends. Raises TaskError where it tells of another step, or is damaged."""
        if not self._recorded:
            return None
        line = self._recorded.popleft()
        wanted = _described(step)
        if {name: line.get(name) for name in wanted} != wanted:
            raise TaskError(
                f"{self.path} does not fit: it goes on with {line.get('step')} of {line.get('nodes')}, the search with "
                f"{wanted['step']} of {wanted.get('nodes')}; the task or the program has changed since: start anew"
            )
        try:
            spent = _USAGE.validate_python(line["spent"])
            asked = calls_from_json(**line.get("asked", {"texts": [], "calls": {}}))
            for node, some in asked.items():
                self._asked[node] = self._asked.get(node, 0) + len(some)
            return Recorded(_results(step).validate_python(line["results"]), int(line["calls"]), spent, asked)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            what = f"in a line of {line.get('step')} ({reason(error)})"
            raise TaskError(f"{self.path} is damaged {what}: start anew") from None

    def write(self, step: Step | None, done: Recorded, tree: ThoughtTree) -> None:
        """A step, or the answers (None), what came of it, and what of the tree is not as it was written last."""
        changed = [node for node in tree if vars(node) != self._nodes.get(node.id)]
        links = [link for link in tree.links() if (link[0].id, link[1].id) not in self._links]
        asked = {node: calls[self._asked.get(node, 0) :] for node, calls in tree.calls.items()}
        self._asked = {node: len(calls) for node, calls in tree.calls.items()}
        self._nodes |= {node.id: dict(vars(node)) for node in changed}
        self._links |= {(tail.id, head.id) for tail, head, _ in links}
        self._write(
            {
                **_described(step),
                "results": _results(step).dump_python(done.results, mode="json", exclude_defaults=True),
                "calls": done.calls,
                "spent": asdict(done.spent),
                "tree": [node.to_json() for node in changed],
                "links": [link_to_json(*link) for link in links],
                "asked": calls_to_json({node: calls for node, calls in asked.items() if calls}),
            }
        )

    def finish(self, run: dict[str, Any]) -> None:
        """Write the finished run, and close."""
        self._write({"step": "end", "run": run})
        self.close()

    def close(self) -> None:
        self._file.close()
        self._release()

    def _write(self, line: dict[str, Any]) -> None:
        self.empty = self.empty and line.get("step", "start") == "start"
        with writing(self.path, "make room, then resume"):
            self._file.write(json.dumps(line, ensure_ascii=True) + "\n")
            self._file.flush()


def _described(step: Step | None) -> dict[str, Any]:
    if step is None:
        return {"step": "answer"}
    kind = {"step": "expand"} if isinstance(step, Expand) else {"step": "evaluate", "fast": step.fast}
    return {**kind, "nodes": [node.id for node in step.nodes]}


def _results(step: Step | None) -> TypeAdapter[Any]:
    return _ANSWERS if step is None else _DRAFTS if isinstance(step, Expand) else _EVALUATIONS


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[tuple[IO[str], Callable[[], None], str]]:
    """A file, locked for this process, and its text; closed where the block fails."""
    try:
        file = path.open(mode, encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise TaskError(f"{path} can't be opened: {reason(error)}; give another file") from None
    with ExitStack() as on_refusal:
        on_refusal.enter_context(file)
        refusal = TaskError(f"{path} is in use by another run: wait for it, or give another file")
        with writing(path):
            release = hold(path.with_name(f".{path.name}.lock"), refusal)
        on_refusal.callback(release)
        file.seek(0)
        yield file, release, file.read()
        on_refusal.pop_all()


def _parse(path: Path, text: str) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The header and the steps; no header where this is not a trace."""
    header: dict[str, Any] | None = None
    lines: list[dict[str, Any]] = []
    for number, raw in enumerate(text.split("\n")[:-1], 1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if number == 1:
            if not isinstance(line, dict) or line.get("format") != _FORMAT:
                return None, []
            if line.get("version") != _VERSION:
                raise TaskError(f"{path} has version {line.get('version')!r}: this program reads {_VERSION}")
            header = line
        elif isinstance(line, dict) and "step" in line:
            lines.append(line)
        else:
            raise TaskError(f"{path}, line {number} is damaged: delete it and what follows, then resume")
    return header, lines
