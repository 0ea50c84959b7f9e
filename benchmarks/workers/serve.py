"""Serve the engine of a module of this folder, in the environment of its program: `python serve.py llama_worker`.

Each line of the input is a JSON command with one JSON reply. The first command loads the model; each other one is a
prompt to complete from an empty cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from typing import Any


def main() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep library output out of the replies

    def reply(**data: Any) -> None:
        out.write(json.dumps(data) + "\n")

    engine = import_module(sys.argv[1]).Engine(**json.loads(sys.stdin.readline()))
    reply(about=engine.about)
    for line in sys.stdin:
        try:
            engine.forget()
            began = time.perf_counter()
            samples, prefill = engine.complete(**json.loads(line))
            reply(seconds=time.perf_counter() - began, prefill=prefill, samples=samples)
        except Exception as error:  # the benchmark continues without this side  # noqa: BLE001
            reply(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
