"""Fuzz one target for so many seconds with atheris: `python -m tests.fuzz.run TARGET SECONDS [FOLDER]`.

New inputs that reach new code go to the folder, where there is one; else they are forgotten. What is found stays in a
file `crash-TARGET-...` in the current folder, and the exit status is not 0.
"""

from __future__ import annotations

import gc
import logging
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    name, seconds, *folders = sys.argv[1:]
    with atheris.instrument_imports(include=["moonpool"]):
        from tests.fuzz.targets import TARGETS
    logging.getLogger("moonpool").setLevel(logging.CRITICAL + 1)
    target = TARGETS[name]
    runs = 0

    def run(data: bytes) -> None:
        nonlocal runs
        runs += 1
        target(data)
        if runs % 1000 == 0:
            gc.collect()

    known = CORPUS / name
    folders += [str(known)] if known.is_dir() else []
    options = [f"-max_total_time={seconds}", "-max_len=1024", "-timeout=20", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], f"-artifact_prefix=crash-{name}-", *options, *folders], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
