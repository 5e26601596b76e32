"""Device nodes of GPUs for contained models, where the driver does not say which ones they are."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.card import results

from moonpool.runtime.isolation import gpu_access
from moonpool.runtime.model.gpus import bus_id


@contextlib.contextmanager
def nodes_known() -> Iterator[None]:
    """Let a GPU have a node where the driver does not say which one: the fake driver of the tests has none."""
    if os.path.isdir("/proc/driver/nvidia"):
        yield
        return
    results.record("device nodes", None, text="/proc/driver/nvidia is not here; node 0 is assumed")
    with tempfile.TemporaryDirectory(prefix="moonpool-card-") as folder:
        place = Path(folder, bus_id(0))
        place.mkdir()
        (place / "information").write_text("Device Minor: 0\n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_access, "_INFORMATION", f"{folder}/{{}}/information")
            patch.setattr(gpu_access, "uuid", str)
            yield
