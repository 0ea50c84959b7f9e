"""Checkpoint: a trace file with one JSON line per step, from which a killed run can resume.

Resuming runs the search again from the start and replays the recorded results instead of calling the model. Searches
are deterministic, so this reaches the same state, and new steps follow. Every line also holds the nodes that it
changed, so that the tree of an unfinished run can be read without the task.
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
from tot.decoders.files import append, hold, regular, writing
from tot.decoders.request import Usage
from tot.llm.replies import Evaluation, Proposal
from tot.search.steps import Evaluate, Expand, Step
from tot.tree.calls import Call, calls_from_json, calls_to_json
from tot.tree.saved import TRACE, check_format
from tot.tree.thought import State
from tot.tree.tree import ThoughtTree, link_to_json

_PROPOSALS: TypeAdapter[Any] = TypeAdapter(list[list[Proposal]])
_EVALUATIONS: TypeAdapter[Any] = TypeAdapter(list[Evaluation])
_ANSWERS: TypeAdapter[Any] = TypeAdapter(list[Any])
_USAGE = TypeAdapter(Usage)
_BY_PURPOSE: TypeAdapter[Any] = TypeAdapter(dict[str, dict[str, int]])


@dataclass(frozen=True, slots=True)
class Recorded:
    """The results of a step, and their cost."""

    results: list[Any]
    calls: int = 0
    spent: Usage = field(default_factory=Usage)
    calls_by_node: Mapping[int, Sequence[Call]] = field(default_factory=dict)
    """Only set when read from a trace. When a step is written, the calls come from the tree."""
    by_purpose: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Calls and tokens by purpose since the start of the search. The last of several steps that ended together may
    have none."""


