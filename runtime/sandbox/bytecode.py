"""Bytecode of moonpool's own files, for instances that may write none.

A contained instance cannot keep what Python compiles, and would compile all of it again whenever one starts.
"""

from __future__ import annotations

import compileall
import functools
import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

_FOLDERS = [Path(__file__).resolve().parents[2] / name for name in ("ipc", "stub")]


@functools.cache
def keep() -> None:
    """Write it beside the files, as most installers have done already; once in a process.

    Does nothing where Python is not to write bytecode, or where the folders cannot be written to. Any thread may
    call it.
    """
    for folder in () if sys.dont_write_bytecode else _FOLDERS:
        # Else all of it would be compiled in vain.
        if _may_write(Path(cache_from_source(str(folder / "__init__.py"))).parent):
            compileall.compile_dir(folder, quiet=2)


def _may_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
