"""Programs that nobody has read, run where they can do little harm: no network, no files but those of a folder of their
own, no other processes, and limits of time, memory, output and disk.

The kernel confines them, in some 40 ms a run: see `tot.confined`, the script that each is run by. docs/guide.md says
what this promises and what it does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Literal

import psutil

from tot.decoders.errors import OptionError

UNCONFINED = "TOT_RUN_PROGRAMS_UNCONFINED"
"""The environment variable that lets programs run where they can't be confined, with limits alone: "yes"."""

_PYTHON = os.path.realpath(sys.executable)
_SCRIPT = Path(__file__).with_name("confined.py")
_PREFIX = os.path.realpath(sys.base_prefix)
_READABLE = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/dev/null", "/dev/urandom", _PREFIX)

Ended = Literal["exited", "time", "output", "killed"]
Confinement = Literal["namespaces", "landlock", "limits"]


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a program."""

    output: str
    error: str
    """What it wrote to stdout and to stderr, up to the limit."""
    ended: Ended
    """By itself; or because it took too long, wrote too much, or was killed, as by a crash."""
    code: int
    """Its exit status, where it ended by itself."""
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exited" and self.code == 0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Limits of a run; `run` is one."""

    seconds: float = 5.0
    memory: int = 512
    """MiB of address space."""
    output: int = 64
    """KiB of stdout and as many of stderr."""
    disk: int = 8
    """MiB of files of its own, which are gone when it ends."""

    def run(self, program: str, files: Mapping[str, str] | None = None) -> Ran:
        """Run a Python program, which finds `files` (names and texts) in its folder.

        It has Python's standard library alone. Raises OptionError where programs can't be confined here.
        """
        began = time.monotonic()
        with self._started(program, files or {}) as process:
            return _read([process], began, began + self.seconds, self.output << 10)[0]

    async def arun(self, program: str, files: Mapping[str, str] | None = None) -> Ran:
        """`run` in a thread, as many at once as there are processors: whatever else is under way goes on."""
        return await asyncio.get_running_loop().run_in_executor(pool(), self.run, program, files)

    def run_pair(self, first: tuple[str, Mapping[str, str]], second: tuple[str, Mapping[str, str]]) -> tuple[Ran, Ran]:
        """Run two programs, given with their files, that talk to each other, until the first one ends.

        Each reads from descriptor 3 what the other writes to descriptor 4.
        """
        began = time.monotonic()
        with ExitStack() as stack:
            ends = [*os.pipe(), *os.pipe()]
            with ExitStack() as opened:
                for fd in ends:
                    opened.callback(os.close, fd)
                one = stack.enter_context(self._started(*first, (ends[0], ends[3])))
                other = stack.enter_context(self._started(*second, (ends[2], ends[1])))
            ran = _read([one, other], began, began + self.seconds, self.output << 10)
        return ran[0], ran[1]

    def works(self, by: Confinement) -> bool:
        """Whether programs run here when they are confined in this way."""
        with tempfile.TemporaryDirectory(prefix="tot-") as folder:
            (Path(folder) / "program.py").write_text("print('confined')")
            with suppress(OSError, subprocess.SubprocessError):
                command = self._command(by, folder)
                found = subprocess.run(command, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
                return found.stdout == b"confined\n"
        return False

    def _command(self, by: Confinement, folder: str, pipes: Sequence[int] = ()) -> list[str]:
        options = {
            "by": by,
            "folder": folder,
            "parent": os.getpid(),
            "readable": [path for path in _READABLE if Path(path).exists()],
            "pipes": list(pipes),
            "memory": self.memory << 20,
            "disk": self.disk << 20,
            "seconds": self.seconds,
        }
        return [_PYTHON, "-I", "-S", "-B", "-X", "utf8", str(_SCRIPT), json.dumps(options)]

    @contextmanager
    def _started(
        self, program: str, files: Mapping[str, str], pipes: Sequence[int] = ()
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A running program; whatever is left of it after the block is killed."""
        confines()
        with tempfile.TemporaryDirectory(prefix="tot-") as folder:
            for name, text in {**files, "program.py": program}.items():
                (Path(folder) / name).write_text(text, encoding="utf-8", errors="replace")
            process = subprocess.Popen(
                self._command(confines(), folder, pipes),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=pipes,
                env={},
                start_new_session=True,
            )
            with process:
                try:
                    yield process
                finally:
                    _kill(process)


def _read(processes: Sequence[subprocess.Popen[bytes]], began: float, deadline: float, room: int) -> list[Ran]:
    """The results of processes that are waited for until the first one ends, the deadline or too much output."""
    texts: dict[int, bytearray] = {}
    ended: Ended | None = None
    with selectors.DefaultSelector() as waiting:
        for process in processes:
            for stream in _streams(process):
                texts[stream.fileno()] = bytearray()
                waiting.register(stream, selectors.EVENT_READ)
        first = {stream.fileno() for stream in _streams(processes[0])}
        while ended is None and any(key.fd in first for key in waiting.get_map().values()):
            ready = waiting.select(max(deadline - time.monotonic(), 0))
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                texts[key.fd].extend(piece)
                if not piece:
                    waiting.unregister(key.fileobj)
                elif len(texts[key.fd]) > room:
                    ended = "output"
            if not ready:
                ended = "time"
    if ended is None:
        with suppress(subprocess.TimeoutExpired):
            processes[0].wait(max(deadline - time.monotonic(), 0.001))
    return [_ran(process, texts, ended, began, room) for process in processes]


def _ran(
    process: subprocess.Popen[bytes], texts: Mapping[int, bytearray], ended: Ended | None, began: float, room: int
) -> Ran:
    code = process.poll()
    _kill(process)
    if ended is None:
        ended = "time" if code is None else "exited" if code >= 0 else "killed"
    output, error = (texts[stream.fileno()][:room].decode("utf-8", "replace") for stream in _streams(process))
    return Ran(output, error, ended, process.wait() if code is None else code, time.monotonic() - began)


def _streams(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdout, process.stderr


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all below it: confined ones die with it, others have to be found."""
    if confines() == "limits":
        with suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    child.kill()
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@cache
def confines() -> Confinement:
    """How programs are confined here: by namespaces, else by Landlock; by "limits" where the environment says so.

    Raises OptionError where they can't be confined and the environment does not allow that.
    """
    ways: tuple[Confinement, ...] = ("namespaces", "landlock")
    if (by := next((way for way in ways if Sandbox().works(way)), None)) is not None:
        return by
    if os.environ.get(UNCONFINED) == "yes":
        return "limits"
    raise OptionError(
        "programs that a model writes are run confined, and here they can't be: it takes Linux on x86-64 or 64-bit ARM "
        f"with user namespaces, or Landlock (5.13); with {UNCONFINED}=yes they run with limits of time, memory and "
        "output alone, and can do all that you can"
    )


@cache
def pool() -> ThreadPoolExecutor:
    """Where programs are run, and answers scored, which may take a program's run, while searches go on."""
    return ThreadPoolExecutor(os.cpu_count(), "sandbox")


os.register_at_fork(after_in_child=pool.cache_clear)  # its threads are not in a copy of this process
