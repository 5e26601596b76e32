"""Run a command as a user without rights: `python as_nobody.py PATH... -- COMMAND...`, as root.

The paths can be reached by it, also below folders that are closed to it, such as root's home.
"""

from __future__ import annotations

import os
import sys

from moonpool.stub.sandbox import identity, mounts, namespaces

NOBODY = 65534


def main() -> None:
    border = sys.argv.index("--")
    paths, command = sys.argv[1:border], sys.argv[border + 1 :]
    namespaces.enter(network=True)
    mounts.open_up(map(os.path.realpath, paths), NOBODY)
    identity.become(NOBODY)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
