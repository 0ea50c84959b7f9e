"""The sandbox: what programs may do in it, what they may not, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tot import sandbox
from tot.decoders.errors import OptionError
from tot.sandbox import UNCONFINED, Ran, Sandbox, confines

BOX = Sandbox(seconds=20)
HASTY = Sandbox(seconds=1)


@pytest.fixture(autouse=True)
def confined() -> Iterator[None]:
    """Where the kernel confines programs; in CI it has to. Whatever a program started has to be gone by its end."""
    try:
        confines()
    except OptionError as error:
        if "CI" in os.environ:
            pytest.fail(str(error))
        pytest.skip(str(error))
    before = {child.pid for child in psutil.Process().children()}  # a browser's among them, which starts others
    yield
    deadline = time.monotonic() + 20  # a killed process takes a moment to be gone
    while (left := _left(before)) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert left == []


def _left(before: set[int]) -> list[list[str]]:
    """The commands of the processes that this one started and that still run, except those of `before`."""
    new = [child for child in psutil.Process().children() if child.pid not in before]
    found = []
    for child in new:
        with suppress(psutil.NoSuchProcess):
            running = [one for one in (child, *child.children(recursive=True)) if one.status() != psutil.STATUS_ZOMBIE]
            found += [one.cmdline() for one in running]
    return found


def run(program: str, box: Sandbox = BOX, **files: str) -> Ran:
    return box.run(dedent(program), {name.replace("_", "."): text for name, text in files.items()})


# -- what a program may do --------------------------------------------------------------------------------------


def test_a_program_finds_its_files_and_says_what_it_has_to_say() -> None:
    ran = run("import sys; print(open('a.txt').read().upper()); print('oh', file=sys.stderr)", a_txt="héllo")
    assert (ran.output, ran.error, ran.ended, ran.code, ran.ok) == ("HÉLLO\n", "oh\n", "exited", 0, True)


def test_it_may_write_files_of_its_own_which_are_gone_with_it() -> None:
    ran = run("import os; open('b.txt', 'w').write('x' * 100); print(os.getcwd(), os.path.getsize('b.txt'))")
    folder, size = ran.output.split()
    assert size == "100"
    assert not (Path(folder) / "b.txt").exists()


def test_the_standard_library_is_there_and_nothing_else() -> None:
    assert run("import math, re, json, collections, itertools, heapq, typing; print(math.comb(5, 2))").output == "10\n"
    assert "No module named 'torch'" in run("import torch").error
    assert "No module named 'tot'" in run("import tot").error


def test_what_a_program_fails_with_is_told_with_its_line() -> None:
    ran = run("def f():\n    return 1 / 0\nf()")
    assert (ran.ended, ran.code, ran.ok) == ("exited", 1, False)
    assert "ZeroDivisionError" in ran.error
    assert "line 2" in ran.error


@pytest.mark.parametrize("program", ["def f(:", "\x00", "\ud800", "x = '''", "b'\\xff'.decode()", "(" * 500])
def test_texts_that_are_no_programs_are_an_error_of_theirs(program: str) -> None:
    ran = BOX.run(program)
    assert ran.ended == "exited"
    assert ran.code == 1


def test_bytes_that_are_no_text_are_shown_as_they_can_be() -> None:
    assert run("import os; os.write(1, b'\\xff\\xfeab\\n')").output == "\ufffd\ufffdab\n"


def test_an_exit_status_is_told() -> None:
    assert run("raise SystemExit(7)").code == 7


# -- what it may not --------------------------------------------------------------------------------------------

FORBIDDEN = {
    "reads /etc": "open('/etc/passwd').read()",
    "lists /": "import os; os.listdir('/')",
    "lists home": "import os; os.listdir(os.path.expanduser('~') or '/root')",
    "reads another process": "open(f'/proc/{__import__(\"os\").getppid()}/environ').read()",
    "reads its own process": "open('/proc/self/maps').read()",
    "writes /tmp": "open('/tmp/escaped', 'w').write('x')",
    "writes to the library": "import os; open(os.__file__, 'a').write('x')",
    "follows a link out": "import os; os.symlink('/etc/passwd', 'l'); open('l').read()",
    "links out": "import os; os.link('/etc/passwd', 'l'); open('l').read()",
    "climbs": "open('../../etc/passwd').read()",
    "connects": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "resolves names": "import socket; socket.getaddrinfo('example.com', 80)",
    "sends packets": "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', PORT))",
    "listens": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "opens raw sockets": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "forks": "import os; os.fork()",
    "starts a program": "import subprocess; subprocess.run(['/usr/bin/id'], check=True)",
    "becomes a program": "import os; os.execv('/usr/bin/id', ['id'])",
    "calls a shell": "import os; os.system('id'); raise SystemExit(1)",
    "starts processes": "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join()",
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills everybody": "import os, signal; os.kill(-1, signal.SIGKILL); raise SystemExit(1)",
    "changes its root": "import os; os.chroot('.')",
    "makes a device": "import os; os.mknod('d', 0o20600, os.makedev(1, 8)); open('d', 'rb').read(10)",
    "mounts": "import ctypes as c; raise SystemExit(c.CDLL(None).mount(b'a', b'.', b'tmpfs', 0, None) != 0)",
    "traces its parent": "import ctypes as c, os; raise SystemExit(c.CDLL(None).ptrace(16, os.getppid(), 0, 0) != 0)",
    "forks in C": "import ctypes as c; raise SystemExit(c.CDLL(None).fork() < 0)",
    "calls clone itself": "import ctypes as c; raise SystemExit(c.CDLL(None).syscall(56, 17, 0, 0, 0, 0) < 0)",
    "runs a file in memory": "import os; fd = os.memfd_create('x'); os.execve(fd, ['x'], {})",
    "becomes somebody else": "import os; os.setuid(0 if os.getuid() else 65534); open('/etc/shadow')",
    "leaves its namespaces": "import ctypes as c; raise SystemExit(c.CDLL(None).unshare(0x10000000) != 0)",
}


@pytest.fixture
def server() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture(params=["namespaces", "landlock"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way to confine programs that there is here."""
    if not Sandbox().works(request.param):
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(sandbox, "confines", lambda: request.param)
    return str(request.param)


