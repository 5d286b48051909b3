"""The system calls that a sandboxed program may make: all that are not listed here are refused (seccomp).

Listed is what Python, its standard library and numerical packages need to compute, to run threads and to read the files
that the sandbox leaves them. Nothing here reaches another machine, another process, memory that outlives the program,
marks on files (modes, owners, times, attributes) or the machine's settings; a call that a later kernel brings is not
listed, and so refused. Numbers are (x86_64, aarch64), -1 where the architecture lacks the call.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ALLOWED: Mapping[str, tuple[int, int]] = {
    # files, as far as Landlock lets them be opened
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "lseek": (8, 62),
    "open": (2, -1),
    "openat": (257, 56),
    "openat2": (437, 437),
    "creat": (85, -1),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, -1),
    "dup3": (292, 24),
    "pipe": (22, -1),
    "pipe2": (293, 59),
    "stat": (4, -1),
    "lstat": (6, -1),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, -1),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, -1),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getdents": (78, -1),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "umask": (95, 166),
    "mkdir": (83, -1),
    "mkdirat": (258, 34),
    "rmdir": (84, -1),
    "unlink": (87, -1),
    "unlinkat": (263, 35),
    "rename": (82, -1),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "symlink": (88, -1),
    "symlinkat": (266, 36),
    "link": (86, -1),
    "linkat": (265, 37),
    "ftruncate": (77, 46),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "sendfile": (40, 71),
    "copy_file_range": (326, 285),
    # waiting for files
    "poll": (7, -1),
    "ppoll": (271, 73),
    "select": (23, -1),
    "pselect6": (270, 72),
    "epoll_create": (213, -1),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, -1),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd": (284, -1),
    "eventfd2": (290, 19),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    "signalfd": (282, -1),
    "signalfd4": (289, 74),
    # memory
    "brk": (12, 214),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "msync": (26, 227),
    "mincore": (27, 232),
    "membarrier": (324, 283),
    # time
    "gettimeofday": (96, 169),
    "time": (201, -1),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "times": (100, 153),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    "alarm": (37, -1),
    "pause": (34, -1),
    # threads and signals of its own
    "futex": (202, 98),
    "futex_waitv": (449, 449),
    "futex_wake": (454, 454),
    "futex_wait": (455, 455),
    "futex_requeue": (456, 456),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "rseq": (334, 293),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "getcpu": (309, 168),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "restart_syscall": (219, 128),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "exit": (60, 93),
    "exit_group": (231, 94),
    # what it is
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getppid": (110, 173),
    "getpgrp": (111, -1),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpriority": (140, 141),
    "getrusage": (98, 165),
    "getrlimit": (97, 163),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getrandom": (318, 278),
}
"""Calls with any arguments."""

# Calls that depend on their arguments.
_CLONE, _CLONE3, _KILL, _TGKILL, _PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (302, 261)
_FCNTL, _IOCTL = (72, 25), (16, 29)
_NEWEST = 470
"""Calls from this number on are answered as by a kernel that lacks them, so that the C library takes an older one."""

FCNTL_COMMANDS: Mapping[str, int] = {
    "F_DUPFD": 0,
    "F_GETFD": 1,
    "F_SETFD": 2,
    "F_GETFL": 3,
    "F_SETFL": 4,
    "F_GETLK": 5,
    "F_SETLK": 6,
    "F_SETLKW": 7,
    "F_DUPFD_CLOEXEC": 1030,
    "F_GETPIPE_SZ": 1032,
}
"""No owner of signals, no leases, no size of pipes."""

IOCTL_REQUESTS: Mapping[str, int] = {
    "TCGETS": 0x5401,
    "TCGETS2": 0x802C542A,
    "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
}
"""Whether a file is a terminal and how large, how much can be read, and its flags."""

OWN_PID = -1
"""Stands in an instruction for the number of the process that the filter is for."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_THREAD = 0x10000
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


class Instruction(NamedTuple):
    """An instruction of classic BPF: ``code``, how many to leave out if it holds or not, and its ``value``."""

    code: int
    yes: int
    no: int
    value: int


def call_filter(machine: str) -> list[Instruction] | None:
    """Return the filter for a ``machine`` as ``platform.machine()`` names it; None where there is no table for it.

    Arguments are compared by their lower 32 bits, which are all that the kernel reads of those compared.
    """
    if machine not in _ARCHITECTURES:
        return None
    column, architecture = _ARCHITECTURES[machine]
    refused, absent = _answer(_ERRNO | errno.EPERM), _answer(_ERRNO | errno.ENOSYS)
    first, second = _load_argument(0), _load_argument(1)
    own = [first, Instruction(_EQUAL, 0, 1, OWN_PID), _answer(_ALLOW), refused]
    blocks = [
        (_FCNTL, [second, *_allowed_if(FCNTL_COMMANDS.values()), refused]),
        (_IOCTL, [second, *_allowed_if(IOCTL_REQUESTS.values()), refused]),
        (_CLONE, [first, Instruction(_ANY_BIT, 0, 1, _CLONE_THREAD), _answer(_ALLOW), refused]),
        (_CLONE3, [absent]),  # its flags can't be seen here; the C library then takes clone
        (_KILL, own),
        (_TGKILL, own),
        (_PRLIMIT, [*_unless_null(2, refused), _answer(_ALLOW)]),  # reading is fine, writing has a third argument
    ]
    rules = [
        Instruction(_LOAD, 0, 0, _ARCHITECTURE_AT),
        Instruction(_EQUAL, 1, 0, architecture),
        _answer(_KILL_PROCESS),
        Instruction(_LOAD, 0, 0, _NUMBER_AT),
        Instruction(_AT_LEAST, 0, 1, 0x40000000),  # another way to number calls, on x86_64
        _answer(_KILL_PROCESS),
        Instruction(_AT_LEAST, 0, 1, _NEWEST),
        absent,
        *_allowed_if(numbers[column] for numbers in ALLOWED.values() if numbers[column] >= 0),
    ]
    for numbers, block in blocks:
        rules += [Instruction(_EQUAL, 0, len(block), numbers[column]), *block]
    return [*rules, refused]


def _answer(value: int) -> Instruction:
    return Instruction(_RETURN, 0, 0, value)


def _load_argument(index: int, *, upper: bool = False) -> Instruction:
    return Instruction(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4 * upper)


def _allowed_if(values: Iterable[int]) -> list[Instruction]:
    """Allow the call where what was loaded is one of ``values``."""
    return [rule for value in values for rule in (Instruction(_EQUAL, 0, 1, value), _answer(_ALLOW))]


def _unless_null(index: int, otherwise: Instruction) -> list[Instruction]:
    """Return ``otherwise`` unless the pointer at ``index`` is null."""
    halves = (_load_argument(index), _load_argument(index, upper=True))
    return [rule for half in halves for rule in (half, Instruction(_EQUAL, 1, 0, 0), otherwise)]
