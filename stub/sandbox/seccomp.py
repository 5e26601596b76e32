"""The filter for system calls: a program for the kernel's classic BPF, from rules.

Source: `Documentation/userspace-api/seccomp_filter.rst` and `seccomp(2)`.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from typing import TYPE_CHECKING

from moonpool.stub.sandbox import kernel, syscalls

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moonpool.stub.sandbox.rules import Alternatives

    # An instruction: code, jump if true, jump if false, operand.
    Instruction = tuple[int, int, int, int]

_LOAD, _AND, _JUMP, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
# Where the fields of `struct seccomp_data` are; the lower half of an argument comes first on both machines.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_NOT_PERMITTED, _NOT_THERE = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
# Numbers of x86-64 with this bit are those of its x32 form.
_X32 = 0x40000000
_FARTHEST = 255

_SET_MODE_FILTER = 1
_TSYNC = 1


def program(
    machine: str,
    allowed: Mapping[str, Alternatives],
    killed: Iterable[str] = (),
    absent: Iterable[str] = (),
) -> bytes:
    """The filter for `machine`. What it allows wins over what it kills; other machines' calls kill.

    Names of calls that the machine does not have are passed over. Raises KeyError for an unknown machine.
    """
    numbers = syscalls.numbers(machine)
    verdicts: dict[int, list[Instruction]] = {}
    for verdict, names in ((_KILL, killed), (_NOT_THERE, absent)):
        verdicts.update({numbers[name]: _returning(verdict) for name in names if name in numbers})
    for name, alternatives in allowed.items():
        if name in numbers:
            verdicts[numbers[name]] = _checking(alternatives)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, syscalls.ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_searching(_ranges(verdicts, max(numbers.values()))),
    ]
    return struct.pack("=" + "HBBI" * len(code), *(word for each in code for word in each))


def install(filter_program: bytes) -> None:
    """Have the kernel run it on every call of every thread of this process from now on. Raises OSError."""
    code = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = struct.pack("@HP", len(filter_program) // 8, ctypes.addressof(code))
    thread = kernel.call("seccomp", _SET_MODE_FILTER, _TSYNC, header)
    if thread:
        raise OSError(errno.EBUSY, f"thread {thread} has another filter")


def _returning(verdict: int) -> list[Instruction]:
    return [(_RETURN, 0, 0, verdict)]


def _checking(alternatives: Alternatives) -> list[Instruction]:
    """Allow where one of the alternatives holds."""
    if not alternatives:
        return _returning(_ALLOW)
    code: list[Instruction] = []
    for conditions in alternatives:
        checks: list[Instruction] = []
        for place, (argument, mask, value) in enumerate(conditions):
            # Past the checks that are left, and the return.
            to_next = 3 * (len(conditions) - place - 1) + 1
            checks += [
                (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
                (_AND, 0, 0, mask),
                (_IF_EQUAL, 0, to_next, value),
            ]
        code += [*checks, *_returning(_ALLOW)]
    return code + _returning(_NOT_PERMITTED)


def _ranges(
    verdicts: Mapping[int, list[Instruction]], last: int
) -> list[tuple[int, list[Instruction]]]:
    """First number and code of each range of numbers that are judged alike, up to all numbers."""
    refused = _returning(_NOT_PERMITTED)
    ranges: list[tuple[int, list[Instruction]]] = []
    for number in range(last + 1):
        code = verdicts.get(number, refused)
        if not ranges or ranges[-1][1] != code:
            ranges.append((number, code))
    return [*ranges, (last + 1, _returning(_NOT_THERE)), (_X32, _returning(_KILL))]


def _searching(ranges: list[tuple[int, list[Instruction]]]) -> list[Instruction]:
    """Look up the number by halving."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _searching(ranges[:middle]), _searching(ranges[middle:])
    pivot = ranges[middle][0]
    if len(below) <= _FARTHEST:
        return [(_IF_AT_LEAST, len(below), 0, pivot), *below, *above]
    return [(_IF_AT_LEAST, 0, 1, pivot), (_JUMP, 0, 0, len(below)), *below, *above]
