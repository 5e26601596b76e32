"""An interpreter for the programs of seccomp, so that filters of any machine can be tried on this one."""

from __future__ import annotations

import struct
from collections.abc import Sequence

KILL, ALLOW, EPERM, ENOSYS = 0x80000000, 0x7FFF0000, 0x00050001, 0x00050026
# An error without a number: success without effect.
DONE = 0x00050000


def verdict(program: bytes, architecture: int, number: int, arguments: Sequence[int] = (), steps: int = 4096) -> int:
    """Return the action that the kernel would take for the call."""
    words = [argument & (1 << 64) - 1 for argument in (*arguments, *(0,) * 6)][:6]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, architecture, 0, *words)
    code = list(struct.iter_unpack("=HBBI", program))
    accumulator, place = 0, 0
    for _ in range(steps):
        operation, if_true, if_false, operand = code[place]
        place += 1
        if operation == 0x20:  # load a word
            accumulator = struct.unpack_from("<I", data, operand)[0]
        elif operation == 0x54:  # and
            accumulator &= operand
        elif operation == 0x05:  # jump
            place += operand
        elif operation == 0x15:  # jump if equal
            place += if_true if accumulator == operand else if_false
        elif operation == 0x35:  # jump if not less
            place += if_true if accumulator >= operand else if_false
        elif operation == 0x06:  # return
            return int(operand)
        else:
            raise ValueError(f"no such instruction: {operation:#x}")
    raise ValueError("the program does not end")
