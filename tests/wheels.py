"""Wheels that tests write themselves, so that tools need no index."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import numpy as np

# The folder of the packages of the tests. A contained model must be allowed to read it, to have this numpy.
PACKAGES = Path(np.__file__).parents[1]
# Imports the numpy of the tests in the place of this package.
_ANOTHER = f"""
import sys
del sys.modules["numpy"]
sys.path.insert(0, {str(PACKAGES)!r})
import numpy
sys.path.pop(0)
"""


def write_wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    """Write a wheel of version 1."""
    info = f"{name}-1.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    file = folder / f"{name}-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return file


def write_numpy(folder: Path) -> Path:
    """Write a wheel that is the tests' own numpy, in an environment of the same Python."""
    return write_wheel(folder, "numpy", {"numpy/__init__.py": _ANOTHER})


def variables(wheels: Path) -> dict[str, str]:
    """Return variables with which pip and uv know these wheels, and no index."""
    for_pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    for_uv = {"UV_NO_INDEX": "1", "UV_FIND_LINKS": str(wheels), "UV_OFFLINE": "1"}
    return {**for_pip, **for_uv, "UV_NO_CACHE": "1"}
