"""The filter of system calls, run here on every number: which calls a sandboxed program may make."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.reward.sandbox.calls import ALLOWED, FCNTL_COMMANDS, IOCTL_REQUESTS, Instruction, call_filter

CONDITIONAL = {
    "x86_64": {"clone": 56, "clone3": 435, "kill": 62, "tgkill": 234, "prlimit64": 302, "fcntl": 72, "ioctl": 16},
    "aarch64": {"clone": 220, "clone3": 435, "kill": 129, "tgkill": 131, "prlimit64": 261, "fcntl": 25, "ioctl": 29},
}
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000
OWN = 1234


def decided(rules: list[Instruction], architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would answer: classic BPF over (number, architecture, instruction pointer, six arguments)."""
    words = [number, architecture, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32 & 0xFFFFFFFF]
    at, loaded = 0, 0
    while True:
        code, yes, no, value = rules[at]
        value = OWN if value == -1 else value
        if code == 0x06:
            return value
        if code == 0x20:
            loaded = words[value // 4]
            at += 1
            continue
        holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
        at += 1 + (yes if holds else no)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_call_that_is_not_listed_is_refused(machine: str) -> None:
    rules = call_filter(machine)
    assert rules is not None
    listed = {numbers[machine == "aarch64"] for numbers in ALLOWED.values()} - {-1}
    judged = {number: decided(rules, ARCHITECTURES[machine], number) for number in range(600)}
    assert {number for number, answer in judged.items() if answer == ALLOW} - set(
        CONDITIONAL[machine].values()
    ) == listed
    others = set(judged) - listed - set(CONDITIONAL[machine].values())
    assert {judged[number] for number in others} == {EPERM, ENOSYS}
    assert all(judged[number] == ENOSYS for number in range(470, 600))
    assert decided(rules, 0x40000003, 1) == KILL  # of another architecture
    assert decided(rules, ARCHITECTURES[machine], 0x40000000 | 1) == KILL  # x32
    assert all(rule.yes < 256 and rule.no < 256 for rule in rules)
    assert len(rules) < 4096  # the kernel takes no more


@given(
    st.sampled_from(["x86_64", "aarch64"]),
    st.tuples(*[st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, OWN, *IOCTL_REQUESTS.values()])] * 3),
)
def test_calls_that_depend_on_their_arguments(machine: str, arguments: tuple[int, ...]) -> None:
    rules, calls = call_filter(machine), CONDITIONAL[machine]
    assert rules is not None

    def allowed(name: str) -> bool:
        return decided(rules, ARCHITECTURES[machine], calls[name], arguments) == ALLOW

    low = [argument & 0xFFFFFFFF for argument in arguments]
    assert allowed("kill") == allowed("tgkill") == (low[0] == OWN)
    assert allowed("clone") == bool(low[0] & 0x10000)
    assert allowed("ioctl") == (low[1] in IOCTL_REQUESTS.values())
    assert allowed("fcntl") == (low[1] in FCNTL_COMMANDS.values())
    assert allowed("prlimit64") == (arguments[2] == 0)
    assert not allowed("clone3")


def test_the_numbers_are_those_of_the_kernel_s_header() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.is_file():
        pytest.skip("no header of the kernel")
    words = [line.split() for line in header.read_text().splitlines() if line.startswith("#define __NR_")]
    numbers = {word[1].removeprefix("__NR_"): int(word[2]) for word in words}
    known = {name: pair[0] for name, pair in ALLOWED.items() if pair[0] >= 0 and name in numbers}
    assert len(known) > 130
    assert known == {name: numbers[name] for name in known}
    assert CONDITIONAL["x86_64"] == {name: numbers[name] for name in CONDITIONAL["x86_64"]}


DANGEROUS = re.compile(
    "socket|connect|bind|listen|accept|sendto|sendm|recv|shm|msg|sem|mq_|key|bpf|perf|io_|ptrace|process_|pidfd|fault"
    "|mount|fsopen|fspick|fsconfig|open_tree|pivot|chroot|handle|exec|fork|unshare|setns|memfd|splice|xattr|chmod|chown"
    "|utime|^truncate|mknod|notify|module|kexec|reboot|swap|quota|acct|syslog|clock_set|settimeofday|adj|setuid|setgid"
    "|setre|setfs|cap|seccomp|landlock|personality|prctl|sched_set|ioprio|mbind|mempolicy|_pages|mlock|queue|tkill"
    "|setpriority|setsid|setpgid|setrlimit|sethost|setdomain|iopl|ioperm|vhangup|kcmp|setattr"
)


def test_no_call_of_a_dangerous_kind_is_listed() -> None:
    """By name, so that one that is added by mistake is seen."""
    assert [name for name in ALLOWED if DANGEROUS.search(name)] == ["futex_requeue"]
