"""Regions on a device: what is not adopted, and what happens when there is no more of something."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from tests.gpu.cards import Fake, settle
from tests.gpu.late import nobody

from moonpool.ipc.cuda.array import DeviceArray
from moonpool.ipc.cuda.device import device
from moonpool.ipc.cuda.lane import DeviceLane
from moonpool.ipc.cuda.region import DeviceRegion


@pytest.mark.promise(
    "Device memory",
    "Memory that is not of the announced device and size is not adopted, and leaves no "
    "descriptor behind (fake driver).",
)
def test_a_region_of_another_size_or_device_is_not_adopted(fake: Fake) -> None:
    words = fake.run(
        """
        import os
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.region import DeviceRegion
        from moonpool.ipc.errors import RemoteProtocolError
        made = DeviceRegion.create(7, 4096, device(0))
        before = len(os.listdir("/proc/self/fd"))
        for ordinal, size in ((1, made.size_bytes), (0, 2 * made.size_bytes), (0, 4096), (0, 0)):
            try:
                DeviceRegion.adopt(7, size, device(ordinal), os.dup(made.fd), b"")
            except RemoteProtocolError as error:
                print(str(error).split(":")[0])
        try:
            DeviceRegion.adopt(7, 4096, device(0), os.memfd_create("other"), b"")
        except RemoteProtocolError as error:
            print(str(error).split(":")[0])
        print(len(os.listdir("/proc/self/fd")) - before)
        """,
        FAKE_CUDA_DEVICES=2,
    )

    assert words.splitlines() == [
        "region 7 is not memory of 2097152 bytes on device 1",
        "region 7 is not memory of 4194304 bytes on device 0",
        "region 7 is not memory of 4096 bytes on device 0",
        "region 7 is not memory of 0 bytes on device 0",
        "region 7 is not memory of 4096 bytes on device 0",
        "0",
    ]


@pytest.mark.promise(
    "Device memory",
    "A device that is full, and a process that has no descriptors left, get an error and go on (fake driver).",
)
def test_a_device_that_is_full_says_so_and_goes_on(fake: Fake) -> None:
    words = fake.run(
        """
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.region import DeviceRegion
        from moonpool.ipc.errors import OutOfMemory
        first = DeviceRegion.create(1, 4 << 20, device(0))
        try:
            DeviceRegion.create(2, 6 << 20, device(0))
        except OutOfMemory as error:
            print(error)
        first.close()
        print(DeviceRegion.create(3, 6 << 20, device(0)).size_bytes)
        """,
        FAKE_CUDA_MEMORY_BYTES=8 << 20,
    )

    assert words.splitlines() == [
        "cannot set aside 6291456 bytes on device 0: 4194304 of its 8388608 bytes are free (the device "
        "is out of memory; cuMemCreate: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2))",
        "6291456",
    ]


@pytest.mark.promise("Device memory", "A device that is full, and …")
def test_a_process_without_descriptors_left_makes_no_region_and_keeps_none(fake: Fake) -> None:
    words = fake.run(
        """
        import os, resource
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.region import DeviceRegion
        from moonpool.ipc.errors import MoonpoolError
        device(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        regions = []
        try:
            while True:
                regions.append(DeviceRegion.create(len(regions), 4096, device(0)))
        except MoonpoolError as error:
            print(type(error).__name__)
        for region in regions:
            region.close()
        count = len(regions)
        del region, regions
        device(0).tidy()
        print(count > 5, len(os.listdir("/proc/self/fd")) < 10, device(0).memory_info())
        """
    )

    assert words.splitlines() == ["OutOfMemory", "True True (1073741824, 1073741824)"]


def test_many_threads_order_and_copy_at_the_same_time(fake: Fake) -> None:
    fake.delay(2000, by_chance=True)
    here = device(0)
    region = DeviceRegion.create(7, 1 << 20, here)
    wrong: list[int] = []

    def work(number: int) -> None:
        lane, offset = DeviceLane(here), number * 8192
        for turn in range(20):
            lease = region.lease(offset, 4096, nobody, turn, lane)
            lane.from_host(lease.address, np.full(4096, turn, np.uint8), wait=False)
            lane.publish()
            seen = DeviceArray.over(lease, 0, 2, (4096,)).to_host()
            if not (seen == turn).all():
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    region.close()
    settle(here)


def test_a_thousand_rounds_leave_nothing_behind(fake: Fake) -> None:
    here = device(0)
    lane = DeviceLane(here)
    region = DeviceRegion.create(7, 1 << 20, here)

    def round_trip() -> None:
        lease = region.lease(0, 4096, nobody, "block", lane)
        array = DeviceArray.over(lease, 0, 11, (16,))
        again = DeviceArray.of(array.__dlpack__(stream=1))
        assert again is not None
        again.to_host()
        lane.publish()
        lane.receive()

    round_trip()
    live, fds = fake.live(), len(os.listdir("/proc/self/fd"))
    for _ in range(1000):
        round_trip()

    assert fake.live() == live
    assert len(os.listdir("/proc/self/fd")) == fds
    region.close()
    lane.close()
    settle(here)


def test_blocks_and_lanes_of_two_devices_keep_their_order(fake: Fake) -> None:
    words = fake.run(
        """
        import ctypes
        from moonpool.ipc.cuda.array import DeviceArray
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.lane import DeviceLane
        from moonpool.ipc.cuda.region import DeviceRegion

        def late(work):
            driver = ctypes.CDLL("libcuda.so.1")
            driver.fakeDelay(ctypes.c_long(150_000), 0)
            work()
            driver.fakeDelay(ctypes.c_long(0), 0)

        def fill(array, value, stream):
            with array.device as where:
                where.driver.cuMemsetD8Async(array.address, value, 64, stream)

        def array_of(region, lane):
            return DeviceArray.over(region.lease(0, 64, lambda _: None, None, lane), 0, 2, (64,))

        here, there = device(0), device(1)
        near, far = DeviceLane(here), DeviceLane(there)
        regions = [DeviceRegion.create(number, 4096, each) for number, each in enumerate((here, there))]
        source, target = array_of(regions[0], near), array_of(regions[1], far)
        stream = here.new_stream()
        source.enter(stream)
        late(lambda: fill(source, 7, stream))
        source.enter(far.stream)
        target.enter(far.stream)
        late(lambda: far.copy(target.address, source.address, 64))
        source.leave(far.stream)
        fill(source, 8, stream)
        print(set(target.to_host().tolist()), set(source.to_host().tolist()))

        # The block is used again while the other device still reads it.
        late(lambda: far.copy(target.address, source.address, 64))
        del source
        again = array_of(regions[0], near)
        again.enter(near.stream)
        fill(again, 9, near.stream)
        print(set(target.to_host().tolist()), set(again.to_host().tolist()))
        """,
        FAKE_CUDA_DEVICES=2,
    )

    assert words.splitlines() == ["{7} {8}", "{8} {9}"]
