"""A program as a user without rights:

    python tests/as_nobody.py PROGRAM ARGUMENT...

For root; others are without rights already, and the program is theirs. The tree and the interpreter may lie below
folders that are closed to others: the program has mounts of its own, on which it reaches them, and nothing is writable
but the folders for temporary files.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from moonpool.ipc.policy import Policy
from moonpool.stub.sandbox import granted, identity, mounts, namespaces

NOBODY = 65534
ROOT = Path(__file__).resolve().parent.parent


def command(program: list[str]) -> list[str]:
    """The arguments that start `program` so."""
    return [sys.executable, str(Path(__file__)), *program]


def become_nobody() -> None:
    """Give up root's rights in this process and its children, for good. Raises OSError if this root may not."""
    policy = Policy(
        read=[str(ROOT), sys.prefix, sys.base_prefix],
        granted=[(path, True) for path in (tempfile.gettempdir(), "/dev/shm", "/proc")],
    )
    namespaces.enter(network=True)
    mounts.rearrange(policy, NOBODY, granted.opened(policy.granted, NOBODY))
    identity.become(NOBODY)


def main() -> None:
    if os.geteuid() == 0:
        become_nobody()
        os.environ["HOME"] = tempfile.gettempdir()
        # This user may not write into the tree.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
