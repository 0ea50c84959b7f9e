"""Each notebook, run once from start to end in a kernel of its own, in an empty folder; and as it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def shown(notebook: Any) -> list[dict[str, str]]:
    """What each code cell shows, in their order: text by kind, such as "image/svg+xml", "stdout" or "error"."""
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
def kept() -> Any:
    """What a notebook shows as it lies in the repository."""
    return lambda name: shown(nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4))


@pytest.fixture(scope="session")
def run(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a notebook, at its first call only; gives what it shows. A cell that fails is shown with its error."""
    done: dict[str, list[dict[str, str]]] = {}

    def run(name: str) -> list[dict[str, str]]:
        if name not in done:
            folder = tmp_path_factory.mktemp(name)
            notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    cell.outputs = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("IPYTHONDIR", str(folder / "ipython"))  # nobody's own start-up files
                patch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "jupyter"))
                resources = {"metadata": {"path": str(folder)}}
                NotebookClient(
                    notebook, timeout=1800, kernel_name="python3", resources=resources, allow_errors=True
                ).execute()
            done[name] = shown(notebook)
        return done[name]

    return run
