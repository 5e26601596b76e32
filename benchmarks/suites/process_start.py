"""The start of an interpreter, the yardstick for the start of a stub."""

from __future__ import annotations

import subprocess
import sys
import time


def start_us(program: str = "import numpy") -> float:
    """Time `python -c PROGRAM` from before its start until its end."""
    command = [sys.executable, "-c", program]
    before = time.perf_counter_ns()
    # Not from this folder: `-c` puts it in front of the path, and every import looks there.
    subprocess.run(command, cwd="/", check=True)
    return (time.perf_counter_ns() - before) / 1000
