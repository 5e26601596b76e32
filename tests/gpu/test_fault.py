"""A device that has failed: a kernel that touches what is not there breaks the context of its process for good."""

from __future__ import annotations

import numpy as np
import pytest
from tests.gpu.cards import Fake
from tests.runtime.devices.conftest import FakeHost, Foreign
from tests.waiting import wait_until

import moonpool

pytestmark = pytest.mark.promise(
    "Device memory",
    "If a device has failed in a stub, that stub ends and is started anew. Memory of the device "
    "that is released afterwards causes no error (fake driver).",
)

VALUES = np.arange(16, dtype=np.float32)


def test_memory_released_after_a_fault_causes_no_error(fake: Fake) -> None:
    words = fake.run(
        """
        import ctypes, sys
        from moonpool.ipc.cuda.array import DeviceArray
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.cuda.lane import DeviceLane
        from moonpool.ipc.cuda.region import DeviceRegion
        from moonpool.ipc.errors import CudaError
        from moonpool.ipc.region import SharedRegion

        sys.unraisablehook = lambda said: print(said.exc_value)
        here = device(0)
        region, lane = DeviceRegion.create(7, 4096, here), DeviceLane(here)
        pinned = SharedRegion.create(8, 4096)
        print(here.pin(pinned))
        array = DeviceArray.over(region.lease(0, 64, print, "given back", lane), 0, 2, (64,))
        capsule = array.__dlpack__(stream=here.new_stream())
        ctypes.CDLL("libcuda.so.1").fakeFault(700)
        for what in (array.to_host, lane.publish):
            try:
                what()
            except CudaError as error:
                print(error.name)
        del array, capsule
        region.close()
        pinned.close()
        lane.close()
        del region, lane, pinned, what
        here.tidy()
        print(len(here.dying))
        """
    )

    illegal = "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert words.splitlines() == ["True", illegal, illegal, "given back", "0"]


def test_a_stub_whose_device_has_failed_is_started_anew(fake_host: FakeHost) -> None:
    fake_host.load()
    x = fake_host.on_device(VALUES)
    fake_host.infer(x, "add")
    process = fake_host.runtime.instances("m")[0]["pid"]

    with pytest.raises(moonpool.MoonpoolError):
        fake_host.infer(x, "fault")

    wait_until(lambda: fake_host.runtime.instances("m")[0]["pid"] not in (None, process), what="another instance")
    wait_until(lambda: fake_host.runtime.is_ready("m"), what="the instance to be ready")
    y, _ = fake_host.infer(Foreign(VALUES), "add")
    assert (y.to_host() == VALUES + 1).all()
    assert (x.to_host() == VALUES).all()
