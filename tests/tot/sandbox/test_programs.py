"""The sandbox: allowed actions, forbidden actions, limits, and cleanup."""

from __future__ import annotations

import os
import platform
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest

from tot import sandbox
from tot.sandbox import ProgramResult, Sandbox, confines

BOX = Sandbox(seconds=20)


def run(program: str, box: Sandbox = BOX, **files: str) -> ProgramResult:
    return box.run(dedent(program), {name.replace("_", "."): text for name, text in files.items()})


# -- allowed actions --------------------------------------------------------------------------------------------


def test_a_program_has_its_files_and_output() -> None:
    result = run("import sys; print(open('a.txt').read().upper()); print('oh', file=sys.stderr)", a_txt="héllo")
    assert (result.output, result.error, result.ended, result.code, result.ok) == ("HÉLLO\n", "oh\n", "exited", 0, True)


def test_sets_of_texts_have_one_order() -> None:
    program = "print(*{chr(i) * 3 for i in range(97, 123)})"
    assert run(program).output == run(program).output


def test_a_program_imports_from_given_folders_only(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("NAME = 'shown'")
    program = "import shown; print(shown.NAME)"
    assert run(program, Sandbox(seconds=20, folders=(str(tmp_path),))).output == "shown\n"
    assert "ModuleNotFoundError" in run(program).error


def test_a_program_may_write_files_which_are_deleted_with_it() -> None:
    result = run("import os; open('b.txt', 'w').write('x' * 100); print(os.getcwd(), os.path.getsize('b.txt'))")
    folder, size = result.output.split()
    assert size == "100"
    assert not (Path(folder) / "b.txt").exists()


def test_only_the_standard_library_is_available() -> None:
    assert run("import math, re, json, collections, itertools, heapq, typing; print(math.comb(5, 2))").output == "10\n"
    assert "No module named 'torch'" in run("import torch").error
    assert "No module named 'tot'" in run("import tot").error


def test_an_exception_is_reported_with_its_line() -> None:
    result = run("def f():\n    return 1 / 0\nf()")
    assert (result.ended, result.code, result.ok) == ("exited", 1, False)
    assert "ZeroDivisionError" in result.error
    assert "line 2" in result.error


@pytest.mark.parametrize("program", ["def f(:", "\x00", "\ud800", "x = '''", "b'\\xff'.decode()", "(" * 500])
def test_texts_that_are_not_programs_are_a_program_error(program: str) -> None:
    result = BOX.run(program)
    assert result.ended == "exited"
    assert result.code == 1


def test_invalid_utf_8_in_output_is_replaced() -> None:
    assert run("import os; os.write(1, b'\\xff\\xfeab\\n')").output == "\ufffd\ufffdab\n"


def test_an_exit_status_is_reported() -> None:
    assert run("raise SystemExit(7)").code == 7


# -- forbidden actions ------------------------------------------------------------------------------------------

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
    """Every available way to sandbox programs."""
    if not Sandbox().works(request.param):
        pytest.skip(f"no {request.param} here")
    monkeypatch.setattr(sandbox, "confines", lambda: request.param)
    return str(request.param)


@pytest.mark.parametrize("program", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_program_is_stopped_that(program: str, server: int, by: str) -> None:
    result = run(program.replace("PORT", str(server)))
    assert not result.ok
    assert not Path("/tmp/escaped").exists()
    assert "uid=" not in result.output


CALL = "import ctypes as c, os, struct; parent = os.getppid(); call = c.CDLL(None, use_errno=True).syscall\n"
# System calls by number on x86-64; each must fail with EPERM.
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
def test_a_call_is_rejected_that(call: str, by: str, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.write_text("kept")
    before = place.stat()
    result = run(CALL + f"print({call.replace('PLACE', str(place))}, c.get_errno())")
    assert result.output == "-1 1\n", result
    after = place.stat()
    assert (place.read_text(), after.st_mode, after.st_uid) == ("kept", before.st_mode, before.st_uid)
    assert after.st_mtime_ns == before.st_mtime_ns


def test_a_socket_pair_reaches_no_address(by: str) -> None:
    program = """
        import socket
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        a.send(b"x")
        print(b.recv(9))
        a.sendto(b"x", "\\0abstract")
    """
    result = run(program)
    assert result.output == "b'x'\n"
    assert "PermissionError" in result.error


def test_names_and_sizes_of_files_outside_are_hidden(tmp_path: Path) -> None:
    if confines() != "namespaces":
        pytest.skip("Landlock hides contents alone")
    (tmp_path / "mine").write_text("x")
    assert "FileNotFoundError" in run(f"import os; os.stat({str(tmp_path / 'mine')!r})").error
    assert run("import os; print(os.path.exists('/etc/passwd'), os.path.exists('/proc/1'))").output == "False False\n"


def test_the_quota_includes_unlinked_files() -> None:
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


def test_without_namespaces_no_file_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Sandbox().works("landlock"):
        pytest.skip("no Landlock here")
    monkeypatch.setattr(sandbox, "confines", lambda: "landlock")
    assert run("print(open('a.txt').read())", a_txt="there").output == "there\n"
    assert "PermissionError" in run("open('b.txt', 'w')").error
    assert "PermissionError" in run("import os; os.mkdir('b')").error


def test_unreadable_folders_of_a_program_are_deleted(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run("import os; os.makedirs('a/b'); os.mkdir('c', 0); os.umask(0o777); os.mkdir('d')")
    assert list(tmp_path.iterdir()) == []


def test_two_programs_communicate_until_the_first_one_ends() -> None:
    first = "import os\nos.write(4, b'hello\\n')\nprint(os.read(3, 99).decode())"
    second = "import os\nos.write(4, os.read(3, 99).upper())\nwhile True: pass"
    one, other = BOX.run_pair((first, {}), (second, {}))
    assert (one.output.strip(), one.ok) == ("HELLO", True)
    assert not other.ok


def test_two_programs_communicate_whatever_descriptors_the_process_has_open() -> None:
    first = "import os\nos.write(4, b'hello\\n')\nprint(os.read(3, 99).decode())"
    second = "import os\nos.write(4, os.read(3, 99).upper())\nwhile True: pass"
    with ExitStack() as stack:
        for least in range(58, 68):
            while (file := stack.enter_context(open(os.devnull))).fileno() < least:  # noqa: PTH123
                pass
            one, _ = BOX.run_pair((first, {}), (second, {}))
            assert one.output.strip() == "HELLO", file.fileno()


def test_secrets_in_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert "secret" not in run("import os; print(dict(os.environ))").output


def test_a_program_has_no_standard_input() -> None:
    assert run("import sys; print(repr(sys.stdin.read()))").output == "''\n"
