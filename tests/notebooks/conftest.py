"""Each notebook, executed once in its own kernel in an empty folder, and as saved in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def outputs_of(notebook: Any) -> list[dict[str, str]]:
    """Return the outputs of each code cell in order: text by type, such as "image/svg+xml", "stdout" or "error"."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        found: dict[str, str] = {}
        for output in cell.outputs:
            if output.output_type == "stream":
                found[output.name] = found.get(output.name, "") + output.text
            elif output.output_type == "error":
                found["error"] = "\n".join(output.traceback)
            else:
                found |= output.data
        cells.append(found)
    return cells


@pytest.fixture(scope="session")
def saved() -> Any:
    """Return a function that reads a notebook's saved outputs."""
    return lambda name: outputs_of(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4))


@pytest.fixture(scope="session")
def run(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that executes a notebook once and returns its outputs. A failed cell's output is its error."""
    done: dict[str, list[dict[str, str]]] = {}

    def run(name: str) -> list[dict[str, str]]:
        if name not in done:
            folder = tmp_path_factory.mktemp(name) / "notebooks"
            folder.mkdir()
            (folder.parent / "benchmarks").symlink_to(NOTEBOOKS.parent / "benchmarks")
            notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    cell.outputs = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("IPYTHONDIR", str(folder / "ipython"))  # without the user's start-up files
                patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
                resources = {"metadata": {"path": str(folder)}}
                NotebookClient(
                    notebook, timeout=1800, kernel_name="python3", resources=resources, allow_errors=True
                ).execute()
            done[name] = outputs_of(notebook)
        return done[name]

    return run
