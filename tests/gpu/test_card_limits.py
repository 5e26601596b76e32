"""A device runs out of something, and many requests leave nothing behind: on the fake driver and on a card.

Nothing else may use the card meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.gpu.cards import run
from tests.runtime.devices.conftest import FakeHost, Foreign, Host, on_host
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.cuda import driver as api
from moonpool.ipc.cuda.device import device

VALUES = np.arange(16, dtype=np.float32)
MIB = 1 << 20


def process_of(host: Host) -> int:
    """The process of the only instance; it waits until there is one."""
    return int(wait_until(lambda: host.runtime.instances("m")[0]["pid"], what="an instance"))


def set_aside(size_bytes: int) -> int:
    """Take memory of the device, without mapping it anywhere. Raises `OutOfMemory`."""
    here = device(0)
    allocation, properties = ctypes.c_ulonglong(), api.device_properties(here.ordinal)
    size_bytes = here.rounded(size_bytes)
    with here:
        here.driver.cuMemCreate(ctypes.byref(allocation), size_bytes, ctypes.byref(properties), 0)
    return allocation.value


@contextmanager
def full(left_bytes: int) -> Iterator[None]:
    """Take the device's memory within the block, all but `left_bytes`."""
    here, taken = device(0), []
    left = set_aside(left_bytes)
    size_bytes = here.memory_info()[0]
    # A card reports more free memory than it gives.
    while size_bytes >= here.granularity_bytes:
        try:
            taken.append(set_aside(size_bytes))
        except moonpool.OutOfMemory:
            size_bytes //= 2
    here.driver.cuMemRelease(left)
    try:
        yield
    finally:
        for each in taken:
            here.driver.cuMemRelease(each)


@pytest.mark.promise(
    "Device memory",
    "A device that is full is an error of the request that needed memory; the instance lives and goes on.",
)
def test_a_device_that_is_full_is_an_error_of_the_request_and_the_instance_lives(host: Host) -> None:
    host.load()
    large = np.zeros(32 * MIB, np.float32)
    y, _ = host.infer(Foreign(VALUES), "add")
    assert (y.to_host() == VALUES + 1).all()
    process = process_of(host)

    with full(left_bytes=64 * MIB):
        with pytest.raises(moonpool.ModelError, match="bytes on device 0"):
            host.infer(large, "add")
        with pytest.raises(moonpool.OutOfMemory, match="bytes on device 0"):
            host.runtime.empty("m", "X", large.shape, device=0)
        y, _ = host.infer(Foreign(VALUES), "add")
        assert (y.to_host() == VALUES + 1).all()

    y, _ = host.infer(large, "add")
    assert (y.to_host() == 1).all()
    assert process_of(host) == process


@pytest.mark.promise("Device memory", "Bytes on a device stay valid if a stub that has them is killed.")
def test_bytes_outlive_a_stub_that_is_killed_while_it_has_them(host: Host) -> None:
    host.load()
    x = host.on_device(VALUES)
    y, _ = host.infer(x, "add")
    kept, _ = host.infer(x, "keep")
    # A wait for work that died with a stub may last for ever, so this waits until the work is done.
    assert (kept.to_host() == VALUES).all()
    del kept
    process = process_of(host)

    os.kill(process, signal.SIGKILL)

    wait_until(lambda: process_of(host) != process, what="another instance")
    wait_until(lambda: host.runtime.is_ready("m"), what="the instance to be ready")
    assert (y.to_host() == VALUES + 1).all()
    assert (x.to_host() == VALUES).all()
    z, _ = host.infer(y, "add")
    assert (z.to_host() == VALUES + 2).all()


