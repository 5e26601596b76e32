"""A launcher whose stubs are `misbehave.py`. Started in place of `runtime/triton/launcher.py`."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAUNCHER = runpy.run_path(str(HERE.parents[1] / "runtime" / "triton" / "launcher.py"))


def main() -> None:
    channel_fd = int(sys.argv[1])
    LAUNCHER["leave_server"](channel_fd)
    LAUNCHER["make_importable"]("moonpool", str(HERE.parents[1] / "src" / "moonpool"))
    from moonpool.runtime.process import child as process
    from moonpool.runtime.triton.launching import launch

    os.environ["FAULT_BOOT"] = process._BOOT
    process._BOOT = str(HERE / "misbehave.py")
    launch(channel_fd)


if __name__ == "__main__":
    main()
    os._exit(0)