class Checkpoint:
    """The trace file of one run, open for appending and locked by one process."""

    def __init__(
        self,
        path: Path,
        file: IO[bytes],
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
        """True until the first step is recorded."""
        self._nodes: dict[int, dict[str, Any]] = {}
        self._links: set[tuple[int, int]] = set()
        self._recorded_calls: dict[int, int] = {}
        """Number of recorded calls, by node."""

    @classmethod
    def create(cls, path: str | Path, overwrite: bool = False, **header: Any) -> Checkpoint:
        """Create a trace; `header` is JSON data for its first line. With `overwrite`, replace a finished run.

        Raises TaskError if the file holds another run or is not a trace, or if it can't be written.
        """
        path = Path(path)
        with _locked(path, "a+b") as (file, release, text):
            existing, lines = _parse(path, text)
            if existing is None and text:
                raise TaskError(f"{path} exists and is not a trace: give another file")
            if lines and lines[-1]["step"] == "end" and not overwrite:
                raise TaskError(f"{path} holds a finished run: give another file, or add --overwrite")
            if any(line["step"] != "start" for line in lines) and lines[-1]["step"] != "end":
                raise TaskError(f"{path} holds an unfinished run: continue it with --resume {path}, or delete it")
            file.truncate(0)
            trace = cls(path, file, release, header, ())
            trace._write({**TRACE, **header})
        return trace

    @classmethod
    def resume(cls, path: str | Path) -> Checkpoint:
        """Open the trace of an unfinished run. Raises TaskError if it is not a trace, or if its run was finished."""
        path = Path(path)
        with _locked(path, "r+b") as (file, release, text):
            whole = text[: text.rfind(b"\n") + 1]  # a killed process may leave half a line
            header, lines = _parse(path, whole)
            if header is None:
                raise TaskError(f"{path} is not a trace of a run: give the .jsonl file that `tot solve --out` wrote")
            if lines and lines[-1]["step"] == "end":
                raise TaskError(f"{path} holds a finished run: there is nothing to resume")
            while lines and lines[-1].get("more"):  # a full disk or a kill interrupted a round
                lines.pop()
                whole = whole[: whole.rfind(b"\n", 0, -1) + 1]
            file.truncate(len(whole))
        return cls(path, file, release, header, lines)

    def setting(self, name: str, default: Any) -> Any:
        """Return a setting of the resumed run, or `default` in a new run."""
        return self._recorded[0].get(name, default) if self._recorded else default

    def begin(self, root: State, about: dict[str, Any]) -> None:
        """Record the run's settings. If resumed, raise TaskError naming the first setting that differs."""
        line = json.loads(json.dumps({"step": "start", **about, "root": root.model_dump(mode="json")}))
        if not self._recorded:
            self._write(line)
            return
        recorded = dict(self._recorded.popleft())
        for name, value in line.items():
            if recorded.get(name) != value:
                raise TaskError(
                    f"{self.path} holds another run: its {name} is {recorded.get(name)!r}, not {value!r}; resume it "
                    "with the options that it was started with"
                )

    def next_round(self, steps: Sequence[Step]) -> dict[Step, Recorded]:
        """Return the records of the steps that ended together next, out of these; empty at the end of the trace.

        Raises TaskError if the trace is damaged or its next line records another step.
        """
        while len(self._recorded) > 1 and self._recorded[0]["step"] == "answer":
            self._recorded.popleft()  # a run with a larger budget has continued the search after it
        found: dict[Step, Recorded] = {}
        more = bool(self._recorded) and self._recorded[0]["step"] != "answer"
        while more:
            line = self._recorded[0]
            fits = (step for step in steps if step not in found and _step_to_json(step).items() <= line.items())
            step = next(fits, steps[0])
            more = bool(line.get("more"))
            found[step] = self._next(step)
        return found

    def answers(self) -> Recorded | None:
        """Return the record of the answers, which follow all steps; None at the end of the trace."""
        return self._next(None) if self._recorded else None

    def _next(self, step: Step | None) -> Recorded:
        line = self._recorded.popleft()
        expected = _step_to_json(step)
        if {name: line.get(name) for name in expected} != expected:
            raise TaskError(
                f"{self.path} does not fit: its next step is {line.get('step')} of {line.get('nodes')}, not "
                f"{expected['step']} of {expected.get('nodes')}; the task or the program has changed: start a new run"
            )
        try:
            spent = _USAGE.validate_python(line["spent"])
            calls_by_node = calls_from_json(**line["requests"])
            for node, calls in calls_by_node.items():
                self._recorded_calls[node] = self._recorded_calls.get(node, 0) + len(calls)
            by_purpose = _BY_PURPOSE.validate_python(line["by_purpose"])
            results = _results(step).validate_python(line["results"])
            return Recorded(results, int(line["calls"]), spent, calls_by_node, by_purpose)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            where = f"in a line of {line.get('step')} ({reason(error)})"
            raise TaskError(f"{self.path} is damaged {where}: start a new run") from None

    def write(self, ended: Mapping[Step | None, Recorded], tree: ThoughtTree) -> None:
        """Record steps that ended together, or the answers (None), with the parts of the tree that changed since."""
        self._recorded.clear()  # answers of a run with a smaller budget
        changed = [node for node in tree if vars(node) != self._nodes.get(node.id)]
        links = [link for link in tree.links() if (link[0].id, link[1].id) not in self._links]
        new_calls = {node: calls[self._recorded_calls.get(node, 0) :] for node, calls in tree.calls.items()}
        self._recorded_calls = {node: len(calls) for node, calls in tree.calls.items()}
        self._nodes |= {node.id: dict(vars(node)) for node in changed}
        self._links |= {(tail.id, head.id) for tail, head, _ in links}
        lines = [
            {
                **_step_to_json(step),
                "more": True,
                "results": _results(step).dump_python(one.results, mode="json", exclude_defaults=True, by_alias=True),
                "calls": one.calls,
                "spent": asdict(one.spent),
                "by_purpose": one.by_purpose,
                "requests": {"texts": [], "calls": {}},
            }
            for step, one in ended.items()
        ]
        del lines[-1]["more"]
        lines[-1] |= {
            "tree": [node.to_json() for node in changed],
            "links": [link_to_json(*link) for link in links],
            "requests": calls_to_json({node: calls for node, calls in new_calls.items() if calls}),
        }
        self._write(*lines)

    def finish(self, run: dict[str, Any]) -> None:
        """Write the finished run, and close the file."""
        self._write({"step": "end", "run": run})
        self.close()

    def close(self) -> None:
        if not self._file.closed:
            self._file.close()
            self._release()

    def _write(self, *lines: dict[str, Any]) -> None:
        self.empty = self.empty and lines[0].get("step", "start") == "start"
        text = "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines)
        with writing(self.path, "make room, then resume"):
            append(self._file, text.encode())


def _step_to_json(step: Step | None) -> dict[str, Any]:
    if step is None:
        return {"step": "answer"}
    nodes = [node.id for node in step.nodes]
    if isinstance(step, Evaluate):
        return {"step": "evaluate", "nodes": nodes, "fast": step.fast}
    return {"step": "expand", "nodes": nodes, "sample": step.sample, "purpose": step.purpose, "turn": step.turn}


def _results(step: Step | None) -> TypeAdapter[Any]:
    return _ANSWERS if step is None else _PROPOSALS if isinstance(step, Expand) else _EVALUATIONS


@contextmanager
def _locked(path: Path, mode: str) -> Iterator[tuple[IO[bytes], Callable[[], None], bytes]]:
    """Lock and open a file for this process; yield it with its release and content.

    If the block fails, close the file, and delete it if it is new.
    """
    with ExitStack() as on_refusal:
        try:
            if path.is_symlink():
                raise OSError("it is a link")
            folder = path.parent.resolve(strict=True)
            refusal = TaskError(f"{path} is in use by another run: wait for it, or give another file")
            release = hold(folder / f".{path.name}.lock", refusal)
            on_refusal.callback(release)
            new = not regular(path).exists()
            file = on_refusal.enter_context(path.open(mode, buffering=0))
            if new:
                on_refusal.callback(path.unlink)
            file.seek(0)
            text = file.read()
        except OSError as error:
            raise TaskError(f"{path} can't be opened: {reason(error)}; give another file") from None
        yield file, release, text
        on_refusal.pop_all()


def _parse(path: Path, text: bytes) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """Return the header and the steps. The header is None if the text is not a trace."""
    header: dict[str, Any] | None = None
    lines: list[dict[str, Any]] = []
    for number, raw in enumerate(text.split(b"\n")[:-1], 1):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):
            line = None
        if number == 1:
            if not isinstance(line, dict) or line.get("format") != TRACE["format"]:
                return None, []
            check_format(path, line)
            header = line
        elif isinstance(line, dict) and "step" in line:
            lines.append(line)
        else:
            raise TaskError(f"{path}, line {number} is damaged: delete it and the following lines, then resume")
    return header, lines
