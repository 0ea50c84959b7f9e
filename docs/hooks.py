"""Pages of the site that are files of the repository's top level: README, CONTRIBUTING and CHANGELOG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, with links as they are from `docs/`."""
    for source, page in _PAGES.items():
        text = Path(config.config_file_path).with_name(source).read_text(encoding="utf-8")
        for name, target in _PAGES.items():
            text = text.replace(f"]({name}", f"]({target}")
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files
