"""Tests of libraries that run out of memory, in real models: however each of them fails, the error names the limit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.e2e.hosting import Config, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.e2e.test_limits import is_limited_by_a_group

import moonpool
from moonpool import LoadFailed, MoonpoolError

pytestmark = [
    pytest.mark.usefixtures("undisturbed"),
    pytest.mark.promise(
        "Limits",
        "If a library runs out of memory while a model is imported, initialized or executed, "
        "the error names the limit: also where the library ends the process with its last "
        "words, with an exception of C++, or by a signal.",
    ),
]

MIB = 1 << 20
# Enough for the interpreter with numpy, and little else.
LIMIT = 768 * MIB
SIGNATURE: Config = {"input": [tensor("X", "FP32", 1)], "output": [tensor("Y", "FP32", 1)]}
LIBRARY = """
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>

extern "C" {
int throws() { return new char[1ul << 40] != nullptr; }
// As libraries do that look at no result.
int touches() { std::memset(std::malloc(1ul << 40), 1, 1); return 0; }
int aborts() { if (!std::malloc(1ul << 40)) std::abort(); return 0; }
}
"""
MODEL = """
import ctypes, os, sys
import numpy as np

library = ctypes.CDLL({library!r})

def act():
    {act}

{at_import}

class TritonPythonModel:
    def initialize(self, args):
        {at_initialize}

    def execute(self, requests):
        {at_execute}
"""
STAGES = ["import", "initialize", "execute"]
# Each has the model's code and the part of the reason beside the limit.
ENDS = {
    "an exception of C++": ("library.throws()", "was killed by SIGABRT"),
    "a pointer to nothing": ("library.touches()", "was killed by SIGSEGV"),
    "an abort without a word": ("library.aborts()", "was killed by SIGABRT"),
    "an exception in Python": ("np.ones(1 << 40)", "MemoryError"),
    "an exception that hides another": (
        "\\n    try:\\n        bytes(1 << 40)\\n    except MemoryError:\\n        raise ValueError('cannot work')",
        "ValueError: cannot work",
    ),
    "OpenBLAS's last words": (
        "\\n    print('OpenBLAS error: Memory allocation still failed after 10 retries, giving up.',"
        " file=sys.stderr, flush=True)\\n    os._exit(1)",
        "exited with 1",
    ),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile a C++ library that fails as others do, in a folder from which instances of any user can load it."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("library")
    source, made = folder / "library.cpp", folder / "library.so"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-O0", source, "-o", made], check=True)
    return made


def error_of(runtime: moonpool.Runtime, file: Path, stage: str, limit: int) -> str:
    config = {**SIGNATURE, **options(MEMORY_LIMIT_BYTES=limit)}
    if stage != "execute":
        with pytest.raises(LoadFailed) as caught:
            runtime.load("short", file, config=config)
        return str(caught.value)
    with hosted(runtime, "short", file, config), pytest.raises(MoonpoolError) as raised:
        runtime.infer("short", {"X": [1.0]}, timeout_s=60.0)
    return str(raised.value)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("end", ENDS)
def test_a_death_by_lack_of_memory_names_the_limit(
    runtime: moonpool.Runtime, tmp_path: Path, library: Path, end: str, stage: str
) -> None:
    if is_limited_by_a_group():
        pytest.skip("in a group the kernel ends a process instead of refusing it memory")
    act, words = ENDS[end]
    places = {f"at_{each}": "act()" if each == stage else "pass" for each in STAGES}
    file = tmp_path / "model.py"
    text = MODEL.format(library=str(library), act=act.encode().decode("unicode_escape"), **places)
    file.write_text(text)

    said = error_of(runtime, file, stage, LIMIT)

    assert words in said
    assert f"{LIMIT} bytes (MOONPOOL_MEMORY_LIMIT_BYTES)" in said


@pytest.mark.parametrize("limit_mib", [24, 32, 48, 56, 64, 80, 96])
def test_a_limit_in_which_numpy_cannot_be_imported_is_named(
    runtime: moonpool.Runtime, tmp_path: Path, limit_mib: int
) -> None:
    """Limits that each stop another library: files that are mapped, memory of OpenBLAS, threads, modules of the
    runtime.
    """
    if is_limited_by_a_group():
        pytest.skip("in a group the kernel ends a process instead of refusing it memory")
    file = tmp_path / "model.py"
    file.write_text("class TritonPythonModel: pass\n")

    said = error_of(runtime, file, "import", limit_mib * MIB)

    assert f"{limit_mib * MIB} bytes (MOONPOOL_MEMORY_LIMIT_BYTES)" in said


@pytest.mark.promise("Limits", "A crash is not blamed on a limit that nobody set.")
def test_a_model_that_crashes_without_a_limit_of_its_own_is_told_of_none(
    runtime: moonpool.Runtime, tmp_path: Path
) -> None:
    """Check a crash at `strict`, where every instance has a limit of half the machine; few crashes come from that."""
    file = tmp_path / "model.py"
    file.write_text("import ctypes\nctypes.string_at(0)\n")

    with pytest.raises(LoadFailed) as caught:
        runtime.load("short", file, config=SIGNATURE | options(SANDBOX="strict"))

    assert "was killed by SIGSEGV" in str(caught.value)
    assert "MOONPOOL_MEMORY_LIMIT_BYTES" not in str(caught.value)


def test_a_library_that_waits_for_ever_instead_of_failing_names_the_limit(
    runtime: moonpool.Runtime, tmp_path: Path
) -> None:
    """Check an import that ended as that of scipy.linalg did in 200 MiB."""
    if is_limited_by_a_group():
        pytest.skip("in a group the kernel ends a process instead of refusing it memory")
    file = tmp_path / "model.py"
    file.write_text("import threading\nthreading.Event().wait()\n")
    limits = options(MEMORY_LIMIT_BYTES=LIMIT, LOAD_TIMEOUT_S=5)
    with pytest.raises(LoadFailed, match="was not ready in time, perhaps because of its memory"):
        runtime.load("short", file, config=SIGNATURE | limits)
