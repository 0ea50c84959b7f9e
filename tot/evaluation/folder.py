"""The folder of an evaluation: config.yaml, samples.jsonl, trees/, results.json, log.txt. One process writes it.

A sample is one line, on the disk before the next is begun: a kill at any moment loses what was in flight, no more. At
the end the lines are put in the order of the problems.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

import yaml

from tot.decoders.errors import OptionError, TaskError, reason
from tot.decoders.files import hold, replacing, write_json, write_text, writing
from tot.decoders.remote.options import TRANSPORT
from tot.evaluation.options import FORMAT, OF_RAY, VERSION, as_now, read_mapping
from tot.report.terminal import plain

UNCOMPARED = ("concurrency", "executor", *OF_RAY)
"""Options that don't change what samples are."""
_MAKE_ROOM = "make room, then go on with --resume"


class Folder:
    """An evaluation's folder, open for writing."""

    def __init__(self, path: Path, options: dict[str, Any], record: dict[str, Any], resume: bool) -> None:
        """Make the folder or, with `resume`, go on with what is there. `options` and `record` say what it is of; of the
        limit of rows there may be more than it was begun with.

        Raises OptionError for a folder in use, of something else, or of another configuration, naming the difference.
        """
        self.path = path
        self.done: set[tuple[int, int]] = set()
        """(index, repeat) of the samples that are there."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            refusal = OptionError(f"{path} is in use by another run: wait for it, or give another folder")
            self._release = hold(path / ".lock", refusal)
        except OSError as error:
            raise OptionError(f"{path} can't be made: {reason(error)}; give another folder") from None
        try:
            self.changed_versions = self._begin(options, record, resume)
            (path / "trees").mkdir(exist_ok=True)
            (path / "samples.jsonl").touch()
            self._read()
            self._file: IO[bytes] = (path / "samples.jsonl").open("ab", buffering=0)
        except BaseException:
            self._release()
            raise

    def _begin(self, options: dict[str, Any], record: dict[str, Any], resume: bool) -> list[str]:
        """Write what the folder is of, or compare; returns the versions that are others by now."""
        if not (self.path / "config.yaml").exists():
            if any(not entry.name.startswith(".") for entry in self.path.iterdir()):
                raise OptionError(f"{self.path} holds something other than an evaluation: give another folder")
            self._write_config(options, record)
            return []
        there = read_config(self.path)
        if not resume:
            raise OptionError(f"{self.path} holds an evaluation: go on with it by --resume, or give another folder")
        recorded = there.pop("record", {})
        known, now = recorded.pop("versions", {}), record["versions"]
        hashes = {name: value for name, value in record.items() if name != "versions"}
        if longer := _goes_further(there.get("limit"), options.get("limit")):
            there["limit"] = options.get("limit")
        different = [*_differences(there, options), *_differences(recorded, hashes)]
        if different:
            raise OptionError(
                f"{self.path} was begun with another configuration: {'; '.join(different)}. Resume it with what it was "
                "begun with, or give another folder"
            )
        if longer:
            self._write_config(options, {**recorded, "versions": known})
        return _differences(known, now)

    def _write_config(self, options: dict[str, Any], record: dict[str, Any]) -> None:
        found = {"format": FORMAT, "version": VERSION, **options, "record": record}
        write_text(self.path / "config.yaml", yaml.safe_dump(found, sort_keys=False, allow_unicode=True))

    def _read(self) -> None:
        """Find the samples; what a kill left of a last line is dropped."""
        path, end = self.path / "samples.jsonl", 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    os.truncate(path, end)
                    break
                self.done.add(_key(path, number, line))
                end += len(line)

    @property
    def samples(self) -> Iterator[dict[str, Any]]:
        return read_samples(self.path)

    def add(self, sample: dict[str, Any], tree: dict[str, Any] | None) -> None:
        """Write a sample and its tree, as JSON data, down. Raises TaskError where the disk doesn't take them."""
        if tree is not None:
            write_json(self.path / "trees" / f"{sample['id']}.json", tree)
        text = json.dumps(sample, ensure_ascii=False, default=str) + "\n"
        line = text.encode("utf-8", "backslashreplace")  # half a surrogate becomes what JSON writes for it
        with writing(self.path / "samples.jsonl", _MAKE_ROOM):
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        self.done.add((sample["index"], sample["repeat"]))

    def log(self, text: str) -> None:
        """A line in log.txt, with the time."""
        path, time = self.path / "log.txt", datetime.now().astimezone().isoformat(timespec="seconds")
        with writing(path, _MAKE_ROOM), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time}  {plain(' '.join(text.split()))}\n")

    def finish(self, results: dict[str, Any]) -> None:
        """Put the samples in order, and write the results."""
        path = self.path / "samples.jsonl"
        with path.open("rb") as file:
            lines = list(file)
        places = [_key(path, number, line) for number, line in enumerate(lines, 1)]
        in_order = [line for _, line in sorted(zip(places, lines, strict=True))]
        if in_order != lines:
            with writing(path, _MAKE_ROOM), replacing(path) as unfinished, unfinished.open("wb") as new:
                new.writelines(in_order)
                new.flush()
                os.fsync(new.fileno())
        write_json(self.path / "results.json", results)

    def close(self) -> None:
        """Release the folder. One without a finished sample is left as if it had not been begun."""
        try:
            self._file.close()
            if not self.done:
                for name in ("samples.jsonl", "log.txt", "config.yaml"):
                    (self.path / name).unlink(missing_ok=True)
                shutil.rmtree(self.path / "trees", ignore_errors=True)  # a tree may lack its sample
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_config(path: Path) -> dict[str, Any]:
    """The options of an evaluation's folder, and its `record`. Raises OptionError where it is none."""
    if not (path / "config.yaml").exists():
        raise OptionError(f"{path} is not the folder of an evaluation: it has no config.yaml")
    found = read_mapping(path / "config.yaml")
    if found.pop("format", None) != FORMAT:
        raise OptionError(f"{path} holds something other than an evaluation: give another folder")
    if (version := found.pop("version", None)) != VERSION:
        raise OptionError(f"{path} has version {version!r}: this program reads {VERSION}")
    return as_now(found)


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The samples in a folder, one after another; a torn last line is none."""
    with (path / "samples.jsonl").open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _key(path: Path, number: int, line: bytes) -> tuple[int, int]:
    try:
        sample = json.loads(line)
        return int(sample["index"]), int(sample["repeat"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise TaskError(f"{path}, line {number} is damaged: delete that line, then go on with --resume") from None


def _differences(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    names = [name for name in {**there, **here} if name not in UNCOMPARED]
    return [
        f"{name} {_said(there.get(name))} there, {_said(here.get(name))} here"
        for name in names
        if _compared(there.get(name)) != _compared(here.get(name))
    ]


def _goes_further(there: int | None, here: int | None) -> bool:
    """Whether a limit of rows takes all that another takes, and more; None takes all."""
    return there is not None and (here is None or here > there)


def _compared(value: Any) -> Any:
    """Of decoder options, those that samples depend on: a server may have moved."""
    if not isinstance(value, list):
        return value
    return [each for each in value if str(each).partition("=")[0] not in TRANSPORT]


def _said(value: Any) -> str:
    return "none" if value is None else str(value)[:16] if isinstance(value, str) and len(value) == 64 else str(value)
