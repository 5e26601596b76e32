"""Fixtures for hostile models: a runtime with a sibling that must not notice them, and one attacker for each level."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hostile.attacker import Attacker, answers, copied, load_attacker, load_sibling

import moonpool

Attackers = Callable[[str], Attacker]


@pytest.fixture(scope="module")
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(drain_timeout_s=10.0) as runtime:
        load_sibling(runtime)
        yield runtime


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The attacker in a model directory of its own."""
    return copied(tmp_path_factory.mktemp("repository") / "attacker")


@pytest.fixture(scope="module")
def attackers(runtime: moonpool.Runtime, model_folder: Path) -> Attackers:
    """The attacker at a level, loaded when it is first asked for."""
    loaded: dict[str, Attacker] = {}

    def at(level: str) -> Attacker:
        if level not in loaded:
            loaded[level] = load_attacker(runtime, level, model_folder)
        return loaded[level]

    return at


@pytest.fixture(autouse=True)
def _undisturbed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test when the runtime or the sibling did not outlive the attempt unharmed."""
    if "runtime" not in request.fixturenames:
        yield
        return
    runtime: moonpool.Runtime = request.getfixturevalue("runtime")
    before = runtime.instances("sibling")
    yield
    assert answers(runtime)
    assert runtime.instances("sibling") == before


@pytest.fixture(scope="session")
def is_root() -> bool:
    return os.geteuid() == 0
