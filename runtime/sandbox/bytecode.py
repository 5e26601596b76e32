"""Bytecode of moonpool's own files, for instances that may write none.

A contained instance cannot keep what Python compiles, and would compile all of it again whenever one starts.
"""

from __future__ import annotations

import compileall
import functools
import sys
from pathlib import Path

_FOLDERS = [Path(__file__).resolve().parents[2] / name for name in ("ipc", "stub")]


@functools.cache
def keep() -> None:
    """Write it beside the files, as most installers have done already; once in a process.

    Does nothing where Python is not to write bytecode, or where the folders cannot be written to. Any thread may
    call it.
    """
    if not sys.dont_write_bytecode:
        for folder in _FOLDERS:
            compileall.compile_dir(folder, quiet=2)
