"""The inside of a sandbox: shuts itself in, then runs a program. Started by ``sandbox`` as a plain file.

Only the standard library is used, and all of it is imported before the doors close.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from typing import Any, Literal, NamedTuple

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2

# System calls that are refused, by architecture: (x86_64, aarch64), -1 where the architecture lacks the call.
_REFUSED: dict[str, tuple[int, int]] = {
    # other machines
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    "sendto": (44, 206),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # other processes
    "fork": (57, -1),
    "vfork": (58, -1),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "tkill": (200, 130),
    "kcmp": (312, 272),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "setpriority": (141, 140),
    # another user's processes don't end with their parent
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "setgroups": (116, 159),
    "capset": (126, 91),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    # memory and messages that outlive a process or that no limit counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # marks on files, which Landlock doesn't guard
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "truncate": (76, 45),
    "mknod": (133, -1),
    "mknodat": (259, 33),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    # the machine
    "setrlimit": (160, 164),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "personality": (135, 92),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "vhangup": (153, 58),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
}
_CLONE, _CLONE3, _KILL, _TGKILL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (302, 261)
_FCNTL, _IOCTL = (72, 25), (16, 29)
_SIGNAL_OTHERS = (8, 15)  # F_SETOWN, F_SETOWN_EX: a signal to any process when a pipe is ready
_SIGNAL_OR_TYPE = (0x8901, 0x8902, 0x5412)  # FIOSETOWN, SIOCSPGRP; TIOCSTI types into a terminal
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_THREAD = 0x10000
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _PATH_BENEATH = 444, 445, 446, 1
_WRITE_FILE, _READ_FILE, _READ_FOLDER = 0b0010, 0b0100, 0b1100

_write = os.write  # as it is before the program runs


class Limits(NamedTuple):
    """What a program may use. Seconds of processor time, bytes of memory, of one file, and open files."""

    cpu_s: int
    memory: int
    file: int
    files: int


class Order(NamedTuple):
    """What to run and behind which doors. ``readable`` are paths, ``result`` is a file descriptor."""

    kind: Literal["stdin", "call", "assert"]
    isolation: Literal["full", "network", "limits"]
    limits: list[int]
    readable: list[str]
    folder: str
    result: int
    parent: int


def main(order: Order) -> None:
    """Close the doors and run ``program.py`` of the folder."""
    program, tests, call = (_taken(order.folder, name) for name in ("program.py", "tests.py", "call.json"))
    asked: dict[str, Any] = json.loads(call)
    dump, leave = json.dumps, os._exit
    try:
        _close(order)
    except (OSError, ValueError, AttributeError) as error:  # the last two where this isn't Linux
        _tell(order.result, f"closed: {error}")
        leave(1)
    module = types.ModuleType("__main__" if order.kind == "stdin" else "program")
    sys.modules[module.__name__], sys.argv = module, ["program.py"]
    sys.orig_argv = ["program.py"]
    names = vars(module)
    exec(compile(program, "program.py", "exec", dont_inherit=True), names)
    if order.kind == "call":
        name = asked["function"]
        function = names[name] if name in names else getattr(names["Solution"](), name)
        _tell(order.result, dump(function(*asked["arguments"])))
    elif order.kind == "assert":
        exec(compile(tests, "tests.py", "exec", dont_inherit=True), names)
        _tell(order.result, asked["token"])
    sys.stdout.flush()
    leave(0)


def _taken(folder: str, name: str) -> str:
    """The text of a file, which is gone then: a program can't look up what it will be asked."""
    path = os.path.join(folder, name)
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    os.unlink(path)
    return text


def _tell(to: int, text: str) -> None:
    message = text.encode()
    while message:
        message = message[_write(to, message) :]


