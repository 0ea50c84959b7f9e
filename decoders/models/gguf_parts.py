"""The files of a GGUF model that is split into parts, `name-00001-of-00003.gguf` and so on."""

from __future__ import annotations

import re
from pathlib import Path

from tot.decoders.errors import ModelError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def gguf_parts(path: Path) -> list[Path]:
    """Return all files of a model in order, given any one of them. A file without a part's name is alone.

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
