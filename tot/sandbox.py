"""Programs that nobody has read, run where they can do little harm: no network, no files but a folder of their own, no
other programs, and limits of time, memory, output and disk.

The kernel confines them (Landlock and seccomp, through `sandlock`: the extra `sandbox`), some 20 ms a run. What this
promises and what it doesn't is said in docs/guide.md.
"""

from __future__ import annotations

import asyncio
import os
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from tot.decoders.errors import OptionError

UNCONFINED = "TOT_RUN_PROGRAMS_UNCONFINED"
"""The environment variable that lets programs run where they can't be confined, with limits alone: "yes"."""

_PYTHON = os.path.realpath(sys.executable)
_READABLE = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/dev/null", "/dev/urandom", os.path.realpath(sys.base_prefix))
_FILE = 1 << 20
_START = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({_FILE}, {_FILE}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
sys.argv = ["program.py"]
exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"), {{"__name__": "__main__"}})
"""
"""A file that a program writes may be 1 MiB large: the quota of disk counts files as they are opened."""

Ended = Literal["exited", "time", "output", "killed"]


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a program."""

    output: str
    error: str
    """What it wrote to stdout and to stderr: as much of it as there was room for."""
    ended: Ended
    """By itself; or as it took too long, wrote too much, or was killed, as what wants too much memory is."""
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
    """MiB."""
    output: int = 64
    """KiB of stdout and as many of stderr."""
    disk: int = 8
    """MiB of files of its own, which are gone when it ends."""

    def run(self, program: str, files: Mapping[str, str] | None = None) -> Ran:
        """Run a Python program, which finds `files` (names and texts) in its folder.

        It has Python's standard library alone. Raises OptionError where programs can't be confined here.
        """
        confined = confines()
        with tempfile.TemporaryDirectory(prefix="tot-") as folder:
            for name, text in {**(files or {}), "program.py": program}.items():
                (Path(folder) / name).write_text(text, encoding="utf-8", errors="replace")
            command = [_PYTHON, "-I", "-S", "-B", "-X", "utf8", "-c", _START]
            began = time.monotonic()
            process = self._confined(command, folder) if confined else self._limited(command, folder)
            texts, ended = self._read(process, began + self.seconds)
            if ended is None:
                ended, code = process.end(max(began + self.seconds - time.monotonic(), 0.001))
            else:
                process.kill()
                code = process.end(1.0)[1]
        output, error = (text.decode("utf-8", "replace") for text in texts)
        return Ran(output, error, ended, code, time.monotonic() - began)

    async def arun(self, program: str, files: Mapping[str, str] | None = None) -> Ran:
        """`run` in a thread, as many at once as there are processors: whatever else is under way goes on."""
        return await asyncio.get_running_loop().run_in_executor(pool(), self.run, program, files)

    def _read(self, process: _Process, deadline: float) -> tuple[list[bytes], Ended | None]:
        """What a process writes until it closes both ends, and why reading ended before that."""
        room = self.output << 10
        found = {stream: bytearray() for stream in process.streams}
        with selectors.DefaultSelector() as open_ones:
            for stream in found:
                open_ones.register(stream, selectors.EVENT_READ)
            ended: Ended | None = None
            while open_ones.get_map() and ended is None:
                ready = open_ones.select(max(deadline - time.monotonic(), 0))
                for key, _ in ready:
                    piece = os.read(key.fd, 1 << 16)
                    found[key.fileobj].extend(piece)  # type: ignore[index]
                    if not piece:
                        open_ones.unregister(key.fileobj)
                    elif len(found[key.fileobj]) > room:  # type: ignore[index]
                        ended = "output"
                if not ready:
                    ended = "time"
        return [bytes(text[:room]) for text in found.values()], ended

    def _confined(self, command: list[str], folder: str) -> _Process:
        from sandlock import BranchAction, Sandbox, StdioMode

        box = Sandbox(
            fs_readable=[path for path in _READABLE if os.path.exists(path)],  # noqa: PTH110
            fs_writable=[folder],
            workdir=folder,
            cwd=folder,
            max_disk=self.disk << 20,
            on_exit=BranchAction.ABORT,
            on_error=BranchAction.ABORT,
            max_memory=self.memory << 20,
            max_processes=1,
            max_open_files=64,
            extra_deny_syscalls=["memfd_create", "chroot"],
            no_coredump=True,
            clean_env=True,
        )
        try:
            return _Confined(box.popen(command, StdioMode.NULL, StdioMode.PIPED, StdioMode.PIPED))
        except RuntimeError as error:
            raise OptionError(f"a program can't be confined here: {error}; {_instead()}") from None

    def _limited(self, command: list[str], folder: str) -> _Process:
        memory = self.memory << 20

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))

        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return _Limited(
            subprocess.Popen(command, cwd=folder, env={}, start_new_session=True, preexec_fn=limit, **pipes)
        )


class _Process(Protocol):
    streams: tuple[IO[bytes], IO[bytes]]

    def kill(self) -> None: ...

    def end(self, seconds: float) -> tuple[Ended, int]:
        """Wait so long for the end, which then comes by force."""


class _Confined:
    def __init__(self, process: Any) -> None:
        self._process = process
        self.streams = process.stdout, process.stderr

    def kill(self) -> None:
        self._process.kill()

    def end(self, seconds: float) -> tuple[Ended, int]:
        from sandlock import ExitReason

        with self._process:
            result = self._process.wait(timeout=seconds)
        reasons: dict[Any, Ended] = {ExitReason.EXITED: "exited", ExitReason.TIMEOUT: "time"}
        return reasons.get(result.reason, "killed"), result.exit_code


class _Limited:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self.streams = process.stdout, process.stderr

    def kill(self) -> None:
        self._process.kill()

    def end(self, seconds: float) -> tuple[Ended, int]:
        with self._process:
            try:
                code = self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                return "time", self._process.wait()
        return ("exited" if code >= 0 else "killed"), code


@cache
def confines() -> bool:
    """Whether programs are confined here; False where the environment says in so many words that they need not be.

    Raises OptionError where they can't be, and nothing was said.
    """
    try:
        import sandlock
    except (ImportError, OSError) as error:
        why = f"sandlock is not there ({error}): pip install 'sandlock>=0.9'"
    else:
        has, needs = sandlock.landlock_abi_version(), sandlock.min_landlock_abi()
        if has >= needs:
            return True
        why = f"the kernel has version {has} of Landlock, and {needs} is needed"
    if os.environ.get(UNCONFINED) == "yes":
        return False
    raise OptionError(f"programs that a model writes are run confined, and here they can't be: {why}; {_instead()}")


def _instead() -> str:
    return f"with {UNCONFINED}=yes they run with limits of time, memory and output alone, and can do all that you can"


@cache
def pool() -> ThreadPoolExecutor:
    """Where programs are run, and answers scored, which may take a program's run, while searches go on."""
    return ThreadPoolExecutor(os.cpu_count(), "sandbox")


os.register_at_fork(after_in_child=pool.cache_clear)  # its threads are not in a copy of this process
