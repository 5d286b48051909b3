"""The inside of a sandbox: shuts itself in, then runs a program. Started by ``run`` as a plain file.

Only the standard library is used, and all of it is imported before the doors close.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import types
from typing import Any, Literal, NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2
_PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, _CAPABILITY_VERSION = 24, 47, 4, 0x20080522
_CAPABILITIES = 64  # numbers that there may be
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_TEMPORARY_FILES = 1000  # and folders

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _PATH_BENEATH = 444, 445, 446, 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _REFER, _TRUNCATE, _IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 13, 1 << 14, 1 << 15
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_READ_FOLDER = _READ_FILE | _READ_DIR
_CHANGE = _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE | _WRITE_FILE
_NETWORK = 0b11  # to bind and to connect
_SCOPES = 0b11  # abstract sockets and signals

# As they are before the program runs, which may put others in their place.
_write, _exec, _compile, _dumps, _leave = os.write, exec, compile, json.dumps, os._exit


class Task(NamedTuple):
    """A program and what to do with it. ``search`` are further folders of packages.

    ``tests`` and ``token``: of asserts; ``function`` and ``arguments``: of a call.
    """

    kind: Literal["stdin", "call", "assert"]
    program: str
    search: list[str]
    tests: str = ""
    token: str = ""
    function: str = ""
    arguments: list[Any] = []  # noqa: RUF012  (never changed)


class Limits(NamedTuple):
    """What a program may use. Seconds of processor time, bytes of memory, of one file, and open files."""

    cpu_s: int
    memory: int
    file: int
    files: int


class Doors(NamedTuple):
    """What is closed. ``calls`` are the instructions of a filter of system calls, -1 in which is the process.

    ``readable`` are paths, ``listed`` are folders whose names can be seen, ``temporary`` is one that can be written
    (none if empty). ``namespaces`` are those to be made, as flags. ``parent`` is 0 where it can't be known.
    """

    isolation: Literal["full", "network", "limits"]
    limits: list[int]
    calls: list[list[int]] | None
    readable: list[str]
    listed: list[str]
    temporary: str
    temporary_bytes: int
    namespaces: int
    parent: int


def main(task: Task, doors: Doors, result: int) -> None:
    """Close the doors and run the program; ``result`` is a file descriptor for what it comes to."""
    try:
        _close(doors)
    except (OSError, ValueError, AttributeError) as error:  # the last two where this isn't Linux
        _answer(result, f"closed: {error}")
        _leave(1)
    module = types.ModuleType("__main__" if task.kind == "stdin" else "program")
    sys.modules[module.__name__], sys.argv = module, ["program.py"]
    sys.orig_argv = ["program.py"]
    sys.path += task.search
    names = vars(module)
    _exec(_compile(task.program, "program.py", "exec", dont_inherit=True), names)
    if task.kind == "call":
        name = task.function
        function = names[name] if name in names else getattr(names["Solution"](), name)
        _answer(result, _dumps(function(*task.arguments)))
    elif task.kind == "assert":
        _exec(_compile(task.tests, "tests.py", "exec", dont_inherit=True), names)
        _answer(result, task.token)
    sys.stdout.flush()
    _leave(0)


def _answer(to: int, text: str) -> None:
    message = text.encode()
    while message:
        message = message[_write(to, message) :]


def _close(doors: Doors) -> None:
    """End with the parent, keep to the limits, and give up what the isolation says. Raises ``OSError`` if it can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    _end_with_parent(libc)
    if doors.parent and os.getppid() != doors.parent:  # it ended before
        _leave(1)
    if doors.namespaces:
        _separate(libc, doors)
    _limit(Limits(*doors.limits))
    if doors.isolation == "limits":
        return
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "promise of no new privileges")
    if doors.isolation == "full":
        _close_files(libc, doors)
    _drop_capabilities(libc)
    _close_calls(libc, doors.calls or [])


def _end_with_parent(libc: Any) -> None:
    _checked(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "signal at the parent's end")


