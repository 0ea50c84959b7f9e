"""The script that runs one untrusted Python program: `python -I -S confined.py OPTIONS`. `tot.sandbox` starts it.

It imports nothing from tot. There are three nested processes: this one, which reports how the program ended; the init
process of new user, process, mount and IPC namespaces, which sets up the program's files; and the program. Each is
killed when its parent ends. The program may only make the system calls in `_ALLOWED`, some with fixed arguments.

Without user namespaces, Landlock blocks reading all files except Python's and the program's, and all writing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
_ARM = platform.machine() == "aarch64"
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x08000000  # user, mount, process, IPC
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_RETAINED = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""File system flags (statvfs) that a mount in a user namespace must keep, as mount flags."""
_DETACH = 2
_PDEATHSIG, _NAME, _SECCOMP, _CAPBSET_DROP, _SUBREAPER, _NO_NEW_PRIVS = 1, 15, 22, 24, 36, 38
_THREADS = 64
_NOBODY = 65534
"""The real user of a program that root runs: the kernel does not limit root's threads."""

# System calls with their numbers on x86-64 and on 64-bit ARM (- if missing).
_ALLOWED = """
read 0 63, write 1 64, open 2 -, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222,
mprotect 10 226, munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, pread64 17 67, pwrite64 18 68, readv 19 65,
writev 20 66, preadv 295 69, pwritev 296 70, access 21 -, pipe 22 -, pipe2 293 59, select 23 -, pselect6 270 72,
ppoll 271 73, sched_yield 24 124, mremap 25 216, madvise 28 233, mincore 27 232, msync 26 227, membarrier 324 283,
dup 32 23, dup2 33 -, dup3 292 24, nanosleep 35 101, clock_nanosleep 230 115, getitimer 36 102, setitimer 38 103,
alarm 37 -, pause 34 -, getpid 39 172, gettid 186 178, getppid 110 173, getpgrp 111 -, getpgid 121 155,
getsid 124 156, exit 60 93, exit_group 231 94, uname 63 160, flock 73 32, fsync 74 82, fdatasync 75 83,
ftruncate 77 46, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, rename 82 -, renameat 264 38,
renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -, creat 85 -, link 86 -, linkat 265 37, symlink 88 -,
symlinkat 266 36, unlink 87 -, unlinkat 263 35, readlink 89 -, readlinkat 267 78, umask 95 166, gettimeofday 96 169,
time 201 -, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, geteuid 107 175,
getgid 104 176, getegid 108 177, getgroups 115 158, getresuid 118 148, getresgid 120 150, sigaltstack 131 132,
arch_prctl 158 -, futex 202 98, set_tid_address 218 96, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293,
clock_gettime 228 113, clock_getres 229 114, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, eventfd2 290 19, timerfd_create 283 85, timerfd_settime 286 86, openat 257 56, newfstatat 262 79,
statx 332 291, faccessat 269 48, faccessat2 439 439, getrandom 318 278, fadvise64 221 223, fallocate 285 47,
sendfile 40 71, copy_file_range 326 285, statfs 137 43, fstatfs 138 44, socketpair 53 199, recvfrom 45 207,
shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205, wait4 61 260, waitid 247 95,
restart_syscall 219 128, close_range 436 436
"""
_KILL, _TGKILL, _PRLIMIT, _GETAFFINITY, _CLONE, _CLONE3, _PRCTL, _IOCTL, _FCNTL, _SENDTO, _CAPSET, _PIVOT_ROOT = (
    (129, 131, 261, 123, 220, 435, 167, 29, 25, 206, 91, 41)
    if _ARM
    else (62, 234, 302, 204, 56, 435, 157, 16, 72, 44, 126, 155)
)
_CLONE_THREAD = 0x10000
_TERMINAL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # attributes, size, bytes to read, blocking, close on exec
_DESCRIPTOR = (0, 1, 2, 3, 4, 5, 6, 7, 1030)  # duplicates, flags and locks; not the owner of signals
_FAILED = 125


def main() -> None:
    options = json.loads(sys.argv[1])
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options["parent"]:
        os._exit(_FAILED)
    namespaces = options["by"] == "namespaces"
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)  # processes that the program leaves become children of this one
    if namespaces:
        _enter_namespaces()
    above, below = os.pipe()
    if os.fork():
        os.close(below)
        status = int(os.read(above, 16) or signal.SIGKILL)
        if options["by"] == "limits":
            _kill_children()
        _end_as(status)
    os.close(above)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if namespaces:
        _enter_root(options)
    else:
        os.chdir(options["folder"])
    if os.fork():
        for fd in options["pipes"]:
            os.close(fd)
        os.write(below, str(os.wait()[1]).encode())
        os._exit(0)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    _keep_pipes(options["pipes"])
    _limit(options)
    if options["by"] == "landlock":
        _restrict_files([*options["readable"], options["folder"]], options["path"])
    if options["by"] != "limits":
        _drop_capabilities()
        _prctl(_NO_NEW_PRIVS, 1)
        _restrict_calls()
    _run(options["path"])