def _close(order: Order) -> None:
    """End with the parent, keep to the limits, and give up what the isolation says. Raises ``OSError`` if it can't."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "signal at the parent's end")
    if os.getppid() != order.parent:  # it ended before
        os._exit(1)
    _limit(Limits(*order.limits))
    if order.isolation == "limits":
        return
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "promise of no new privileges")
    if order.isolation == "full":
        _close_files(libc, order.readable)
    _close_calls(libc)


def _limit(limits: Limits) -> None:
    for name, value in (
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory),
        (resource.RLIMIT_FSIZE, limits.file),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def _close_files(libc: Any, readable: list[str]) -> None:
    """From now on only files below ``readable`` can be opened, and none but /dev/null be written, made or removed."""
    abi = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    _checked(abi, "Landlock, which closes the file system")
    everything = (1 << 13) - 1 | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0)
    attributes = struct.pack("=Q", everything)
    rules = libc.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    _checked(rules, "Landlock, which closes the file system")
    for path in [*filter(os.path.exists, readable), os.devnull]:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = _READ_FOLDER if os.path.isdir(path) else _READ_FILE | (_WRITE_FILE if path == os.devnull else 0)
        rule = struct.pack("=Qi", rights, handle)
        _checked(libc.syscall(_LANDLOCK_ADD, rules, _PATH_BENEATH, rule, 0), f"Landlock for {path}")
        os.close(handle)
    _checked(libc.syscall(_LANDLOCK_RESTRICT, rules, 0), "Landlock, which closes the file system")
    os.close(rules)


def _close_calls(libc: Any) -> None:
    """Refuse system calls that reach other machines, other processes or the machine's settings (seccomp)."""
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}")
    rules = _rules(*_ARCHITECTURES[platform.machine()], os.getpid())
    code = ctypes.create_string_buffer(b"".join(rules))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(code)))
    _checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0), "seccomp, which closes the network")


def _rules(column: int, architecture: int, pid: int) -> list[bytes]:
    """A filter in classic BPF. Threads may be made and a process may signal itself; the rest of ``_REFUSED`` is."""

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
        return struct.pack("=HBBI", code, yes, no, value)

    def answer(value: int) -> bytes:
        return step(_RETURN, value)

    refused, absent = answer(_ERRNO | errno.EPERM), answer(_ERRNO | errno.ENOSYS)

    def unless(values: tuple[int, ...]) -> list[bytes]:
        """Refused if the second argument is one of ``values``."""
        checks = [rule for value in values for rule in (step(_EQUAL, value, 0, 1), refused)]
        return [step(_LOAD, _ARGUMENTS_AT + 8), *checks, answer(_ALLOW)]

    first = _ARGUMENTS_AT
    blocks = [
        (_FCNTL, unless(_SIGNAL_OTHERS)),
        (_IOCTL, unless(_SIGNAL_OR_TYPE)),
        (_CLONE, [step(_LOAD, first), step(_ANY_BIT, _CLONE_THREAD, 0, 1), answer(_ALLOW), refused]),
        (_CLONE3, [absent]),  # its flags can't be seen here; the C library then takes clone
        (_KILL, [step(_LOAD, first), step(_EQUAL, pid, 0, 1), answer(_ALLOW), refused]),
        (_TGKILL, [step(_LOAD, first), step(_EQUAL, pid, 0, 1), answer(_ALLOW), refused]),
        # prlimit: reading (its third argument is null) is fine
        (
            _PRLIMIT,
            [
                step(_LOAD, first + 16),
                step(_EQUAL, 0, 0, 3),
                step(_LOAD, first + 20),
                step(_EQUAL, 0, 0, 1),
                answer(_ALLOW),
                refused,
            ],
        ),
    ]
    rules = [
        step(_LOAD, _ARCHITECTURE_AT),
        step(_EQUAL, architecture, 1, 0),
        answer(_KILL_PROCESS),
        step(_LOAD, _NUMBER_AT),
        step(_AT_LEAST, 0x40000000, 0, 1),  # another way to number calls, on x86_64
        answer(_KILL_PROCESS),
    ]
    for number, block in blocks:
        rules += [step(_EQUAL, number[column], 0, len(block)), *block]
    for number in _REFUSED.values():
        if number[column] >= 0:
            rules += [step(_EQUAL, number[column], 0, 1), refused]
    return [*rules, answer(_ALLOW)]


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"the kernel gives no {what}")


if __name__ == "__main__":
    main(Order(*json.loads(sys.argv[1])))
