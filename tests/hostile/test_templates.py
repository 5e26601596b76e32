"""Instances that were forked from a template at strict: the template may fork; they may not, and reach no other
process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.hosting import options
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import PATIENT, SIGNATURE, Attacker

import moonpool


@pytest.fixture(scope="module")
def forked(runtime: moonpool.Runtime, model_folder: Path) -> Iterator[Attacker]:
    """One of two instances of a model, whichever answers."""
    settings = options(**PATIENT, SANDBOX="strict", PREFORK="imports")
    runtime.load("forked", model_folder, config=SIGNATURE | settings, instances=2)
    yield Attacker(runtime, "forked")
    runtime.unload("forked")


def template_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def others(runtime: moonpool.Runtime, forked: Attacker) -> dict[str, int]:
    pids = [int(str(each["pid"])) for each in runtime.instances(forked.name)]
    found = {f"instance {number}": pid for number, pid in enumerate(pids)}
    found["template"] = template_of(pids[0])
    own = {f"{name}, as it calls itself": inside(pid) for name, pid in found.items()}
    return found | own | {"keeper": 1}


def inside(pid: int) -> int:
    """The number of a process in its own PID namespace."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[-1]) for line in lines if line.startswith("NSpid:"))


REACHES = ["signal_to", "signal_to_thread", "signal_by_descriptor", "slow_down", "prioritise_io", "limit"]


@pytest.mark.promise(
    "The sandbox: `strict`",
    "An instance forked from a template cannot reach the template or its siblings, and cannot fork.",
)
@pytest.mark.parametrize("what", REACHES)
def test_the_template_and_the_other_instance_are_out_of_reach(
    forked: Attacker, others: dict[str, int], what: str
) -> None:
    """Though all of them are one user."""
    assert others["template"] != os.getpid()
    for pid in others.values():
        outcome = forked.tries(f"processes.{what}", pid=pid)
        # A fork may do this to itself. Another attempt may be made by the other instance.
        assert outcome.word == "EPERM" or pid == outcome.by


STARTS = ["fork", "clone_without_thread", "clone3_process", "spawn", "execute_program"]


@pytest.mark.promise("The sandbox: `strict`", "An instance forked …")
@pytest.mark.parametrize("what", STARTS)
def test_a_fork_cannot_fork(forked: Attacker, what: str) -> None:
    assert forked.tries(f"processes.{what}").word in ("EPERM", "EACCES", "ENOSYS")


@pytest.mark.promise("The sandbox: `strict`", "An instance forked …")
def test_a_fork_is_as_confined_as_any_instance(forked: Attacker) -> None:
    assert forked.tries("files.read", path="/etc/passwd").word == "EACCES"
    assert forked.tries("network.tcp", port=80).word == "EPERM"
    assert forked.tries("kernel.forget_the_parent").word == "EPERM"
    assert forked.tries("kernel.with_bad", name="bpf").word == "killed"
