"""A server that all tests of real clients share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.running import RunningServer, running

from moonpool.runtime.conformance import comparing

MODELS = comparing.EXPECTED.with_name("models")
LOADED = ("add_sub", "batched", "every", "fails", "repeat", "says", "sums")


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = Path(shutil.copytree(MODELS, tmp_path_factory.mktemp("clients") / "repository"))
    flags = [f"--load-model={name}" for name in LOADED]
    with running(repository, "--model-control-mode=explicit", *flags) as found:
        yield found
