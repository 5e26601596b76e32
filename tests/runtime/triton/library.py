"""The library for tritonserver, compiled where it was not yet."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from moonpool.runtime.triton import install

NATIVE = install.FOLDER / "native"


def library(sanitizers: str = "") -> Path:
    """The library of this moonpool: of the installation, or compiled in its source tree. Skips where there is no
    compiler.

    With sanitizers, separated by commas, also where there is no source tree.
    """
    if not (NATIVE / "Makefile").is_file():
        return _found(sanitizers)
    if shutil.which("make") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler, or no make")
    if not os.access(NATIVE, os.W_OK):
        return _found(sanitizers)  # an earlier build
    folder = NATIVE / "build" / sanitizers.replace(",", "-")
    folder.mkdir(parents=True, exist_ok=True)
    command = ["make", "-C", str(NATIVE), "-j2", f"OUT={folder}"]
    if sanitizers:
        command += [f"SANITIZE={sanitizers}", "CXXFLAGS=-O0"]
    # One process compiles, the others wait.
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.fail(f"the library cannot be compiled:\n{made.stderr}", pytrace=False)
    return folder / "libtriton_moonpool.so"


def _found(sanitizers: str) -> Path:
    if sanitizers:
        pytest.skip("the library with sanitizers is not compiled here")
    try:
        return install.find_library()
    except install.NotInstallable as error:
        pytest.skip(str(error))


def sanitizer_libraries(names: Sequence[str]) -> str:
    """Return the LD_PRELOAD of a program that loads a library with sanitizers. Skips if there are none."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip("there is no C++ compiler")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    for path in found:
        if not os.path.isabs(path):
            pytest.skip(f"the compiler has no {path}")
    preloaded = " ".join(found)
    # The sanitizer for threads ends at once on a kernel whose address randomization has more bits than it knows.
    tried = subprocess.run(["true"], env={**os.environ, "LD_PRELOAD": preloaded}, capture_output=True, check=False)
    if tried.returncode:
        pytest.skip(f"no program runs with {preloaded}: {tried.stderr.decode(errors='replace')}")
    return preloaded
