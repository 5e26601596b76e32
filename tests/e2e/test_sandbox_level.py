"""What `pytest --sandbox LEVEL` says is what the models of the tests have."""

from __future__ import annotations

import pytest
from tests.e2e.hosting import ECHO, MODELS, hosted

import moonpool


def test_models_that_say_nothing_are_at_the_level_of_the_run(
    runtime: moonpool.Runtime, pytestconfig: pytest.Config
) -> None:
    with hosted(runtime, "echo", MODELS / "echo.py", ECHO):
        (instance,) = runtime.instances("echo")

    level = pytestconfig.getoption("--sandbox") or "standard"
    assert instance["sandbox"]["level"] == level
    assert ("seccomp" in instance["sandbox"]["layers"]) == (level == "strict")
