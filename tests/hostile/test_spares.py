"""Spares that wait while models of all levels run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hostile.attacker import Attacker, load_attacker
from tests.inside import registry_of
from tests.waiting import wait_until

import moonpool

# Each of these needs the right to trace the other process. Its socket has no name by which it could be reached.
TRACING: dict[str, dict[str, object]] = {
    "trace": {},
    "read_memory": {"address": 1 << 20, "size": 8},
    "write_memory": {"address": 1 << 20, "text": "evil"},
    "read_memory_file": {"address": 1 << 20, "size": 8},
    "take_descriptor": {"fd": 0},
    "take_descriptor_by_path": {"fd": 0},
    "read_environment": {},
    "list_of_process": {"name": "fd"},
}


@pytest.fixture
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime(drain_timeout_s=10.0, spares=1) as runtime:
        yield runtime


@pytest.fixture
def standard(runtime: moonpool.Runtime, model_folder: Path) -> Attacker:
    load_attacker(runtime, "strict", model_folder)
    return load_attacker(runtime, "standard", model_folder)


@pytest.fixture(autouse=True)
def _undisturbed() -> None:
    """No sibling here."""


def spare_of(runtime: moonpool.Runtime) -> int:
    spares = registry_of(runtime).stubs.spares
    (pid,) = wait_until(lambda: [] if spares.is_making else spares.waiting, what="a spare")
    return pid


@pytest.mark.promise("Spares", "While it waits, no process of the runtime's user can look into a spare or write to it.")
@pytest.mark.parametrize("attempt", TRACING)
def test_a_trusted_model_gets_nothing_of_a_spare(
    runtime: moonpool.Runtime, standard: Attacker, attempt: str, is_root: bool
) -> None:
    if is_root:
        pytest.skip("nothing is closed to root without a sandbox")
    pid = spare_of(runtime)

    assert standard.tries(f"processes.{attempt}", pid=pid, **TRACING[attempt]).word in ("EACCES", "EPERM")
    assert spare_of(runtime) == pid


@pytest.mark.promise("Spares", "A spare that was killed …")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1])
def test_a_trusted_model_that_signals_a_spare_keeps_nobody_from_loading(
    runtime: moonpool.Runtime, standard: Attacker, model_folder: Path, number: int
) -> None:
    standard.finds("processes.signal_number", pid=spare_of(runtime), number=int(number))

    name = f"after_{number}"
    attacker = load_attacker(runtime, "strict", model_folder, name)
    assert attacker.finds("kernel.make", name="getpid") == attacker.pid
    runtime.unload(name)
    assert spare_of(runtime)
