"""Stands in for a step in tests of the runner:   python -m tests.card.stand_in KIND"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.card.results import record

_HANGS = "import signal, os, sys; print('hangs', flush=True); os.close(int(sys.argv[1])); signal.pause()"


def _start_one_that_hangs() -> int:
    here, there = os.pipe()
    # It is in another session, and has this process's output open.
    started = subprocess.Popen([sys.executable, "-c", _HANGS, str(there)], start_new_session=True, pass_fds=[there])
    os.close(there)
    # The kernel has no words of a process for a moment of its start, and these are what the runner records.
    os.read(here, 1)
    os.close(here)
    return started.pid


def main(kind: str) -> None:
    record("process", True, os.getpid())
    if kind == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        record("process", True, _start_one_that_hangs())
        signal.pause()
    elif kind == "leaves":
        record("process", True, _start_one_that_hangs())
    elif kind == "lacks":
        import package_that_no_machine_has  # type: ignore[import-not-found]  # noqa: F401
    elif kind == "writes":
        for number in range(100):
            record(f"line {number}", True, number, text="a" * 1000)
    elif kind == "prints":
        # The name of the step before each line is most of what the log gets.
        sys.stdout.write("a\n" * 1_000_000)


if __name__ == "__main__":
    main(sys.argv[1])