def _enter_namespaces() -> None:
    """Enter new namespaces with the same user; for root also with `_NOBODY`, which only a process outside can add."""
    uid, gid, pid = os.getuid(), os.getgid(), os.getpid()
    maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
    if uid:
        _checked(_libc.unshare(_NEW_NAMESPACES), "unshare")
        _write_maps(pid, maps)
        return
    entered, left = os.pipe()
    if (helper := os.fork()) == 0:
        os.close(left)
        os.read(entered, 1)
        try:
            _write_maps(pid, {**maps, "uid_map": f"0 0 1\n{_NOBODY} {_NOBODY} 1"})
        except OSError:  # this root is an ordinary user of another namespace, whose threads are limited
            os._exit(1)
        os._exit(0)
    _checked(_libc.unshare(_NEW_NAMESPACES), "unshare")
    os.close(left)
    os.close(entered)
    if os.waitpid(helper, 0)[1]:
        _write_maps(pid, maps)


def _write_maps(pid: int, maps: dict[str, str]) -> None:
    for name, text in maps.items():
        with open(f"/proc/{pid}/{name}", "w") as file:  # noqa: PTH123 - pathlib takes long to import
            file.write(text)


def _kill_children() -> None:
    """Kill remaining processes of the program. This process adopts them when their parents end."""
    while True:
        for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
            try:
                if int(_content(f"/proc/{pid}/stat").rpartition(b")")[2].split()[1]) == os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:  # it has already ended
                continue
        try:
            os.wait()
        except ChildProcessError:
            return


def _end_as(status: int) -> None:
    """End with the same signal or exit status as the program."""
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _enter_root(options: dict[str, Any]) -> None:
    """Mount a size-limited tmpfs as the new root, with the readable paths and the program's files in /work."""
    root = options["folder"]
    files = {name: _content(os.path.join(root, name)) for name in os.listdir(root)}  # noqa: PTH118, PTH208
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={options['disk']},nr_inodes=4096,mode=111")
    bound: list[str] = []
    for path in sorted(options["readable"]):
        inside = root + path
        if any(path.startswith(f"{other}/") for other in bound):
            continue
        os.makedirs(os.path.dirname(inside), exist_ok=True)  # noqa: PTH103, PTH120
        if os.path.islink(path):  # noqa: PTH114
            os.symlink(os.readlink(path), inside)  # noqa: PTH115, PTH211
            continue
        device = not os.path.isdir(path)  # noqa: PTH112
        if device:
            os.close(os.open(inside, os.O_CREAT, 0o600))
        else:
            os.makedirs(inside)  # noqa: PTH103
            bound.append(path)
        _mount(path, inside, None, _BIND | _REC)
        for point in _mounts_in(inside):
            flags = os.statvfs(point).f_flag
            retained = sum(flag for bit, flag in _RETAINED.items() if flags & bit)
            _mount(None, point, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | retained)
    os.makedirs(f"{root}/work", exist_ok=True)  # noqa: PTH103 - the packages may be below /work
    os.chdir(root)
    _checked(_libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/work")
    for name, content in files.items():
        with open(name, "wb") as file:  # noqa: PTH123
            file.write(content)


def _mounts_in(path: str) -> list[str]:
    """Return the mount points at a path and below it."""
    points = [line.split()[4].decode("unicode_escape") for line in _content("/proc/self/mountinfo").splitlines()]
    decoded = [os.fsdecode(point.encode("latin-1")) for point in points]
    return [point for point in decoded if point == path or point.startswith(f"{path}/")]


def _content(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123
        return file.read()


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _checked(_libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]), f"mount {target}")


def _keep_pipes(pipes: list[int]) -> None:
    """Close all descriptors except the standard streams, and the program's pipes as descriptors 3 and 4."""
    above = 3 + len(pipes)
    free = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in pipes]  # any of `pipes` may be 3 or 4
    for fd in pipes:
        os.close(fd)
    for i, fd in enumerate(free):
        os.dup2(fd, 3 + i)
    os.closerange(above, 1024)


