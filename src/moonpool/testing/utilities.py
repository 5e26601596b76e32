"""`import triton_python_backend_utils` in a program that is no stub."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import moonpool_pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def utilities() -> Iterator[None]:
    """Inside, `import triton_python_backend_utils` and `import c_python_backend_utils` work.

    For programs and test frameworks other than pytest, in which a plug-in does this. A module of one of these names
    that can be imported anyway, as in Triton's own stub, is left alone. Afterwards the names are gone again, but what
    was imported stays valid. Not for two threads at once.
    """
    uninstall = moonpool_pytest.install()
    try:
        yield
    finally:
        uninstall()
