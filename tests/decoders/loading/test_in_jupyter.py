"""In Jupyter without ipywidgets, the warning about text progress bars is hidden, and other warnings are shown."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

JUPYTER = """
import sys, types, warnings
shell, ipython = types.ModuleType("ipykernel.zmqshell"), types.ModuleType("IPython")
ipython.get_ipython = lambda: None
sys.modules |= {"ipykernel.zmqshell": shell, "IPython": ipython, "ipywidgets": None}
filters = list(warnings.filters)
"""


def test_the_warning_is_silenced_and_the_filters_are_restored(
    run_python: Callable[..., subprocess.Popen[str]],
) -> None:
    code = """
import tot.decoders.engine
print(warnings.filters == filters)
import transformers.utils.logging
warnings.warn("IProgress not found: said by another")
"""
    process = run_python(JUPYTER + code)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "True\n")
    assert errors.count("IProgress not found") == 1
    assert "said by another" in errors
