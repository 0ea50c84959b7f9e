"""Sandbox for untrusted programs: no network, no other processes, no files outside a temporary folder.

Time, memory, output and disk are limited. The kernel confines the programs, which takes about 40 ms per run. The script
`tot.confined` runs each program. docs/guide.md describes the guarantees and their limits.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Literal

from tot.decoders.errors import OptionError

log = logging.getLogger(__name__)
UNCONFINED = "TOT_RUN_PROGRAMS_UNCONFINED"
"""Environment variable: "yes" runs programs with limits only, if they can't be confined."""

_CANCEL_CHECK_SECONDS = 0.1
"""Interval at which a running program notices its cancellation."""
_PYTHON = os.path.realpath(sys.executable)
_SCRIPT = Path(__file__).with_name("confined.py")
_PREFIX = os.path.realpath(sys.base_prefix)
_READABLE = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/dev/null", "/dev/urandom", _PREFIX)

_ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "PYTHONHASHSEED": "0",  # sets have one order: a program gives the same output each time
}

Files = Mapping[str, str | bytes]
Ended = Literal["exited", "time", "output", "killed"]
Confinement = Literal["namespaces", "landlock", "limits"]


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program."""

    output: str
    error: str
    """`output` is stdout and `error` is stderr, both up to the limit."""
    ended: Ended
    """Why it ended: by itself, by the time limit, by the output limit, or killed, for example by a crash."""
    code: int
    """The exit status, if it ended by itself."""
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exited" and self.code == 0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """The limits of programs; `run` runs one."""

    seconds: float = 5.0
    memory: int = 512
    """MiB of address space."""
    output: int = 64
    """KiB each of stdout and stderr."""
    disk: int = 8
    """MiB of files, which are deleted when the program ends."""
    packages: tuple[str, ...] = ()
    """Installed packages that programs can import besides Python's standard library."""
    folders: tuple[str, ...] = ()
    """Folders of which programs can import everything, such as the one with all installed packages."""

    def run(self, program: str, files: Files | None = None, cancelled: threading.Event | None = None) -> ProgramResult:
        """Run a Python program with `files` (names and contents) in its folder. It ends early once `cancelled` is set.

        Raises OptionError if programs can't be confined here.
        """
        with self._start(program, files or {}) as process:
            start_time = time.monotonic()  # the files are written
            return _read([process], start_time, start_time + self.seconds, self.output << 10, cancelled)[0]

    async def arun(self, program: str, files: Files | None = None) -> ProgramResult:
        """Run a program in a thread pool with one thread per processor, without blocking the event loop.

        Cancelling the call kills the program.
        """
        cancelled = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(pool(), self.run, program, files, cancelled)
        finally:
            cancelled.set()

    def run_pair(self, first: tuple[str, Files], second: tuple[str, Files]) -> tuple[ProgramResult, ProgramResult]:
        """Run two communicating programs, given with their files, until the first one ends.

        Descriptor 4 of each program is connected to descriptor 3 of the other.
        """
        with ExitStack() as stack:
            ends = [*os.pipe(), *os.pipe()]
            with ExitStack() as opened:
                for fd in ends:
                    opened.callback(os.close, fd)
                one = stack.enter_context(self._start(*first, (ends[0], ends[3])))
                other = stack.enter_context(self._start(*second, (ends[2], ends[1])))
            start_time = time.monotonic()
            results = _read([one, other], start_time, start_time + self.seconds, self.output << 10)
        return results[0], results[1]

    def works(self, by: Confinement) -> bool:
        """Return whether this kind of confinement works here."""
        with tempfile.TemporaryDirectory(prefix="tot-") as folder:
            (Path(folder) / "program.py").write_text("print('confined')")
            with suppress(OSError, subprocess.SubprocessError):
                command = self._command(by, folder)
                result = subprocess.run(command, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
                return result.stdout == b"confined\n"
        return False

    def _command(self, by: Confinement, folder: str, pipes: Sequence[int] = ()) -> list[str]:
        packages = [path for name in self.packages for path in _paths_of(name)]
        options = {
            "by": by,
            "folder": folder,
            "parent": os.getpid(),
            "readable": [path for path in [*_READABLE, *packages, *self.folders] if Path(path).exists()],
            "path": sorted({os.path.dirname(path) for path in packages} | {*self.folders}),  # noqa: PTH120
            "pipes": list(pipes),
            "memory": self.memory << 20,
            "disk": self.disk << 20,
            "seconds": self.seconds,
        }
        return [_PYTHON, "-P", "-s", "-S", "-B", "-X", "utf8", str(_SCRIPT), json.dumps(options)]

    @contextmanager
    def _start(self, program: str, files: Files, pipes: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
        """Start a program. Its remaining processes are killed after the block."""
        confines()
        with tempfile.TemporaryDirectory(prefix="tot-") as folder:
            for name, content in {**files, "program.py": program}.items():
                encoded = content.encode("utf-8", "replace") if isinstance(content, str) else content
                (Path(folder) / name).write_bytes(encoded)
            process = subprocess.Popen(
                self._command(confines(), folder, pipes),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=pipes,
                env=_ENVIRONMENT,
                start_new_session=True,
            )
            with process:
                try:
                    yield process
                finally:
                    _kill(process)


@cache
def _paths_of(package: str) -> list[str]:
    """Return the folders or the file of an installed package, and the folder with its libraries; [] without it."""
    spec = find_spec(package)
    found = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    paths = [os.path.realpath(path) for path in found]
    return paths + [libraries for path in paths if os.path.isdir(libraries := f"{path}.libs")]  # noqa: PTH112


def _read(
    processes: Sequence[subprocess.Popen[bytes]],
    start_time: float,
    deadline: float,
    limit: int,
    cancelled: threading.Event | None = None,
) -> list[ProgramResult]:
    """Wait until the first process ends, the deadline, too much output, or `cancelled`. Return all results."""
    texts: dict[int, bytearray] = {}
    ended: Ended | None = None
    with selectors.DefaultSelector() as waiting:
        for process in processes:
            for stream in _streams(process):
                texts[stream.fileno()] = bytearray()
                waiting.register(stream, selectors.EVENT_READ)
        first = {stream.fileno() for stream in _streams(processes[0])}
        while ended is None and any(key.fd in first for key in waiting.get_map().values()):
            left = max(deadline - time.monotonic(), 0)
            ready = waiting.select(left if cancelled is None else min(left, _CANCEL_CHECK_SECONDS))
            for key, _ in ready:
                piece = os.read(key.fd, 1 << 16)
                texts[key.fd].extend(piece)
                if not piece:
                    waiting.unregister(key.fileobj)
                elif len(texts[key.fd]) > limit:
                    ended = "output"
            if cancelled is not None and cancelled.is_set():
                ended = "killed"
            elif not ready and time.monotonic() >= deadline:
                ended = "time"
    if ended is None:
        with suppress(subprocess.TimeoutExpired):
            if processes[0].wait(max(deadline - time.monotonic(), 0.001)):
                for other in processes[1:]:  # its end may be the reason, and takes a moment
                    other.wait(1)
    return [_result(process, texts, ended, start_time, limit) for process in processes]


def _result(
    process: subprocess.Popen[bytes], texts: Mapping[int, bytearray], ended: Ended | None, start_time: float, limit: int
) -> ProgramResult:
    code = process.poll()
    _kill(process)
    if ended is None:
        ended = "time" if code is None else "exited" if code >= 0 else "killed"
    output, error = (texts[stream.fileno()][:limit].decode("utf-8", "replace") for stream in _streams(process))
    return ProgramResult(output, error, ended, process.wait() if code is None else code, time.monotonic() - start_time)


def _streams(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    assert process.stdout is not None
    assert process.stderr is not None
    return process.stdout, process.stderr


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants. Confined ones end with it; others are searched for."""
    if confines() == "limits":
        import psutil

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
    """Return how programs are confined here: by namespaces, else by Landlock, else by limits if the user allows it.

    Raises OptionError if they can't be confined and the environment variable is not set.
    """
    kinds: tuple[Confinement, ...] = ("namespaces", "landlock")
    if (by := next((kind for kind in kinds if Sandbox().works(kind)), None)) is not None:
        return by
    if os.environ.get(UNCONFINED) == "yes":
        return "limits"
    raise OptionError(
        "programs written by a model can't be confined here: use Linux on x86-64 or 64-bit ARM with user namespaces or "
        f"Landlock (5.13). With {UNCONFINED}=yes they run with your permissions, and only time, memory and output are "
        "limited"
    )


@cache
def can_confine() -> bool:
    """Return whether programs can run here; if not, log it once."""
    try:
        confines()
    except OptionError:
        log.warning("programs can't be confined here: answers are written without them")
        return False
    return True


@cache
def pool() -> ThreadPoolExecutor:
    """Return the thread pool that runs programs and scores answers while searches continue."""
    return ThreadPoolExecutor(os.cpu_count(), "sandbox")


os.register_at_fork(after_in_child=pool.cache_clear)  # a forked process has no threads of the pool
