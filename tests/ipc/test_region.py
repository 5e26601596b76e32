"""Shared memory: seals, exhaustion, and what is not adopted."""

from __future__ import annotations

import fcntl
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moonpool.ipc import region as module
from moonpool.ipc.errors import OutOfMemory, RemoteProtocolError
from moonpool.ipc.region import SharedRegion

SIZE_BYTES = 8192
SHRINK, GROW, SEAL = fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL


@pytest.fixture
def region() -> Iterator[SharedRegion]:
    made = SharedRegion.create(7, SIZE_BYTES)
    yield made
    made.close()


def _memfd(size_bytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _child(program: str, *arguments: str, fds: tuple[int, ...] = ()) -> str:
    """Run a program with moonpool on its path in a process of its own, and return its output."""
    lines = f"import sys\nsys.path[:] = {sys.path!r}\n{textwrap.dedent(program)}"
    ended = subprocess.run(
        [sys.executable, "-I", "-c", lines, *arguments],
        pass_fds=fds, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.mark.promise("Containment", "A stub cannot resize, seal or take away shared memory.")
@pytest.mark.parametrize("size_bytes", [0, SIZE_BYTES - 4096, SIZE_BYTES + 4096])
def test_nobody_can_resize_a_region(region: SharedRegion, size_bytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(region.fd, size_bytes)

    assert os.fstat(region.fd).st_size == SIZE_BYTES


def test_nobody_can_grow_a_region_by_writing_behind_its_end(region: SharedRegion) -> None:
    with pytest.raises(PermissionError):
        os.pwrite(region.fd, b"x", SIZE_BYTES)


@pytest.mark.promise("Containment", "A stub cannot resize, seal or …")
@pytest.mark.parametrize("seal", [fcntl.F_SEAL_WRITE, SHRINK, SEAL])
def test_nobody_can_seal_a_region_further(region: SharedRegion, seal: int) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, seal)

    assert fcntl.fcntl(region.fd, fcntl.F_GET_SEALS) == SHRINK | GROW | SEAL


def test_a_region_cannot_be_resized_through_a_descriptor_opened_anew(region: SharedRegion) -> None:
    again = os.open(f"/proc/self/fd/{region.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(again, 0)
    finally:
        os.close(again)


def test_all_of_a_region_is_allocated_when_it_is_made(region: SharedRegion) -> None:
    assert os.fstat(region.fd).st_blocks * 512 >= SIZE_BYTES


@pytest.mark.promise(
    "Containment", "Shared memory has no name in `/dev/shm`, and is gone when its processes have ended."
)
def test_a_region_has_no_name_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    region = SharedRegion.create(7, SIZE_BYTES)
    during = set(os.listdir("/dev/shm"))
    target = os.readlink(f"/proc/self/fd/{region.fd}")
    region.close()

    # Other programs on this machine may come and go meanwhile.
    assert not [name for name in during - before if "moonpool" in name]
    assert target == "/memfd:moonpool-7 (deleted)"


def test_a_region_is_not_inherited_by_programs_that_are_started(region: SharedRegion) -> None:
    assert not os.get_inheritable(region.fd)


def test_another_process_sees_the_bytes_and_writes_into_them(region: SharedRegion) -> None:
    region.memory()[:4] = b"down"

    seen = _child(
        """
        from moonpool.ipc.region import SharedRegion
        region = SharedRegion.adopt(7, int(sys.argv[2]), int(sys.argv[1]))
        lease = region.lease(0, 4, print, "given back")
        print(lease.tobytes().decode())
        region.close()
        lease[:] = list(b"back")
        del lease
        """,
        str(region.fd),
        str(SIZE_BYTES),
        fds=(region.fd,),
    )

    assert seen.split("\n") == ["down", "given back"]
    assert bytes(region.memory()[:4]) == b"back"


@pytest.mark.promise("Containment", "Shared memory has no name in …")
def test_a_region_outlives_the_process_that_made_it_and_no_longer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _child(
            """
            import socket, array
            from moonpool.ipc.region import SharedRegion
            region = SharedRegion.create(3, 4096)
            region.memory()[:2] = b"hi"
            end = socket.socket(fileno=int(sys.argv[1]))
            fds = array.array("i", [region.fd])
            end.sendmsg([b"r"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
            """,
            str(theirs.fileno()),
            fds=(theirs.fileno(),),
        )
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    region = SharedRegion.adopt(3, 4096, fd)

    assert bytes(region.memory()[:2]) == b"hi"
    region.close()
    assert not _is_open(fd)


def test_running_into_a_limit_is_a_clean_error_that_leaves_nothing_open() -> None:
    said = _child(
        """
        import os, resource
        from moonpool.ipc.errors import OutOfMemory
        from moonpool.ipc.region import SharedRegion
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        before = os.listdir("/proc/self/fd")
        try:
            SharedRegion.create(1, 2 << 20)
        except OutOfMemory as error:
            print(error.code, error)
        assert os.listdir("/proc/self/fd") == before
        SharedRegion.create(1, 1 << 20).close()
        """
    )

    assert said.startswith("UNAVAILABLE cannot set aside 2097152 bytes of shared memory: ")
    assert "File too large" in said


# Without the check, the kernel would allocate until it kills a process. The limit of the test protects the machine if
# the check fails.
@pytest.mark.promise("Containment", "Running out of memory is an error when memory is asked for, not a signal later.")
@pytest.mark.parametrize("size_bytes", [2**50, 2**62, 2**63, 2**80])
def test_more_than_the_machine_has_is_refused_before_it_is_taken(size_bytes: int) -> None:
    said = _child(
        """
        import resource
        from moonpool.ipc.errors import OutOfMemory
        from moonpool.ipc.region import SharedRegion
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            SharedRegion.create(1, int(sys.argv[1]))
        except OutOfMemory as error:
            print(error)
        """,
        str(size_bytes),
    )

    assert said.startswith(f"cannot set aside {size_bytes} bytes of shared memory: ")
    assert said.endswith(" bytes are left")


@pytest.mark.parametrize("size_bytes", [0, -1, 2**63, 2**80])
def test_where_the_system_tells_nothing_an_impossible_size_is_a_clean_error(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    monkeypatch.setattr(module, "headroom_bytes", lambda: None)
    before = _descriptors()

    with pytest.raises(OutOfMemory, match=f"cannot set aside {size_bytes} bytes"):
        SharedRegion.create(1, size_bytes)
    assert _descriptors() == before


def test_running_out_of_descriptors_is_a_clean_error() -> None:
    said = _child(
        """
        import resource
        from moonpool.ipc.errors import OutOfMemory
        from moonpool.ipc.region import SharedRegion
        regions = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
        try:
            while True:
                regions.append(SharedRegion.create(1, 4096))
        except OutOfMemory as error:
            print(error)
        """
    )

    assert "Too many open files" in said


@pytest.mark.parametrize(
    "seals",
    [0, SEAL, SHRINK | SEAL, GROW | SEAL, SHRINK | GROW],
    ids=["none", "seal", "no grow", "no shrink", "no seal"],
)
def test_memory_that_is_not_sealed_is_not_adopted(seals: int) -> None:
    fd = _memfd(SIZE_BYTES, seals)

    with pytest.raises(RemoteProtocolError, match=f"8192 bytes and seals {seals:#x};"):
        SharedRegion.adopt(7, SIZE_BYTES, fd)
    assert not _is_open(fd)


@pytest.mark.parametrize("size_bytes", [0, 4096, SIZE_BYTES - 1, SIZE_BYTES + 1, 2**62, 2**64, -1])
def test_memory_of_another_size_is_not_adopted(size_bytes: int) -> None:
    fd = _memfd(SIZE_BYTES, SHRINK | GROW | SEAL)

    with pytest.raises(RemoteProtocolError, match="region 7 has 8192 bytes"):
        SharedRegion.adopt(7, size_bytes, fd)
    assert not _is_open(fd)


@pytest.mark.parametrize("what", ["file", "file in /dev/shm", "pipe", "socket", "directory"])
def test_a_descriptor_that_is_no_memfd_is_not_adopted(what: str, tmp_path: Path) -> None:
    fd = _no_memfd(what, tmp_path)

    with pytest.raises(RemoteProtocolError, match=r"region 7 (is not a memfd|has 8192 bytes)"):
        SharedRegion.adopt(7, SIZE_BYTES, fd)
    assert not _is_open(fd)


def _no_memfd(what: str, folder: Path) -> int:
    if what == "pipe":
        fd, other = os.pipe()
        os.close(other)
        return fd
    if what == "socket":
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours.detach()
    if what == "directory":
        return os.open(folder, os.O_RDONLY)
    place = None if what == "file" else "/dev/shm"
    with tempfile.TemporaryFile(dir=place) as file:
        file.truncate(SIZE_BYTES)
        return os.dup(file.fileno())


def test_memory_that_cannot_be_mapped_is_not_adopted() -> None:
    fd = _memfd(SIZE_BYTES, SHRINK | GROW | SEAL | fcntl.F_SEAL_WRITE)

    with pytest.raises(OutOfMemory, match="cannot map 8192 bytes"):
        SharedRegion.adopt(7, SIZE_BYTES, fd)
    assert not _is_open(fd)


def test_a_forgotten_descriptor_is_closed_and_the_memory_stays(region: SharedRegion) -> None:
    fd = region.fd

    region.forget_fd()
    region.forget_fd()

    assert not _is_open(fd)
    assert region.fd == -1
    region.memory()[0] = 1


def test_a_closed_region_leaves_no_descriptor_and_no_map() -> None:
    before = _descriptors()
    region = SharedRegion.create(7, SIZE_BYTES)
    region.close()

    assert _descriptors() == before
    assert "moonpool-7" not in Path("/proc/self/maps").read_text()


def test_the_map_goes_with_the_last_lease() -> None:
    region = SharedRegion.create(77, SIZE_BYTES)
    tensor = np.ndarray((4,), np.float32, region.lease(0, 64, str, ""))
    region.close()
    assert "moonpool-77" in Path("/proc/self/maps").read_text()
    del tensor

    assert "moonpool-77" not in Path("/proc/self/maps").read_text()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedRegion]:
    """A region into which all arrays are copied in C++."""
    pytest.importorskip("moonpool.ipc._copy", reason="moonpool was built without extensions")
    if module._copy is None:
        pytest.skip("MOONPOOL_PURE leaves the extensions out")
    monkeypatch.setattr(module, "_SMALL", 0)
    region = SharedRegion.create(1, 5 << 20)
    yield region
    region.close()


@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize("start", [0, 17])
@pytest.mark.parametrize("size_bytes", [1, 64, 1087, 16447, 99_999, *((1 << 20) + more for more in (-1, 0, 1, 63, 64))])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_copy_in_cpp_copies_just_these_bytes(
    copied: SharedRegion, size_bytes: int, start: int, offset: int, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_large:
        past_caches = importlib.import_module("moonpool.ipc._copy").copy_past_caches
        monkeypatch.setattr(module, "_copy", past_caches)
    source = np.arange(start + size_bytes, dtype=np.uint64).view(np.uint8)[: start + size_bytes] | 1
    copied.write(offset, source[start:])
    whole = np.frombuffer(copied.memory(), np.uint8)
    end = offset + size_bytes
    assert np.array_equal(whole[offset:end], source[start:])
    assert not whole[:offset].any()
    assert not whole[end:].any()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(10_000, dtype=np.float32).reshape(100, 100).T,
        np.arange(10_000, dtype=np.float32)[::-1],
        np.arange(10_000, dtype=np.float32)[::2],
        np.broadcast_to(np.float32(3), (100, 100)),
        np.arange(10_000).astype("datetime64[s]"),
    ],
    ids=["transposed", "backwards", "with gaps", "broadcast", "of a type without buffers"],
)
def test_an_array_that_is_no_plain_buffer_is_copied_by_numpy(copied: SharedRegion, array: np.ndarray) -> None:
    copied.write(64, array)
    assert bytes(copied.memory())[64 : 64 + array.nbytes] == array.tobytes()


def test_a_copy_in_cpp_stays_inside_of_its_target(copied: SharedRegion) -> None:
    copy, buffer = module._copy, copied.buffer
    assert copy is not None
    for offset in (-1, (5 << 20) - 99, 1 << 62):
        with pytest.raises(ValueError, match="do not fit into 5242880"):
            copy(buffer, offset, np.ones(100, np.uint8))  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        copy(b"read only", 0, np.ones(1, np.uint8))  # type: ignore[arg-type]
    assert not any(bytes(copied.memory()))


def test_pure_leaves_the_copy_to_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_PURE", "1")
    assert module._quick_copy() is None
