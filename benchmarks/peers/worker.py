"""Run a side in its own process, with its own Python interpreter.

The process reads one JSON command per line and replies to each with one JSON object. Other lines are library output and
are ignored. A worker that dies, hangs or replies with an error raises SideError with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.engines import SideError, checked, resident
from benchmarks.harness import Measured
from benchmarks.workloads import Waves, drawn

_LINES = 3
"""Lines of a failed worker's log to report."""


class PeerWorker:
    """A worker process with a loaded model."""

    def __init__(
        self,
        python: Path,
        script: Path,
        load: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = 600.0,
    ) -> None:
        """Start `script` and load its model; each reply may take `patience` seconds. Raises SideError."""
        self._patience = patience
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        try:
            self._process = subprocess.Popen(
                [str(python.absolute()), str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C does not reach it, and its children end with it
            )
        except OSError as error:
            self._log.close()
            raise SideError(f"{python} can't be started ({error.strerror}): give another interpreter") from None
        try:
            self.about = str(self._ask(load).get("about", ""))
        except BaseException:
            self.close()
            raise

    def run(self, waves: Waves) -> Measured:
        """Run all waves with an empty cache. Raises SideError."""
        requests = [[{"prompt": work.prompt, "new": work.samples} for work in wave] for wave in waves]
        reply = self._ask({"waves": requests})
        measured = checked(float(reply["seconds"]), int(reply["tokens"]), drawn(waves))
        return measured | {"resident": resident(self._process.pid), "prefill": float(reply["prefill"])}

    def complete(self, prompt: Sequence[int], n: int, **options: Any) -> tuple[float, list[list[int]]]:
        """Return the seconds and the token ids of n texts of a prompt, with an empty cache. Raises SideError."""
        reply = self._ask({"complete": {"prompt": list(prompt), "n": n, **options}})
        samples = [[int(token) for token in sample] for sample in reply["samples"]]
        if len(samples) != n:
            raise SideError(f"it sampled {len(samples)} texts instead of {n}")
        return float(reply["seconds"]), samples

    def evolve(self, seed: int) -> dict[str, Any]:
        """Return the best program of an evolution, with its seconds and tokens. Raises SideError."""
        return self._ask({"seed": seed})

    def close(self) -> None:
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # unsent commands
                pipe.close()
        self._log.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to one command. A worker that does not reply in time is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(self._patience, give_up)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
            reply = next(filter(None, map(_parsed, self._process.stdout)), None)
        except OSError:
            reply = None
        finally:
            timer.cancel()
        if reply is None:
            raise SideError(f"no reply within {self._patience:.0f} s" if late.is_set() else self._last_words())
        if "error" in reply:
            raise SideError(str(reply["error"]))
        return reply

    def _last_words(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return " | ".join([f"it ended with status {status}", *lines[-_LINES:]])


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply if isinstance(reply, dict) else None
