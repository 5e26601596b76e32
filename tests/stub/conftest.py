"""Shares fixtures among the tests of the model's side."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

import moonpool.stub.pb_utils as pb_utils


@pytest.fixture
def imports() -> Iterator[None]:
    """Undo what loading a model does to the imports of the process."""
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        # Modules of the standard library and numpy stay, because others refer to them.
        if not _is_installed(name):
            del sys.modules[name]
    sys.modules.update(modules)
    pb_utils.set_model_dir("")


def _is_installed(name: str) -> bool:
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("numpy", "moonpool")
