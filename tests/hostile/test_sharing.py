"""Shared memory and locks that a contained model has without a grant, and what its processes send to its stub, are ways
out to nothing.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.hostile.attacker import Attacker, answers, load_attacker
from tests.hostile.conftest import Attackers
from tests.leaks import shm_names

import moonpool

MIB = 1 << 20


def has_its_own(attacker: Attacker) -> bool:
    (instance,) = attacker.runtime.instances(attacker.name)
    return "shared_memory" in instance["sandbox"]["layers"]


@pytest.fixture
def strict(attackers: Attackers) -> Attacker:
    attacker = attackers("strict")
    if not has_its_own(attacker):
        pytest.skip("without mounts of its own a model has no shared memory")
    return attacker


@pytest.fixture
def secret() -> Iterator[Path]:
    """Shared memory of another program, which all users may read."""
    file = Path(f"/dev/shm/moonpool_hostile_{os.getpid()}")
    file.write_text("secret")
    file.chmod(0o644)
    yield file
    file.unlink()


@pytest.mark.promise(
    "The sandbox: `strict`",
    "In `/dev/shm` it has its own shared memory, within the limit of its scratch folder. It sees "
    "nobody else's there, nobody sees it, and it is gone with the process.",
)
@pytest.mark.promise(
    "Layers of the sandbox",
    "A model has shared memory of its own in /dev/shm, where locks, queues and blocks of `multiprocessing` work "
    "without a grant. It sees "
    "nobody else's there, nobody sees it, and it is gone with the process.",
)
def test_shared_memory_is_the_model_s_own(
    runtime: moonpool.Runtime, strict: Attacker, model_folder: Path, secret: Path
) -> None:
    before = shm_names()
    other = load_attacker(runtime, "strict", model_folder, "sharing")
    try:
        assert strict.finds("sharing.keep", name="mine", text="secret")[0] == "mine"

        assert strict.finds("sharing.read", name="mine") == "secret"
        assert other.finds("sharing.names") == []
        assert other.tries("sharing.read", name="mine").word == "ENOENT"
        assert strict.tries("sharing.read", name=secret.name).word == "ENOENT"
        assert shm_names() == before
    finally:
        runtime.unload("sharing")


def test_without_a_sandbox_it_is_everybody_s(attackers: Attackers, secret: Path) -> None:
    assert attackers("off").finds("sharing.read", name=secret.name) == "secret"


@pytest.fixture(scope="module")
def cramped(runtime: moonpool.Runtime, model_folder: Path) -> Iterator[Attacker]:
    """One that has eight mebibytes of scratch."""
    attacker = load_attacker(runtime, "strict", model_folder, "cramped_sharing", SCRATCH_BYTES=8 * MIB)
    yield attacker
    runtime.unload("cramped_sharing")


@pytest.mark.promise("The sandbox: `strict`", "In `/dev/shm` it …")
@pytest.mark.promise(
    "Layers of the sandbox", "Shared memory and the scratch folder have one limit together, in bytes and in files."
)
def test_shared_memory_and_scratch_have_one_limit(strict: Attacker, cramped: Attacker) -> None:
    del strict  # skips where there is none
    assert cramped.finds("files.fill_and_keep", count_bytes=5 * MIB) is not False
    assert cramped.finds("sharing.fill", count_bytes=2 * MIB) == 2 * MIB
    full = cramped.tries("sharing.fill", count_bytes=16 * MIB)
    assert full.word == "ENOSPC", full
    assert cramped.tries("self.crash", how="exit").word == "died"

    assert cramped.tries("sharing.many_empty", count=100_000).word == "ENOSPC"
    assert cramped.tries("self.crash", how="exit").word == "died"

    # A file may have a size for which there is no room when it is written to through a mapping.
    cramped.finds("sharing.fill", count_bytes=2 * MIB)
    died = str(cramped.tries("sharing.touch", count_bytes=8 * MIB).died)
    assert "killed by SIGBUS" in died
    assert "MOONPOOL_SCRATCH_BYTES" in died
    assert cramped.finds("sharing.names") == []


@pytest.mark.promise("The sandbox: `strict`", "In `/dev/shm` it …")
@pytest.mark.parametrize("what", ["leave_by_dots", "program", "device"])
def test_shared_memory_leads_nowhere(strict: Attacker, what: str) -> None:
    assert strict.tries(f"sharing.{what}").word in ("EACCES", "EPERM", "killed")


@pytest.fixture
def service() -> Iterator[str]:
    """A service of this machine that all users may connect to."""
    with tempfile.TemporaryDirectory(prefix="moonpool-hostile-") as name:
        Path(name).chmod(0o755)
        path = f"{name}/service"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            os.chmod(path, 0o666)
            server.listen()
            yield path


@pytest.mark.promise(
    "Layers of the sandbox",
    "A model that may fork passes descriptors between its processes without sockets of its own. Sockets with names "
    "take the grant `unix`.",
)
def test_a_model_that_may_fork_reaches_no_service(
    runtime: moonpool.Runtime, model_folder: Path, service: str, attackers: Attackers
) -> None:
    forking = load_attacker(runtime, "strict", model_folder, "forking", SANDBOX_SYSCALLS="fork")
    try:
        assert forking.tries("sharing.connect_unix", path=service).word == "EPERM"
        assert forking.tries("sharing.own_service").word == "EPERM"
    finally:
        runtime.unload("forking")
    attackers("off").finds("sharing.connect_unix", path=service)


def test_the_grant_of_unix_sockets_is_for_nothing_else(runtime: moonpool.Runtime, model_folder: Path) -> None:
    granted = load_attacker(runtime, "strict", model_folder, "unix", SANDBOX_SYSCALLS="unix")
    try:
        assert granted.finds("sharing.own_service") == "x"
        for what, arguments in (
            ("sharing.datagram", {}),
            ("network.tcp", {"port": 9}),
            ("network.udp", {"port": 9}),
            ("processes.fork", {}),
        ):
            assert granted.tries(what, **arguments).word == "EPERM"
    finally:
        runtime.unload("unix")


@pytest.mark.promise("The sandbox: `strict`", "What a process that it forked sends to its stub harms nobody else.")
@pytest.mark.promise(
    "Layers of the sandbox", "Whatever a process that a model forked sends to its stub harms that model alone."
)
def test_forks_that_send_nonsense_harm_nobody_else(runtime: moonpool.Runtime, model_folder: Path) -> None:
    forking = load_attacker(runtime, "strict", model_folder, "nonsense", SANDBOX_SYSCALLS="fork")
    try:
        pid = forking.pid
        assert forking.finds("sharing.flood_from_a_fork", denials=3000, garbage=500, seconds=30)
        assert forking.finds("kernel.make", name="getpid") > 0
        assert forking.pid == pid
        assert answers(runtime)
    finally:
        runtime.unload("nonsense")
