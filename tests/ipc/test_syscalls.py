"""The numbers of system calls, beside those that the machine's headers have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moonpool.ipc import syscalls
from moonpool.stub.sandbox import rules

_HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
# The generic header has another name for this call on machines of 64 bits.
_OTHERWISE = {"fstatat": "newfstatat"}
_OF_NO_MACHINE = {"arch_specific_syscall", "syscalls"}
_OF_OTHERS = {"sync_file_range2"}
# Only machines of 32 bits have these calls, for times after 2038.
_OF_32_BITS = range(403, 424)


@pytest.mark.promise("Layers of the sandbox", "The filter is made for x86-64 …")
@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_numbers_are_those_of_the_kernel_s_headers(machine: str) -> None:
    header = _HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not here")
    found = {
        _OTHERWISE.get(name, name): int(number)
        for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", header.read_text(), re.MULTILINE)
    }
    ours = syscalls.numbers(machine)

    wrong = {
        name: (number, ours.get(name))
        for name, number in found.items()
        if name not in _OF_NO_MACHINE | _OF_OTHERS and number not in _OF_32_BITS and ours.get(name) != number
    }
    assert wrong == {}


def test_an_unknown_machine_has_the_numbers_that_all_have() -> None:
    numbers = syscalls.numbers("riscv64")

    assert numbers["landlock_create_ruleset"] == 444
    assert "read" not in numbers


def test_every_name_in_the_rules_is_a_call_of_some_machine() -> None:
    known = {name for machine in syscalls.ARCHITECTURES for name in syscalls.numbers(machine)}
    named = rules.allowed(pid=1, ports=True, metadata=True, forks=True, signals_are_scoped=True, launches=True)

    assert {*named, *rules.KILLED, *rules.ABSENT} - known == set()


def test_nothing_is_both_allowed_and_an_attack() -> None:
    named = rules.allowed(pid=1, ports=True, metadata=True, forks=True, signals_are_scoped=True, launches=True)

    assert set(named) & rules.KILLED == set()