def _separate(libc: Any, doors: Doors) -> None:
    """Go on in a new process that has namespaces of its own; this one waits for it and ends with its status.

    The new one is not the first of its process namespace: signals that it sends itself would not reach it.
    """
    user, group, files = os.getuid(), os.getgid(), doors.isolation == "full"
    kinds = doors.namespaces if files else doors.namespaces & ~_CLONE_NEWNS
    _checked(libc.unshare(kinds), "namespaces")
    if kinds & _CLONE_NEWUSER:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    if files:
        _checked(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mounts of its own")
        options = f"size={doors.temporary_bytes},nr_inodes={_TEMPORARY_FILES},mode=0700".encode()
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        mounted = libc.mount(b"tmpfs", doors.temporary.encode(), b"tmpfs", flags, options)
        _checked(mounted, "place for temporary files")
    held, holder = os.pipe()
    first = _forked(libc, held, holder)
    if first == 0:
        while True:
            signal.pause()
    program = _forked(libc, held, holder)
    if program == 0:
        os.close(held)
        return
    _, status = os.waitpid(program, 0)
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    _leave(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _forked(libc: Any, held: int, holder: int) -> int:
    """Fork a child (0 in it) that ends with its parent, which keeps ``holder`` open as long as it lives."""
    child = os.fork()
    if child == 0:
        _end_with_parent(libc)
        os.close(holder)
        if select.select([held], [], [], 0)[0]:  # it ended before
            _leave(1)
    return child


def _limit(limits: Limits) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_FSIZE, limits.file),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def _close_files(libc: Any, doors: Doors) -> None:
    """Let only what is readable be opened from now on, and only what is temporary, and /dev/null, be written."""
    abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    _checked(abi, "Landlock, which closes the file system")
    handled = (1 << 13) - 1
    handled |= (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0) | (_IOCTL_DEV if abi >= 5 else 0)
    attributes = struct.pack("=Q", handled)
    attributes += struct.pack("=Q", _NETWORK) if abi >= 4 else b""
    attributes += struct.pack("=Q", _SCOPES) if abi >= 6 else b""
    rules = libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    _checked(rules, "Landlock, which closes the file system")
    granted = [(path, _READ_FOLDER) for path in doors.readable] + [(path, _READ_DIR) for path in doors.listed]
    granted += [(os.devnull, _READ_FILE | _WRITE_FILE)]
    granted += [(doors.temporary, _READ_FOLDER | _CHANGE)] if doors.temporary else []
    for path, rights in granted:
        if not os.path.exists(path):
            continue
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = rights if os.path.isdir(path) else rights & (_READ_FILE | _WRITE_FILE)
        rule = struct.pack("=Qi", rights & handled, handle)
        _checked(libc.syscall(_LANDLOCK_ADD, rules, _PATH_BENEATH, rule, 0), f"Landlock for {path}")
        os.close(handle)
    _checked(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "Landlock, which closes the file system")
    os.close(rules)


def _drop_capabilities(libc: Any) -> None:
    """Give up every capability: what root may do, and what a user may in a user namespace of its own."""
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    for number in range(_CAPABILITIES):  # refused where there are none, or there is no such number
        libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    _checked(libc.capset(header, bytes(24)), "way to drop capabilities")


def _close_calls(libc: Any, calls: list[list[int]]) -> None:
    """Let only the system calls that pass the filter be made from now on (seccomp)."""
    own = os.getpid()
    rules = [struct.pack("=HBBI", code, yes, no, own if value < 0 else value) for code, yes, no, value in calls]
    code = ctypes.create_string_buffer(b"".join(rules))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(code)))
    _checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp, which closes system calls")


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"the kernel gives no {what}")


def _start() -> None:
    with open(int(sys.argv[1]), encoding="utf-8") as file:
        task, doors, result = json.load(file)
    main(Task(**task), Doors(**doors), result)


if __name__ == "__main__":
    _start()
