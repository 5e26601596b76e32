"""A program on a kernel that lacks something:

    python tests/lesser_kernel.py landlock_create_ruleset=ENOSYS unshare=EPERM -- PROGRAM ARGUMENT...

A filter makes these system calls fail with these errors, for the program and all that it starts.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from moonpool.stub.sandbox import identity, kernel, seccomp

_LOAD_NUMBER, _IF_EQUAL, _RETURN = (0x20, 0, 0, 0), 0x15, 0x06
_ERRNO, _ALLOW = 0x00050000, 0x7FFF0000


def command(program: list[str], **refusals: int) -> list[str]:
    """The arguments that start `program` where these calls fail with these errors."""
    words = [f"{name}={errno.errorcode[code]}" for name, code in refusals.items()]
    return [sys.executable, str(Path(__file__)), *words, "--", *program]


def lack(refusals: Mapping[str, int]) -> None:
    """Make these calls fail with these errors in this process and its children, for good."""
    code = [_LOAD_NUMBER]
    for name, error in refusals.items():
        code += [(_IF_EQUAL, 0, 1, kernel.NUMBERS[name]), (_RETURN, 0, 0, _ERRNO | error)]
    code.append((_RETURN, 0, 0, _ALLOW))
    identity.forbid_new_privileges()
    seccomp.install(struct.pack("=" + "HBBI" * len(code), *(word for each in code for word in each)))


def main() -> None:
    at = sys.argv.index("--")
    refusals = dict(word.split("=") for word in sys.argv[1:at])
    lack({name: getattr(errno, code) for name, code in refusals.items()})
    program = sys.argv[at + 1 :]
    os.execvp(program[0], program)


if __name__ == "__main__":
    main()
