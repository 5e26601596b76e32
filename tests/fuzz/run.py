"""Fuzz targets for so many seconds each with atheris: `python -m tests.fuzz.run SECONDS TARGET [TARGET ...]`.

New inputs that reach new code go to `--folder`, where there is one; else they are forgotten. What is found stays in a
file `crash-TARGET-...` in the current folder, and the exit status is not 0.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-untyped]

CORPUS = Path(__file__).parent / "corpus"


def fuzz(name: str, seconds: int, folder: str) -> None:
    """Fuzz one target. Never returns: libFuzzer ends the process."""
    from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    runs = 0

    def run(data: bytes) -> None:
        nonlocal runs
        runs += 1
        target(data)
        if runs % 1000 == 0:
            gc.collect()

    # libFuzzer writes new inputs to the first folder.
    folders = [folder, str(CORPUS / name)]
    options = [f"-max_total_time={seconds}", "-max_len=1024", "-timeout=20", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], f"-artifact_prefix=crash-{name}-", *options, *folders], run)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run")
    parser.add_argument("seconds", type=int)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    # Instrumenting takes longer than a short run, so all targets have it done once.
    with atheris.instrument_imports(include=["moonpool"]):
        import tests.fuzz.targets  # noqa: F401
    logging.getLogger("moonpool").setLevel(logging.CRITICAL + 1)
    for name in arguments.targets:
        with tempfile.TemporaryDirectory() as forgotten:
            child = os.fork()
            if child == 0:
                fuzz(name, arguments.seconds, arguments.folder or forgotten)
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"The target '{name}' ended with {os.waitstatus_to_exitcode(status)}.")


if __name__ == "__main__":
    main()