@pytest.mark.promise(
    "Device memory", "Many instances share a device, and many requests leave no descriptor and no memory behind."
)
def test_many_instances_share_a_device(host: Host) -> None:
    # Each context takes some hundred MiB of a card.
    host.load(count=12 if device(0).memory_info()[1] >= 16 << 30 else 4)
    sources = [Foreign(VALUES + i) for i in range(120)]
    how = np.array([b"add"], object)

    futures = [host.runtime.submit("m", {"X": x, "HOW": how}) for x in sources]

    for i, future in enumerate(futures):
        assert (on_host(future.result(60).outputs["Y"]) == VALUES + i + 1).all()


def test_a_process_without_descriptors_left_gets_an_error_and_goes_on(environment: dict[str, str] | None) -> None:
    words = run(
        """
        import os, resource
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.region import DeviceRegion
        from moonpool.ipc.errors import MoonpoolError

        def count():
            return len(os.listdir("/proc/self/fd"))

        here = device(0)
        DeviceRegion.create(0, 1, here).close()
        before, (_, most) = count(), resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 24, most))
        regions, error = [], None
        while error is None:
            try:
                regions.append(DeviceRegion.create(len(regions), 1, here))
            except MoonpoolError as caught:
                error = caught
        for region in regions:
            region.close()
        del region
        made = len(regions)
        regions.clear()
        here.tidy()
        again = DeviceRegion.create(0, 1, here)
        print(made > 2, again.read(0, 4), count() - before < 8)
        """,
        environment=environment,
    )

    assert words == r"True b'\x00\x00\x00\x00' True"


@pytest.mark.promise("Device memory", "Many instances share a device, and …")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_round_trips_leave_nothing_behind(host: Host) -> None:
    rounds = 2_000 if isinstance(host, FakeHost) else 5_000
    host.load()
    x = Foreign(VALUES)
    process = process_of(host)

    def round_trip() -> None:
        y, _ = host.infer(x, "copy")
        z, _ = host.infer(y)
        assert isinstance(z, moonpool.DeviceArray)

    def held() -> dict[str, int]:
        """Descriptors, and MiB of memory."""
        gc.collect()
        free, total = device(0).memory_info()
        found = {"memory of the device": (total - free) // MIB}
        for name, pid in (("runtime", os.getpid()), ("stub", process)):
            found[f"descriptors of the {name}"] = len(os.listdir(f"/proc/{pid}/fd"))
            words = Path(f"/proc/{pid}/statm").read_text().split()
            found[f"memory of the {name}"] = int(words[1]) * os.sysconf("SC_PAGE_SIZE") // MIB
        return found

    for _ in range(500):
        round_trip()
    before = held()
    for _ in range(rounds // 2):
        round_trip()
    after = held()

    assert process_of(host) == process
    y, _ = host.infer(x, "copy")
    assert (y.to_host() == VALUES).all()
    grown = {name: after[name] - before[name] for name in before}
    # Other programs need some MiB now and then. A leak of 100 bytes in each round trip would take more.
    assert {name for name, by in grown.items() if by > 8} == set(), grown


def test_numpy_gets_no_tensor_of_the_device_unless_the_model_asks_for_copies(host: Host) -> None:
    host.load()
    host.load("strict", GPU_AS_NUMPY="error")

    y, on_cpu = host.infer(Foreign(VALUES), "host")

    assert not on_cpu
    assert (on_host(y) == VALUES + 1).all()
    with pytest.raises(moonpool.ModelError, match="cannot be converted to NumPy"):
        host.infer(Foreign(VALUES), "host", "strict")


@pytest.mark.promise(
    "Device memory", "Inputs on a device stay there, or come in ordinary memory, as FORCE_CPU_ONLY_INPUT_TENSORS says."
)
@pytest.mark.parametrize("force", ["yes", "no"])
def test_a_model_gets_inputs_where_its_configuration_says(host: Host, force: str) -> None:
    host.load(FORCE_CPU=force)

    for x in (Foreign(VALUES), host.on_device(VALUES)):
        y, on_cpu = host.infer(x)

        assert on_cpu == (force == "yes")
        assert isinstance(y, np.ndarray) == on_cpu
        assert (on_host(y) == VALUES).all()
