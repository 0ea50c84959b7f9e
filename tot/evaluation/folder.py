"""The folder of an evaluation: config.yaml, samples.jsonl, trees/, results.json, log.txt. One process writes it.

Each sample is one line, flushed to disk when its search finishes: a killed run loses only the unfinished searches. At
the end, the lines are sorted by question.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated, Any, Self

import yaml
from pydantic import BaseModel, Field, FiniteFloat

from tot.decoders.errors import OptionError, TaskError, reason
from tot.decoders.files import append, hold, regular, replacing, write_json, write_text, writing
from tot.decoders.remote.options import TRANSPORT
from tot.evaluation.config import FORMAT, OF_RAY, VERSION
from tot.report.terminal import plain
from tot.yaml_files import read_mapping

UNCOMPARED = ("concurrency", "executor", "threads", "prefix_cache", *OF_RAY)
"""Options that don't affect the samples."""
_FREE_SPACE = "free disk space, then continue with --resume"


class Folder:
    """An evaluation's folder, open for writing."""

    def __init__(self, path: Path, options: dict[str, Any], record: dict[str, Any], resume: bool) -> None:
        """Create the folder, or continue an existing one with `resume`.

        `options` and `record` identify the evaluation; when resuming, only the limit of rows may grow. Raises
        OptionError for a folder in use, with other contents or with another configuration, naming the difference.
        """
        self.path = path
        self.done: set[tuple[int, int]] = set()
        """(index, repeat) of the finished samples."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            if link := next((entry for entry in path.iterdir() if entry.is_symlink()), None):
                raise OptionError(f"{link} is a link, so samples could be written elsewhere: remove it")
            refusal = OptionError(f"{path} is in use by another run: wait for it, or give another folder")
            self._release = hold(path / ".lock", refusal)
        except OSError as error:
            raise OptionError(f"{path} can't be created: {reason(error)}; give another folder") from None
        self._new = False
        self._samples = path / "samples.jsonl"
        try:
            self.changed_versions = self._begin(options, record, resume)
            with writing(path, _FREE_SPACE):
                (path / "trees").mkdir(exist_ok=True)
                self._samples.touch()
                self._read()
                self._file: IO[bytes] = self._samples.open("ab", buffering=0)
        except BaseException:
            self._discard()
            self._release()
            raise

    def _begin(self, options: dict[str, Any], record: dict[str, Any], resume: bool) -> list[str]:
        """Write config.yaml, or compare with an existing one. Return the library versions that have changed."""
        if not (self.path / "config.yaml").exists():
            if any(not entry.name.startswith(".") for entry in self.path.iterdir()):
                raise OptionError(f"{self.path} is not the folder of an evaluation: give another folder")
            self._new = True
            self._write_config(options, record)
            return []
        stored = read_config(self.path)
        if not resume:
            raise OptionError(f"{self.path} holds an evaluation: continue it with --resume, or give another folder")
        recorded = stored.pop("record", {})
        known, now = recorded.pop("versions", {}), record["versions"]
        hashes = {name: value for name, value in record.items() if name != "versions"}
        limit, was = options.get("limit"), stored.get("limit")  # None is no limit
        if larger := was is not None and (limit is None or limit > was):
            stored["limit"] = limit
        # The record repeats the options of the parts with their defaults, which matter only if the options are equal.
        differences = _differences(stored, options) or _differences(flat(recorded), flat(hashes))
        if differences:
            raise OptionError(
                f"{self.path} was started with another configuration: {'; '.join(differences)}. Resume it with its own "
                "configuration, or give another folder"
            )
        if larger:
            self._write_config(options, {**recorded, "versions": known})
        return _differences(known, now)

    def _write_config(self, options: dict[str, Any], record: dict[str, Any]) -> None:
        config = {"format": FORMAT, "version": VERSION, **options, "record": record}
        write_text(self.path / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))

    def _read(self) -> None:
        """Read the keys of the finished samples. Drop failed ones, to try them again, and an incomplete last line."""
        kept = {_key(sample): line for sample, line in _lines(self.path) if sample["error"] is None}
        self.done.update(kept)
        if sum(map(len, kept.values())) < self._samples.stat().st_size:
            with replacing(self._samples) as file:
                file.writelines(kept.values())

    @property
    def samples(self) -> Iterator[dict[str, Any]]:
        return read_samples(self.path)

    def add(self, sample: dict[str, Any], tree: dict[str, Any] | None) -> None:
        """Write a sample and its tree, both JSON data, to disk. Raises TaskError if the write fails."""
        if tree is not None:
            write_json(self.path / "trees" / f"{sample['id']}.json", tree, otherwise=_FREE_SPACE)
        text = json.dumps(sample, ensure_ascii=False, default=str) + "\n"
        with writing(self._samples, _FREE_SPACE):
            append(self._file, text.encode("utf-8", "backslashreplace"))  # lone surrogates become JSON escapes
            os.fsync(self._file.fileno())
        self.done.add(_key(sample))

    def log(self, text: str) -> None:
        """Append a line with the time to log.txt."""
        path, time = self.path / "log.txt", datetime.now().astimezone().isoformat(timespec="seconds")
        with writing(path, _FREE_SPACE), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{time}  {plain(' '.join(text.split()))}\n")

    def finish(self, results: dict[str, Any]) -> None:
        """Sort the samples by question, and write the results."""
        in_order = sorted((_key(sample), line) for sample, line in _lines(self.path))
        with writing(self._samples, _FREE_SPACE), replacing(self._samples) as file:
            file.writelines(line for _, line in in_order)
        write_json(self.path / "results.json", results, otherwise=_FREE_SPACE)

    def close(self) -> None:
        """Release the folder. Without a finished sample, delete the files that the run created."""
        try:
            self._file.close()
            self._discard()
        finally:
            self._release()

    def _discard(self) -> None:
        if self._new and not self.done:
            for name in ("samples.jsonl", "log.txt", "config.yaml"):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / "trees", ignore_errors=True)  # a tree may exist without its sample

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_config(path: Path) -> dict[str, Any]:
    """Return the options and the `record` of an evaluation's folder. Raises OptionError for any other folder."""
    if not (path / "config.yaml").exists():
        raise OptionError(f"{path} is not the folder of an evaluation: it has no config.yaml")
    config = read_mapping(path / "config.yaml", "limit: 50")
    if config.pop("format", None) != FORMAT or not isinstance(config.get("record", {}), dict):
        raise OptionError(f"{path} is not the folder of an evaluation: give another folder")
    if (version := config.pop("version", None)) != VERSION:
        raise OptionError(f"{path} has version {version!r}: this program reads {VERSION}")
    return config