def _limit(options: dict[str, Any]) -> None:
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: options["memory"], resource.RLIMIT_NOFILE: 64}
    limits[resource.RLIMIT_CPU] = int(options["seconds"]) + 2
    if options["by"] == "namespaces":
        if _kernel() >= (5, 14):  # older ones count all threads of the user on this machine
            limits[resource.RLIMIT_NPROC] = _THREADS
        if os.getuid() == 0:
            with suppress(OSError):  # not mapped: see `_enter_namespaces`
                os.setresuid(_NOBODY, 0, 0)
    else:  # no other limit on its disk space
        limits[resource.RLIMIT_FSIZE] = 0 if options["by"] == "landlock" else 1 << 20
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def _kernel() -> tuple[int, ...]:
    parts = os.uname().release.split(".")[:2]
    return tuple(int("0" + "".join(filter(str.isdigit, part.partition("-")[0]))) for part in parts)


def _restrict_files(readable: list[str], listed: list[str]) -> None:
    """Restrict file access with Landlock: only `readable` may be opened, and only for reading."""
    version = _checked(_libc.syscall(444, None, 0, 1), "landlock")
    rights = (1 << 13) - 1 | (1 << 13 if version > 1 else 0) | (1 << 14 if version > 2 else 0)
    rules = _checked(_libc.syscall(444, struct.pack("Q", rights), 8, 0), "landlock")
    for path in [*readable, *listed]:
        fd = os.open(path, os.O_PATH)
        allowed = 0b1101 if os.path.isdir(path) else 0b0110  # noqa: PTH112 - execute, read and list; or read and write
        allowed = allowed if path in readable else 0b1000
        _checked(_libc.syscall(445, rules, 1, struct.pack("=Qi", allowed, fd), 0), "landlock")
        os.close(fd)
    _prctl(_NO_NEW_PRIVS, 1)
    _checked(_libc.syscall(446, rules, 0), "landlock")
    os.close(rules)


def _drop_capabilities() -> None:
    capability = 0
    while _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", *[0] * 6)
    _checked(_libc.syscall(_CAPSET, header, none), "capset")


def _restrict_calls() -> None:
    """Restrict system calls with seccomp: other calls fail with EPERM."""
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in _filter())
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(_SECCOMP, 2, program, 0, 0), "seccomp")


def _filter() -> Iterator[tuple[int, int, int, int]]:
    """Yield the BPF instructions of the filter: (code, jump if true, jump if false, value)."""
    load, equal, any_bit, ret = 0x20, 0x15, 0x45, 0x06
    allow, deny, missing = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

    def argument(number: int, half: int = 0) -> int:
        return 16 + 8 * number + 4 * half

    def only(call: int, number: int, values: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
        """Allow a call if an argument has one of these values."""
        yield equal, 0, 2 * len(values) + 2, call
        yield load, 0, 0, argument(number)
        for value in values:
            yield equal, 0, 1, value
            yield ret, 0, 0, allow
        yield ret, 0, 0, deny

    yield load, 0, 0, 4
    yield equal, 1, 0, _ARCHITECTURES[platform.machine()]
    yield ret, 0, 0, deny
    yield load, 0, 0, 0
    for entry in _ALLOWED.replace("\n", " ").split(","):
        number = entry.split()[2 if _ARM else 1]
        if number != "-":
            yield equal, 0, 1, int(number)
            yield ret, 0, 0, allow
    own = os.getpid()
    yield from only(_KILL, 0, (own,))
    yield from only(_TGKILL, 0, (own,))
    yield from only(_PRLIMIT, 0, (0, own))
    yield from only(_GETAFFINITY, 0, (0, own))
    yield from only(_PRCTL, 0, (_NAME,))
    yield from only(_IOCTL, 1, _TERMINAL)
    yield from only(_FCNTL, 1, _DESCRIPTOR)
    yield equal, 0, 1, _CLONE3  # BPF can't read its flags; if it is missing, the C library uses clone
    yield ret, 0, 0, missing
    yield equal, 0, 4, _CLONE
    yield load, 0, 0, argument(0)
    yield any_bit, 0, 1, _CLONE_THREAD
    yield ret, 0, 0, allow
    yield ret, 0, 0, deny
    yield equal, 0, 6, _SENDTO  # only to the other end of a pair, not to an address
    yield load, 0, 0, argument(4)
    yield equal, 0, 3, 0
    yield load, 0, 0, argument(4, 1)
    yield equal, 0, 1, 0
    yield ret, 0, 0, allow
    yield ret, 0, 0, deny
    yield ret, 0, 0, deny


def _run(path: list[str]) -> None:
    source = _content("program.py").decode("utf-8", "replace")
    module = ModuleType("__main__")
    sys.path += path
    sys.modules["__main__"], sys.argv, sys.excepthook = module, ["program.py"], _print_exception
    exec(compile(source, "program.py", "exec"), module.__dict__)


def _print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception without the frames of this file."""
    from traceback import print_exception

    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    print_exception(kind, error, trace)


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, value, 0, 0, 0), "prctl")


def _checked(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


if __name__ == "__main__":
    main()