@pytest.mark.parametrize("program", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_program_that(program: str, server: int, by: str) -> None:
    ran = run(program.replace("PORT", str(server)))
    assert not ran.ok
    assert not Path("/tmp/escaped").exists()
    assert "uid=" not in ran.output


CALL = "import ctypes as c, os, struct; parent = os.getppid(); call = c.CDLL(None, use_errno=True).syscall\n"
# System calls by their numbers on x86-64; each has to be refused with EPERM.
HARMFUL = {
    "limits its parent's processor time": "call(302, parent, 0, struct.pack('QQ', 0, 0), 0)",
    "limits its parent's files": "call(302, parent, 7, struct.pack('QQ', 3, 3), 0)",
    "schedules its parent": "call(144, parent, 5, struct.pack('i', 0))",
    "makes itself nice": "call(141, 0, 0, 19)",
    "pins its parent": "call(203, parent, 8, struct.pack('Q', 1))",
    "signals its group": "call(62, 0, 9)",
    "signals by a thread's number": "call(200, parent, 9)",
    "opens its parent": "call(434, parent, 0)",
    "changes modes": "call(90, b'PLACE', 0o777)",
    "changes owners": "call(92, b'PLACE', 1, 1)",
    "changes times": "call(280, -100, b'PLACE', None, 0)",
    "sets attributes": "call(188, b'PLACE', b'user.x', b'y', 1, 0)",
    "truncates": "call(76, b'PLACE', 0)",
    "opens a file system": "call(430, b'tmpfs', 0)",
    "opens a mount": "call(428, -100, b'/', 1)",
    "watches files": "call(300, 0, 0)",
    "opens netlink": "call(41, 16, 3, 0)",
    "opens a socket of names": "call(41, 1, 1, 0)",
    "uses rings": "call(425, 8, b'\\0' * 120)",
    "reads memory": "call(310, parent, None, 0, None, 0, 0)",
    "loads BPF": "call(321, 0, None, 0)",
    "asks to be signalled": "call(72, 0, 8, parent)",
    "traces": "call(101, 16, parent, 0, 0)",
    "makes keys": "call(248, b'user', b'a', b'b', 1, -1)",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86-64")
@pytest.mark.parametrize("call", HARMFUL.values(), ids=HARMFUL)
def test_a_call_is_refused_that(call: str, by: str, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.write_text("kept")
    before = place.stat()
    ran = run(CALL + f"print({call.replace('PLACE', str(place))}, c.get_errno())")
    assert ran.output == "-1 1\n", ran
    after = place.stat()
    assert (place.read_text(), after.st_mode, after.st_uid) == ("kept", before.st_mode, before.st_uid)
    assert after.st_mtime_ns == before.st_mtime_ns


def test_a_pair_of_sockets_reaches_no_address(by: str) -> None:
    program = """
        import socket
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        a.send(b"x")
        print(b.recv(9))
        a.sendto(b"x", "\\0abstract")
    """
    ran = run(program)
    assert ran.output == "b'x'\n"
    assert "PermissionError" in ran.error


def test_names_and_sizes_outside_are_not_seen(tmp_path: Path) -> None:
    if confines() != "namespaces":
        pytest.skip("Landlock hides contents alone")
    (tmp_path / "mine").write_text("x")
    assert "FileNotFoundError" in run(f"import os; os.stat({str(tmp_path / 'mine')!r})").error
    assert run("import os; print(os.path.exists('/etc/passwd'), os.path.exists('/proc/1'))").output == "False False\n"


def test_the_quota_counts_files_that_have_no_name_any_more() -> None:
    unlinked = """
        import os
        held = []
        for i in range(60):
            f = open(str(i), "wb", 0); os.unlink(str(i)); held.append(f)
            try:
                f.write(b"x" * (1 << 20))
            except OSError:
                break
        print(sum(os.fstat(f.fileno()).st_size for f in held) >> 20)
    """
    if confines() != "namespaces":
        pytest.skip("nothing is written without namespaces")
    assert int(run(unlinked).output) <= BOX.disk
    unnamed = unlinked.replace(
        'open(str(i), "wb", 0); os.unlink(str(i))', 'open(os.open(".", os.O_TMPFILE | 2), "wb", 0)'
    )
    assert int(run(unnamed).output) <= BOX.disk


def test_without_namespaces_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Sandbox().works("landlock"):
        pytest.skip("no Landlock here")
    monkeypatch.setattr(sandbox, "confines", lambda: "landlock")
    assert run("print(open('a.txt').read())", a_txt="there").output == "there\n"
    assert "PermissionError" in run("open('b.txt', 'w')").error
    assert "PermissionError" in run("import os; os.mkdir('b')").error


def test_folders_that_a_program_made_unreadable_are_gone(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run("import os; os.makedirs('a/b'); os.mkdir('c', 0); os.umask(0o777); os.mkdir('d')")
    assert list(tmp_path.iterdir()) == []


def test_two_programs_talk_and_the_first_ones_end_is_the_end() -> None:
    first = "import os\nos.write(4, b'hello\\n')\nprint(os.read(3, 99).decode())"
    second = "import os\nos.write(4, os.read(3, 99).upper())\nwhile True: pass"
    one, other = BOX.run_pair((first, {}), (second, {}))
    assert (one.output.strip(), one.ok) == ("HELLO", True)
    assert not other.ok


def test_secrets_of_the_environment_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in run("import os; print(dict(os.environ))").output


def test_a_program_sees_nothing_of_standard_input() -> None:
    assert run("import sys; print(repr(sys.stdin.read()))").output == "''\n"


# -- limits -----------------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("program", ENDLESS.values(), ids=ENDLESS)
def test_a_program_that_never_ends_is_ended(program: str) -> None:
    ran = run(program, HASTY)
    assert ran.ended in ("time", "killed")
    assert not ran.ok


def test_a_fork_bomb_starts_nothing() -> None:
    ran = run("import os\nfor _ in range(100):\n    try: os.fork()\n    except OSError: pass\nprint('alone')", HASTY)
    assert ran.output.count("alone") <= 1


def test_endless_output_is_cut_and_the_program_with_it() -> None:
    ran = run("while True: print('x' * 1000)")
    assert (ran.ended, len(ran.output)) == ("output", 64 << 10)
    ran = run("import sys\nwhile True: sys.stderr.write('x' * 1000)")
    assert (ran.ended, len(ran.error)) == ("output", 64 << 10)


@pytest.mark.parametrize(
    "program", ["x = bytearray(1 << 40)", "x = [0] * (1 << 33)", "x = []\nwhile 1: x.append('y' * 9999)"]
)
def test_memory_is_limited(program: str) -> None:
    ran = run(program)
    assert not ran.ok
    assert ran.ended == "killed" or "MemoryError" in ran.error


def test_files_are_limited() -> None:
    large = "f = open('a', 'wb')\nwhile True: f.write(b'x' * 65536)"
    assert not run(large).ok
    many = "for i in range(10**6):\n    with open(str(i), 'wb') as f: f.write(b'x' * 500000)"
    assert not run(many).ok


def test_many_at_once_hold_up_nothing_else() -> None:
    """Programs run while the event loop turns: sixteen that take their time, and a clock that ticks meanwhile."""
    events: list[str] = []

    async def program(i: int) -> str:
        ran = await BOX.arun(f"import time; time.sleep(0.1); print({i})")
        events.append("ended")
        return ran.output

    async def tick() -> None:
        while "ended" not in events:
            events.append("tick")
            await asyncio.sleep(0)

    async def both() -> list[str]:
        _, *outputs = await asyncio.gather(tick(), *map(program, range(16)))
        return outputs

    assert asyncio.run(both()) == [f"{i}\n" for i in range(16)]
    assert events.index("ended") > 2  # a blocked loop ticks once before the first program ends


def test_it_can_be_used_from_threads() -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda i=i: found.append(run(f"print({i})").output)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{i}\n" for i in range(6)]


# -- where programs can't be confined ---------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine whose kernel confines nothing."""
    confines.cache_clear()
    monkeypatch.setattr(Sandbox, "works", lambda self, by: False)
    yield
    confines.cache_clear()


def test_nothing_runs_unconfined(nowhere: None, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"can't be confined here: use Linux .*{UNCONFINED}=yes"):
        BOX.run(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("value", ["", "1", "true", "no", "YES"])
def test_nor_unless_it_is_said_in_so_many_words(nowhere: None, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(UNCONFINED, value)
    with pytest.raises(OptionError, match="can't be"):
        BOX.run("print(1)")


def test_where_it_is_said_limits_hold_all_the_same(nowhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNCONFINED, "yes")
    assert run("print(open('a.txt').read())", a_txt="there").output == "there\n"
    assert run("while True: pass", HASTY).ended == "time"
    assert run("while True: print('x' * 1000)").ended == "output"
    assert "MemoryError" in run("x = bytearray(1 << 40)").error
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in run("import os; print(dict(os.environ))").output


def test_what_an_unconfined_program_leaves_behind_is_killed(
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
    """A run that is killed takes what it runs along, or that ends with its time."""
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
