"""Compiles rules for system calls into a program for the kernel's classic BPF, and installs it as a filter.

The program first checks the architecture. A process can switch to the 32-bit table of the processor, in which the same
numbers mean other calls; so calls of another table end the process. Then the program finds the range of the call's
number by halving, and compares arguments if the range has conditions. It reads registers only: a filter cannot follow a
pointer, because another thread could change the memory after the check.

Source: `Documentation/userspace-api/seccomp_filter.rst` and `seccomp(2)`.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import sys
from collections.abc import Collection, Iterable, Mapping
from itertools import starmap

from moonpool.ipc import syscalls
from moonpool.stub.sandbox import kernel
from moonpool.stub.sandbox.rules import ALL_BITS, Alternatives

# Instructions: operation, how far to jump if true, if false, operand.
Code = list[tuple[int, int, int, int]]

_LOAD, _AND, _JUMP, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x54, 0x05, 0x15, 0x35, 0x06
# The offsets of the fields of `struct seccomp_data`. The lower half of an argument comes first on both machines.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
# `struct sock_filter`
_INSTRUCTION = struct.Struct("=HBBI")
_OPERAND = 4
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_END: Code = [(_RETURN, 0, 0, _KILL_PROCESS)]
_LET_THROUGH: Code = [(_RETURN, 0, 0, _ALLOW)]
_REFUSE: Code = [(_RETURN, 0, 0, _ERRNO | errno.EPERM)]
_PRETEND_ABSENT: Code = [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
# An error with the number 0 is success.
_PRETEND_DONE: Code = [(_RETURN, 0, 0, _ERRNO)]
# Numbers of x86-64 with this bit are those of its x32 form.
_X32 = 0x40000000
_FARTHEST = 255

_SET_MODE_FILTER = 1
_TSYNC = 1


def program(
    machine: str,
    allowed: Mapping[str, Alternatives],
    killed: Iterable[str] = (),
    absent: Collection[str] = (),
    silent: Mapping[str, Alternatives] | None = None,
) -> bytes:
    """Return the filter for `machine`. `allowed` wins over `killed`. A call of another machine's table ends the
    process.

    If a call is both allowed and absent, it fails with ENOSYS when its conditions refuse it. A call that is not allowed
    succeeds without effect if one of its alternatives in `silent` holds. Names of calls that the machine does not have
    are skipped. Raises KeyError for an unknown machine.
    """
    numbers = syscalls.numbers(machine)
    judged = [_REFUSE] * (max(numbers.values()) + 1)
    for code, names in ((_END, killed), (_PRETEND_ABSENT, absent)):
        for name in names:
            if name in numbers:
                judged[numbers[name]] = code
    silent = silent or {}
    for name in [name for name in (*allowed, *silent) if name in numbers]:
        code = _PRETEND_ABSENT if name in absent else _REFUSE
        if name in silent:
            code = _checking(silent[name], _PRETEND_DONE, code)
        if name in allowed:
            code = _checking(allowed[name], _LET_THROUGH, code)
        judged[numbers[name]] = code
    instructions = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, syscalls.ARCHITECTURES[machine]),
        *_END,
        (_LOAD, 0, 0, _NUMBER),
        *_searching(_ranges(judged)),
    ]
    return b"".join(starmap(_INSTRUCTION.pack, instructions))


class PreparedFilter:
    """A filter that lies ready for the kernel."""

    def __init__(self, filter_program: bytes) -> None:
        self.program = ctypes.create_string_buffer(filter_program, len(filter_program))
        header = struct.pack("@HP", len(filter_program) // _INSTRUCTION.size, ctypes.addressof(self.program))
        self._call = kernel.prepared("seccomp", _SET_MODE_FILTER, _TSYNC, header)

    def places_of(self, operand: int) -> list[int]:
        """Return the places of `operand` wherever the program compares with it."""
        found = []
        for number, (code, _, _, value) in enumerate(_INSTRUCTION.iter_unpack(self.program)):
            if code == _IF_EQUAL and value == operand:
                found.append(number * _INSTRUCTION.size + _OPERAND)
        return found

    def change(self, places: Iterable[int], operand: int) -> None:
        """Put another number at these places."""
        data = operand.to_bytes(4, sys.byteorder)
        for place in places:
            self.program[place : place + 4] = data  # type: ignore[call-overload]

    def install(self) -> None:
        """Install it for every call of every thread of this process from now on. Raises OSError."""
        thread = self._call()
        if thread:
            raise OSError(errno.EBUSY, f"thread {thread} has another filter")


def install(filter_program: bytes) -> None:
    """Install a filter for every call of every thread of this process from now on. Raises OSError."""
    PreparedFilter(filter_program).install()


def _checking(alternatives: Alternatives, then: Code, otherwise: Code) -> Code:
    """Go on with `then`, which has one instruction, if one of the alternatives holds, or if there are none."""
    if not alternatives:
        return then
    code: Code = []
    for conditions in alternatives:
        checks = then
        for argument, mask, values in reversed(conditions):
            checks = _comparing(argument, mask, list(values), len(checks)) + checks
        code += checks
    return code + otherwise


def _comparing(argument: int, mask: int, values: list[int], rest: int) -> Code:
    """Continue after these instructions if the argument is one of the values, else after the `rest` as well."""
    code: Code = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    if mask != ALL_BITS:
        code.append((_AND, 0, 0, mask))
    last = len(values) - 1
    code += [(_IF_EQUAL, last - place, 0, value) for place, value in enumerate(values[:-1])]
    return [*code, (_IF_EQUAL, 0, rest, values[-1])]


def _ranges(judged: list[Code]) -> list[tuple[int, Code]]:
    """Return the first number and the code of each range of numbers with the same code. The last range has no end."""
    ranges = [(0, judged[0])]
    for number, code in enumerate(judged):
        if code is not ranges[-1][1]:
            ranges.append((number, code))
    return [*ranges, (len(judged), _PRETEND_ABSENT), (_X32, _END)]


def _searching(ranges: list[tuple[int, Code]]) -> Code:
    """Return code that finds the number's range by halving."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _searching(ranges[:middle]), _searching(ranges[middle:])
    pivot = ranges[middle][0]
    if len(below) <= _FARTHEST:
        return [(_IF_AT_LEAST, len(below), 0, pivot), *below, *above]
    return [(_IF_AT_LEAST, 0, 1, pivot), (_JUMP, 0, 0, len(below)), *below, *above]
