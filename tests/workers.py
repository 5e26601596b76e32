"""How the suite is divided among the workers of pytest-xdist: a file stays together, and so do files that share servers."""

from __future__ import annotations

from typing import Any

import pytest

# Each has a server for a whole run, with models to load: dozens of them where it is tritonserver.
WITH_SERVERS = (
    "tests/server/clients",
    "tests/server/hostile",
    "tests/triton",
    "tests/triton/backend",
    "tests/triton/protocol",
)


def unit_of(nodeid: str) -> str:
    """What goes to one worker together with this test."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in WITH_SERVERS else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What `--dist loadfile` gives, but for the units."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = unit_of
    return scheduler
