"""`python -m benchmarks NAME`, in a clone of the repository."""

from __future__ import annotations

import sys

from benchmarks.commands import app
from tot.cli.app import main as run


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark, by default the command line's, and return its exit status."""
    return run(arguments, app, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main())
