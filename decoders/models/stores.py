"""GGUF files by other programs' names: the stores of Ollama and LM Studio, and `org/name:Q4_K_M` on the hub.

Files are read where they are. Ollama keeps a manifest for each name, which names a blob by its hash.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tot.decoders.errors import ModelError, unknown

log = logging.getLogger(__name__)
_OLLAMA_HUB = "registry.ollama.ai"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_PART = re.compile(r"(.+)-(\d{5})-of-\d{5}\.gguf")
_FORMAT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|FP16|MXFP4\w*))\.gguf$", re.IGNORECASE)
_PREFERRED = ("Q4_K_M", "Q4_0", "Q4_K_S", "Q5_K_M", "Q8_0")
"""Number formats of files, in the order in which one is chosen if the name has none."""
_SHARE = 0.8
"""Share of the free memory that the chosen file may take."""


@dataclass(frozen=True)
class StoredModel:
    """A GGUF file in the store of another program, by the name that this program shows."""

    name: str
    program: str
    path: Path


def stored_models() -> list[StoredModel]:
    """List the models of Ollama and LM Studio on this machine."""
    return [*_ollama(), *_lm_studio()]


def find_stored(name: str) -> Path | None:
    """Return the file of an installed model: `llama3.2:1b`, `publisher/model`, or `publisher/model:Q4_K_M`.

    Raises ModelError if the name matches several files, or if its file can't be read.
    """
    plain = name.removeprefix("https://")
    exact = {plain, f"{plain}:latest", plain.replace("huggingface.co/", "hf.co/")}
    models = stored_models()
    found = [model.path for model in models if model.name in exact]
    if not found:
        repository, wanted = split_name(name)
        files = {model.path.name: model.path for model in models if model.name.rpartition("/")[0] == repository}
        if len(files) == 1 and wanted is None:
            found = [*files.values()]
        elif files:
            found = [files[choose({file: path.stat().st_size for file, path in files.items()}, repository, wanted)]]
    if found and not os.access(found[0], os.R_OK):
        raise ModelError(f"{name} is {found[0]}, which you may not read: copy the file, or change its permissions")
    return found[0] if found else None


def split_name(name: str) -> tuple[str, str | None]:
    """Split `hf.co/org/name:Q4_K_M` into the repository, without the host, and the format or file, if one is given."""
    repository, _, wanted = re.sub(r"^(?:https://)?(?:hf\.co|huggingface\.co)/", "", name).partition(":")
    return repository, wanted or None


def choose(sizes: Mapping[str, int], repository: str, wanted: str | None, free: int | None = None) -> str:
    """Return the file for a number format or a file name; without one, a usual format that fits in `free` bytes.

    Raises ModelError if no file or several files match.
    """
    whole = whole_sizes(sizes)
    if not whole:
        raise ModelError(f"{repository} has no .gguf file: give another model")
    formats = {file: match[1] if (match := _FORMAT.search(_first(file))) else file for file in whole}
    if wanted is not None:
        lower = wanted.lower()
        found = [file for file in whole if lower in (formats[file].lower(), file.lower())]
        if len(found) > 1:
            raise ModelError(f"{repository}:{wanted} is {len(found)} files ({', '.join(found)}): name one of them")
        if not found:
            raise ModelError(unknown(f"file of {repository}", wanted, sorted(set(formats.values()))))
        return found[0]
    fits = [file for file in whole if free is None or whole[file] <= _SHARE * free]
    if not fits:
        smallest = min(whole, key=whole.__getitem__)
        raise ModelError(
            f"no file of {repository} fits: {smallest} takes {gib(whole[smallest])}, and {gib(free or 0)} are free; "
            "give a smaller model"
        )
    rank = {name: number for number, name in enumerate(_PREFERRED)}
    return min(fits, key=lambda file: (rank.get(formats[file].upper(), len(rank)), whole[file], file))


def gguf_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each .gguf file in a folder and its subfolders."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*.gguf")}


def whole_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each model, by its first file: parts count together, and image projectors do not."""
    whole: dict[str, int] = {}
    for file, size in sorted(sizes.items()):
        if file.endswith(".gguf") and "mmproj" not in file.lower():
            part = _PART.fullmatch(file)
            first = file if part is None else min(other for other in sizes if other.startswith(f"{part[1]}-0"))
            whole[first] = whole.get(first, 0) + size
    return whole


def parts_of(first: str, files: Iterable[str]) -> list[str]:
    """Return all files of a model, given the first one."""
    part = _PART.fullmatch(first)
    return [first] if part is None else sorted(file for file in files if file.startswith(f"{part[1]}-0"))


def gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _first(file: str) -> str:
    part = _PART.fullmatch(file)
    return file if part is None else f"{part[1]}.gguf"


def _ollama() -> Iterator[StoredModel]:
    given = os.environ.get("OLLAMA_MODELS")
    for store in [Path(given)] if given else [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]:
        for manifest in sorted((store / "manifests").glob("*/*/*/*")):
            try:
                layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
                digest = next(one["digest"] for one in layers if str(one["mediaType"]).endswith(".image.model"))
            except (OSError, ValueError, LookupError, TypeError, StopIteration):
                continue
            host, owner, model, tag = manifest.parts[-4:]
            prefix = "" if (host, owner) == (_OLLAMA_HUB, "library") else f"{owner}/"
            prefix = prefix if host == _OLLAMA_HUB else f"{host}/{prefix}"
            blob = store / "blobs" / str(digest).replace(":", "-")
            if _DIGEST.fullmatch(str(digest)) and blob.is_file():
                yield StoredModel(f"{prefix}{model}:{tag}", "Ollama", blob)


def _lm_studio() -> Iterator[StoredModel]:
    for store in (Path.home() / ".lmstudio/models", Path.home() / ".cache/lm-studio/models"):
        sizes = {str(file.relative_to(store)): 0 for file in store.glob("*/*/*.gguf")}
        for first in whole_sizes(sizes):
            yield StoredModel(first, "LM Studio", store / first)
