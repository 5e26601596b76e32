"""Checks that models of the tests have the level of `pytest --sandbox LEVEL`."""

from __future__ import annotations

import pytest
from tests.e2e.hosting import ECHO, MODELS, hosted

import moonpool


@pytest.mark.promise(
    "Seeing sandboxes",
    "At `strict`, models can do all that they can at `standard`, numpy and torch included, "
    "except for the entries of one table, each with its reason. `pytest --sandbox strict` runs "
    "the tests that way, as root and as a user without rights, comparisons with a real Triton "
    "included.",
)
def test_models_that_say_nothing_are_at_the_level_of_the_run(
    runtime: moonpool.Runtime, pytestconfig: pytest.Config
) -> None:
    with hosted(runtime, "echo", MODELS / "echo.py", ECHO):
        (instance,) = runtime.instances("echo")

    level = pytestconfig.getoption("--sandbox") or "standard"
    assert instance["sandbox"]["level"] == level
    assert ("seccomp" in instance["sandbox"]["layers"]) == (level == "strict")
