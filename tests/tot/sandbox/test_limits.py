"""Limits of programs, and programs on kernels without namespaces."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tot import sandbox
from tot.decoders.errors import OptionError
from tot.sandbox import UNCONFINED, ProgramResult, Sandbox, confines

BOX = Sandbox(seconds=20)


HASTY = Sandbox(seconds=1)


def run(program: str, box: Sandbox = BOX, **files: str) -> ProgramResult:
    return box.run(dedent(program), {name.replace("_", "."): text for name, text in files.items()})


ENDLESS = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(1000)",
    "waits for ever": "import threading; threading.Event().wait()",
    "ignores signals": "import signal\nfor s in (1, 2, 3, 15): signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
    "closes its outputs": "import os\nos.close(1); os.close(2)\nwhile True: pass",
    "leaves its group": "import os\ntry: os.setsid()\nexcept OSError: pass\nwhile True: pass",
    "leaves threads": "import threading\ndef f():\n    while True: pass\nthreading.Thread(target=f).start()",
    "counts": "10 ** 10 ** 10",
}


def test_the_time_limit_begins_when_the_program_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    late, command = [0.0], Sandbox._command

    def slow(*arguments: Any) -> list[str]:
        late[0] += 1000  # writing the files took this long
        return command(*arguments)

    confines()
    monkeypatch.setattr(Sandbox, "_command", slow)
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late[0]))
    ran = run("print(1)")
    assert (ran.ended, ran.output) == ("exited", "1\n")
    assert ran.seconds < 1000


@pytest.mark.parametrize("program", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_program_is_killed(program: str) -> None:
    result = run(program, HASTY)
    assert result.ended in ("time", "killed")
    assert not result.ok


def test_a_fork_bomb_starts_nothing() -> None:
    result = run("import os\nfor _ in range(100):\n    try: os.fork()\n    except OSError: pass\nprint('alone')", HASTY)
    assert result.output.count("alone") <= 1


def test_endless_output_is_truncated_and_ends_the_program() -> None:
    result = run("while True: print('x' * 1000)")
    assert (result.ended, len(result.output)) == ("output", 64 << 10)
    result = run("import sys\nwhile True: sys.stderr.write('x' * 1000)")
    assert (result.ended, len(result.error)) == ("output", 64 << 10)


@pytest.mark.parametrize(
    "program", ["x = bytearray(1 << 40)", "x = [0] * (1 << 33)", "x = []\nwhile 1: x.append('y' * 9999)"]
)
def test_memory_is_limited(program: str) -> None:
    result = run(program)
    assert not result.ok
    assert result.ended == "killed" or "MemoryError" in result.error


@pytest.mark.parametrize("stack", [0, 32 << 10])
def test_threads_are_limited(stack: int) -> None:
    if confines() != "namespaces":
        pytest.skip("only user namespaces limit threads")
    result = run(f"""
        import os, threading, time
        threading.stack_size({stack})
        started = 0
        try:
            while True:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                started += 1
        except RuntimeError:
            print(started, flush=True)
            os._exit(0)
    """)
    assert 4 <= int(result.output) < 64


def test_a_mount_below_a_readable_folder_is_read_only() -> None:
    """The test mounts a file system below /usr/lib, in a mount namespace of its own."""
    folder = next(path for path in sorted(Path("/usr/lib").iterdir()) if path.is_dir() and not path.is_symlink())
    script = f"""
        from tot.sandbox import Sandbox, confines
        print(confines(), Sandbox().run("open('{folder}/escaped', 'w')").error)
    """
    mount = f'mount -t tmpfs none {folder} && exec "$0" -c "$1"'
    command = ["unshare", "--map-root-user", "--mount", "bash", "-c", mount, sys.executable, dedent(script)]
    result = subprocess.run(command, capture_output=True, text=True)
    if not result.stdout:
        pytest.skip(f"this user can't mount a file system: {result.stderr.strip()[-100:]}")
    assert "Read-only file system" in result.stdout or "landlock" in result.stdout


def test_programs_can_import_only_the_packages_that_are_given() -> None:
    program = "import numpy\nprint(numpy.arange(3).sum())\nimport pydantic"
    result = run(program, Sandbox(seconds=20, packages=("numpy",)))
    assert result.output == "3\n"
    assert "No module named 'pydantic'" in result.error
    assert "No module named 'numpy'" in run(program).error


def test_files_are_limited() -> None:
    large = "f = open('a', 'wb')\nwhile True: f.write(b'x' * 65536)"
    assert not run(large).ok
    many = "for i in range(10**6):\n    with open(str(i), 'wb') as f: f.write(b'x' * 500000)"
    assert not run(many).ok


def test_many_programs_do_not_block_the_event_loop() -> None:
    """Sixteen slow programs run while a clock ticks in the event loop."""
    events: list[str] = []

    async def program(i: int) -> str:
        result = await BOX.arun(f"import time; time.sleep(0.1); print({i})")
        events.append("ended")
        return result.output

    async def tick() -> None:
        while "ended" not in events:
            events.append("tick")
            await asyncio.sleep(0)

    async def both() -> list[str]:
        _, *outputs = await asyncio.gather(tick(), *map(program, range(16)))
        return outputs

    assert asyncio.run(both()) == [f"{i}\n" for i in range(16)]
    assert events.index("ended") > 2  # a blocked loop ticks once before the first program ends


def test_the_sandbox_works_in_threads() -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda i=i: found.append(run(f"print({i})").output)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{i}\n" for i in range(6)]


# -- without kernel support -------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose kernel has no sandbox."""
    confines.cache_clear()
    monkeypatch.setattr(Sandbox, "works", lambda self, by: False)
    yield
    confines.cache_clear()


def test_nothing_runs_without_a_sandbox(nowhere: None, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"can't be confined here: use Linux .*{UNCONFINED}=yes"):
        BOX.run(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", ["", "1", "true", "no", "YES"])
def test_other_values_allow_no_unsandboxed_programs(nowhere: None, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(UNCONFINED, value)
    with pytest.raises(OptionError, match="can't be"):
        BOX.run("print(1)")


def test_limits_apply_to_unsandboxed_programs(nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNCONFINED, "yes")
    assert run("print(open('a.txt').read())", a_txt="there").output == "there\n"
    assert run("while True: pass", HASTY).ended == "time"
    assert run("while True: print('x' * 1000)").ended == "output"
    assert "MemoryError" in run("x = bytearray(1 << 40)").error
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in run("import os; print(dict(os.environ))").output


def test_processes_left_by_an_unsandboxed_program_are_killed(
    nowhere: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(UNCONFINED, "yes")
    program = f"""
        import os
        if not os.fork():
            os.setsid()
            if not os.fork():
                open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()))
                os.close(1); os.close(2)
                while True: pass
            os._exit(0)
        while not os.path.exists({str(tmp_path / "pid")!r}) or not open({str(tmp_path / "pid")!r}).read(): pass
    """
    run(program)
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


def test_a_killed_parent_leaves_no_program_behind(tmp_path: Path) -> None:
    """A killed run ends its programs, or they end at their time limit."""
    script = "from tot.sandbox import Sandbox; print('on', flush=True); Sandbox(seconds=60).run('while True: pass')"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    parent.stdout.readline()
    deadline = time.monotonic() + 30
    while not (children := psutil.Process(parent.pid).children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        child.kill()
    assert not alive, [sandbox.__name__, *(child.cmdline() for child in alive)]
