"""Regions that clients register: real POSIX objects, honest and otherwise."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.server.shared_memory import SharedMemoryError, SystemSharedMemory


@pytest.fixture
def key() -> Iterator[str]:
    """An object of 1000 bytes: 0, 1, 2, ..."""
    name = f"/moonpool-test-{os.getpid()}"
    memory = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, size=1000)
    os.pwrite(memory.fd, bytes(i % 256 for i in range(1000)), 0)
    memory.close_fd()
    yield name
    posix_ipc.unlink_shared_memory(name)


@pytest.fixture
def shared() -> Iterator[SystemSharedMemory]:
    made = SystemSharedMemory()
    yield made
    made.unregister()


def path(key: str) -> Path:
    return Path("/dev/shm") / key.removeprefix("/")


def test_bytes_are_read_and_written_where_the_region_is(shared: SystemSharedMemory, key: str) -> None:
    shared.register("a", key, 10, 100)
    into = np.empty((2, 4), np.uint8)

    shared.read("a", 5, into)
    shared.write("a", 20, [memoryview(b"abc"), memoryview(b""), memoryview(b"de")])

    assert into.tolist() == [[15, 16, 17, 18], [19, 20, 21, 22]]
    assert path(key).read_bytes()[30:36] == b"abcde\x23"


@pytest.mark.promise(
    "Tensors and requests of clients",
    "The server reads and writes a client's shared memory within the region only, never "
    "maps it, and is not harmed if the client truncates it.",
)
@pytest.mark.parametrize(("offset", "size"), [(93, 8), (-1, 8), (0, 101), (101, 0)])
def test_nothing_is_read_beside_the_region(shared: SystemSharedMemory, key: str, offset: int, size: int) -> None:
    shared.register("a", key, 10, 100)

    with pytest.raises(MoonpoolError, match=r"Invalid offset( \+ byte size)? for shared memory region: 'a'"):
        shared.read("a", offset, np.empty(size, np.uint8))
    with pytest.raises(MoonpoolError):
        shared.write("a", offset, [memoryview(bytes(size))])


@pytest.mark.promise("Tensors and requests of clients", "The server reads and writes a …")
def test_an_object_that_was_cut_short_is_an_error_and_no_signal(shared: SystemSharedMemory, key: str) -> None:
    shared.register("a", key, 0, 1000)
    os.truncate(path(key), 500)

    with pytest.raises(MoonpoolError, match="shorter now"):
        shared.read("a", 400, np.empty(200, np.uint8))
    with pytest.raises(MoonpoolError, match="shorter now"):
        shared.write("a", 400, [memoryview(bytes(200))])
    assert path(key).stat().st_size == 500


def test_regions_leave_no_descriptor(shared: SystemSharedMemory, key: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        shared.register("a", key, 0, 10)
        with pytest.raises(SharedMemoryError):
            shared.register("b", key, 0, 10_000)
        shared.unregister()

    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.promise(
    "Tensors and requests of clients", "Objects of other users, links and names that lead elsewhere are refused."
)
def test_links_are_not_followed(shared: SystemSharedMemory, key: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(100))
    link = path(key + "-link")
    link.symlink_to(secret)
    try:
        with pytest.raises(SharedMemoryError, match="Unable to open shared memory region"):
            shared.register("a", link.name, 0, 10)
    finally:
        link.unlink()


@pytest.mark.promise("Tensors and requests of clients", "Objects of other users, links and …")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give an object away")
def test_an_object_of_somebody_else_is_taken_only_where_that_was_allowed(shared: SystemSharedMemory, key: str) -> None:
    os.chown(path(key), 12345, -1)

    with pytest.raises(SharedMemoryError, match="belongs to user 12345"):
        shared.register("a", key, 0, 10)
    SystemSharedMemory([12345]).register("a", key, 0, 10)


@pytest.mark.parametrize(("offset", "size"), [(-1, 10), (0, -1), (0, 1001), (1000, 1), (2**63, 2**63)])
def test_a_region_lies_within_its_object(shared: SystemSharedMemory, key: str, offset: int, size: int) -> None:
    with pytest.raises(SharedMemoryError):
        shared.register("a", key, offset, size)


@pytest.mark.promise(
    "What the server bears, and whom it answers like",
    "Regions of clients take at most an eighth of the server's descriptors, and their names at most 4096 bytes each.",
)
def test_regions_leave_descriptors_for_others(
    shared: SystemSharedMemory, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (80, 80))
    for number in range(10):
        shared.register(f"r{number}", key, 0, 1)
    with pytest.raises(SharedMemoryError, match="10 regions are registered: unregister some, or"):
        shared.register("one more", key, 0, 1)
    shared.unregister("r0")
    shared.register("one more", key, 0, 1)
    with pytest.raises(SharedMemoryError, match="at most 4096 bytes"):
        shared.register("n" * 5000, key, 0, 1)