class _Sample(BaseModel):
    """The fields that every sample has."""

    id: Annotated[str, Field(pattern=r"^\d+-\d+$")]
    index: Annotated[int, Field(ge=0, lt=2**53)]
    repeat: Annotated[int, Field(ge=0, lt=2**53)]
    question: str
    score: FiniteFloat
    solved: bool
    parse_failure: bool
    unreadable: int
    thoughts: int
    error: str | None
    usage: dict[str, dict[str, int]]
    measured: dict[str, FiniteFloat]


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """Iterate over the samples in a folder, without an incomplete last line. Raises TaskError for a damaged line."""
    return (sample for sample, _ in _lines(path))


def _lines(folder: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    path = folder / "samples.jsonl"
    with regular(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                sample: dict[str, Any] = json.loads(line)
                _Sample.model_validate(sample)
            except (ValueError, RecursionError):
                remedy = "delete that line, then continue with --resume"
                raise TaskError(f"{path}, line {number} is damaged: {remedy}") from None
            yield sample, line


def _key(sample: Mapping[str, Any]) -> tuple[int, int]:
    return sample["index"], sample["repeat"]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the options in a configuration by path, such as "search.breadth"."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the names of the options that differ between configurations, with the value in each."""
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [(name, [config.get(name) for config in configs]) for name in names]
    return [
        (name, [*map(_rendered, values)])
        for name, values in rows
        if any(_compared(value) != _compared(values[0]) for value in values)
    ]


def _differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    differences = differing([stored, current])
    return [f"{name} was {old}, now {new}" for name, (old, new) in differences if name not in UNCOMPARED]


def _compared(value: Any) -> Any:
    """Drop the decoder options that don't affect samples, such as a server's address."""
    if not isinstance(value, list):
        return value
    return [option for option in value if str(option).partition("=")[0] not in TRANSPORT]


def _rendered(value: Any) -> str:
    return "unset" if value is None else str(value)[:16] if isinstance(value, str) and len(value) == 64 else str(value)
