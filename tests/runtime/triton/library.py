"""The library for tritonserver, compiled where it was not yet."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moonpool.runtime.triton import installation

NATIVE = installation.FOLDER / "native"


def library() -> Path:
    """The library of this moonpool: of the installation, or compiled in its source tree. Skips where there is no compiler."""
    if not (NATIVE / "Makefile").is_file():
        return _found()
    if shutil.which("make") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler, or no make")
    folder = NATIVE / "build"
    if not os.access(NATIVE, os.W_OK):
        return _found()  # what was compiled before
    folder.mkdir(exist_ok=True)
    # One process compiles, the others wait.
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(
            ["make", "-C", NATIVE, "-j2"], capture_output=True, text=True, check=False
        )
    if made.returncode:
        pytest.fail(f"the library cannot be compiled:\n{made.stderr}", pytrace=False)
    return folder / "libtriton_moonpool.so"


def _found() -> Path:
    try:
        return installation.find_library()
    except installation.NotInstallable as error:
        pytest.skip(str(error))
