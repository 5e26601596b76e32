"""Programs of tests that are written in C++, made with the sanitizers; where there is no compiler, their tests are
skipped.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Werror"]


def compiled(program: Path, sources: list[Path], *options: str, sanitizers: str = "address,undefined") -> Path:
    """The program, made of these sources."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    sanitized = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    command = [compiler, "-std=c++17", "-O1", "-g", *_WARNINGS, *sanitized, *options]
    ended = subprocess.run(
        [*command, *map(str, sources), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        pytest.fail(f"{program.name} was not compiled:\n{ended.stderr}", pytrace=False)
    return program
