"""The driver: found or not, its refusals in words, and what the fake one refuses as the real one does."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p
from pathlib import Path

import pytest
from tests.e2e.hosting import MODELS
from tests.gpu.cards import Fake, driven_by, run

from moonpool.ipc.cuda import driver as api
from moonpool.ipc.cuda.device import Device, device, device_count, device_of
from moonpool.ipc.errors import CudaError, CudaUnavailable, OutOfMemory


@pytest.mark.promise("Device memory", "No part of the driver …")
def test_a_machine_without_a_driver_has_no_devices(tmp_path: Path) -> None:
    with driven_by(str(tmp_path / "libcuda.so.1")):
        assert device_count() == 0
        with pytest.raises(CudaUnavailable, match=r"no driver of NVIDIA here .* 525 or later.* KIND_CPU"):
            device(0)


def test_a_driver_that_lacks_a_function_is_too_old() -> None:
    # libc exists and is not a driver.
    with driven_by("libc.so.6"), pytest.raises(CudaUnavailable, match=r"too old: .*cuGetErrorName.* 525 or later"):
        api.load()


def test_a_driver_that_is_too_old_is_told_by_its_version(fake: Fake) -> None:
    words = fake.run(
        """
        import moonpool
        config = {"instance_group": [{"kind": "KIND_GPU"}]}
        with moonpool.Runtime() as runtime:
            try:
                runtime.load("m", sys.argv[1], config=config)
            except moonpool.ConfigError as error:
                print(error)
        """,
        str(MODELS / "on_device.py"),
        FAKE_CUDA_VERSION=11_080,
    )

    assert re.search(r"KIND_GPU but no GPUs are available: .* is of CUDA 11\.8, and .* 525 or later", words)
    assert "\n" not in words


SHARES = """
    from moonpool.ipc.cuda.device import device
    from moonpool.ipc.cuda.region import DeviceRegion
    from moonpool.ipc.errors import CudaUnavailable
    try:
        region = DeviceRegion.create(1, 1, device(0))
    except CudaUnavailable as error:
        print(error)
    else:
        print(region.fd >= 0, len(region.handle), region.device.why_no_descriptors)
    """


def test_memory_is_shared_in_the_way_that_the_driver_allows_whatever_it_says_of_itself(fake: Fake) -> None:
    assert fake.run(SHARES) == "True 0"
    assert fake.run(SHARES, FAKE_CUDA_NO_DESCRIPTORS=1).startswith("False 64 its driver has no")
    refused = "cuMemExportToShareableHandle: operation not supported (CUDA_ERROR_NOT_SUPPORTED, 801)"
    assert fake.run(SHARES, FAKE_CUDA_NO_EXPORT=1) == f"False 64 {refused}"


def test_a_driver_that_shares_no_memory_is_told_by_both_refusals(fake: Fake) -> None:
    words = fake.run(SHARES, FAKE_CUDA_NO_EXPORT=1, FAKE_CUDA_NO_HANDLES=1)

    assert words.startswith("device 0 (Fake GPU 0) shares memory with other processes neither by ")
    assert re.search(r"cuMemExportTo.* nor by handle \(cuIpcGetMemHandle.*needs one of them", words)
    assert "\n" not in words


@pytest.mark.promise("Device memory", "No part of the driver …")
def test_no_visible_device_is_said_with_what_to_look_at(fake: Fake) -> None:
    words = fake.run(
        """
        from moonpool.ipc.cuda.device import device, device_count
        from moonpool.ipc.errors import CudaUnavailable
        print(device_count())
        try:
            device(0)
        except CudaUnavailable as error:
            print(error)
        """,
        CUDA_VISIBLE_DEVICES="",
    )

    assert words.startswith("0\nno GPU can be used: cuInit: no CUDA-capable device is detected")
    assert "CUDA_VISIBLE_DEVICES" in words


@pytest.mark.usefixtures("fake")
def test_a_device_that_is_not_there_is_said_with_how_many_are() -> None:
    with pytest.raises(CudaUnavailable, match=r"device 1 cannot be used: .* sees 1 devices"):
        device(1)


def test_visible_devices_are_numbered_anew(fake: Fake) -> None:
    names = fake.run(
        """
        from moonpool.ipc.cuda.device import device
        print(device(0).name, device(1).name)
        """,
        FAKE_CUDA_DEVICES=4,
        CUDA_VISIBLE_DEVICES="3,1",
    )

    assert names == "Fake GPU 3 Fake GPU 1"


@pytest.mark.promise(
    "Device memory",
    "No part of the driver is loaded and no context is made before device memory is handled. If "
    "it cannot be handled, the error says why and what to do.",
)
def test_nothing_of_the_driver_is_loaded_before_it_is_asked_for() -> None:
    loaded = run(
        """
        import moonpool, moonpool.ipc.memory, moonpool.ipc.region, moonpool.ipc.messages
        print([name for name in sys.modules if "cuda" in name])
        print("libcuda" in open("/proc/self/maps").read())
        """
    )

    assert loaded == "[]\nFalse"


@pytest.mark.promise("Device memory", "No part of the driver …")
def test_to_look_for_devices_makes_no_context(fake: Fake) -> None:
    program = """
        import ctypes
        from moonpool.ipc.cuda.device import device, device_count
        from moonpool.ipc.cuda.driver import load
        flags, is_active = ctypes.c_uint(), ctypes.c_int()
        for step in (device_count, lambda: device(0)):
            step()
            load().cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(is_active))
            print(is_active.value)
        """
    assert fake.run(program) == "0\n1"


def _has_context() -> bool:
    flags, is_active = ctypes.c_uint(), c_int()
    api.load().cuDevicePrimaryCtxGetState(0, byref(flags), byref(is_active))
    return bool(is_active.value)


@pytest.mark.promise("Device memory", "The context is the primary one of the device, which other libraries share.")
def test_a_device_shares_the_primary_context(gpu: Device) -> None:
    context = c_void_p()
    gpu.driver.cuDevicePrimaryCtxRetain(byref(context), gpu.ordinal)

    assert context.value == gpu.context
    assert _has_context()
    assert device(0) is gpu


def test_a_device_tells_what_it_has(gpu: Device) -> None:
    free, total = gpu.memory_info()

    assert gpu.name
    assert 0 < free <= total
    assert gpu.rounded(1) == gpu.granularity_bytes
    assert gpu.rounded(gpu.granularity_bytes + 1) == 2 * gpu.granularity_bytes


def test_a_refusal_names_the_function_the_reason_and_the_number(gpu: Device) -> None:
    with pytest.raises(CudaError) as caught:
        gpu.driver.cuDeviceGet(byref(c_int()), 4096)

    assert str(caught.value) == ("cuDeviceGet: invalid device ordinal (CUDA_ERROR_INVALID_DEVICE, 101)")
    assert (caught.value.name, caught.value.number) == ("CUDA_ERROR_INVALID_DEVICE", 101)


def test_out_of_memory_is_an_error_of_its_own(gpu: Device) -> None:
    with pytest.raises(OutOfMemory, match="out of memory"), gpu:
        gpu.driver.cuMemAlloc_v2(byref(c_ulonglong()), 1 << 50)


def test_a_fork_of_a_process_that_used_the_driver_is_refused(fake: Fake) -> None:
    program = """
        import os
        from moonpool.ipc.cuda.driver import load
        from moonpool.ipc.errors import CudaUnavailable
        load()
        if os.fork() == 0:
            try:
                load()
            except CudaUnavailable as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
        """
    assert "cannot be used in a fork" in fake.run(program)


@pytest.mark.usefixtures("gpu")
def test_ordinary_memory_lies_on_no_device() -> None:
    assert device_of(ctypes.addressof(ctypes.create_string_buffer(64))) is None


# The fake must refuse the same calls as a card, so each is tried on both.


def _refused(error: int) -> pytest.RaisesExc[CudaError]:
    return pytest.raises(CudaError, match=rf", {error}\)$")


INVALID_VALUE, INVALID_CONTEXT = 1, 201


def test_work_needs_a_context(gpu: Device) -> None:
    def work() -> None:
        with _refused(INVALID_CONTEXT):
            gpu.driver.cuMemGetInfo_v2(byref(c_size_t()), byref(c_size_t()))
        worked.append(True)

    worked: list[bool] = []
    # Libraries leave a context behind in the thread that uses them.
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert worked


def test_memory_by_descriptor_comes_in_whole_pages(gpu: Device) -> None:
    properties = api.device_properties(0)
    with gpu, _refused(INVALID_VALUE):
        gpu.driver.cuMemCreate(byref(c_ulonglong()), 4096, byref(properties), 0)


def test_a_descriptor_that_is_no_device_memory_is_not_imported(gpu: Device) -> None:
    fd = os.memfd_create("no-device-memory")
    try:
        with gpu, pytest.raises((CudaError, OutOfMemory)):
            gpu.driver.cuMemImportFromShareableHandle(byref(c_ulonglong()), c_void_p(fd), 1)
    finally:
        os.close(fd)


def test_an_event_of_another_context_s_kind_is_not_shared(gpu: Device) -> None:
    event = c_void_p()
    with gpu:
        gpu.driver.cuEventCreate(byref(event), api.DISABLE_TIMING)
        with pytest.raises(CudaError):
            gpu.driver.cuIpcGetEventHandle(byref(api.IpcHandle()), event)
        gpu.driver.cuEventDestroy_v2(event)


def test_an_event_with_times_is_not_made_for_other_processes(gpu: Device) -> None:
    with gpu, _refused(INVALID_VALUE):
        gpu.driver.cuEventCreate(byref(c_void_p()), api.INTERPROCESS)


def test_a_process_does_not_open_its_own_handle(gpu: Device) -> None:
    handle, address = api.IpcHandle(), c_ulonglong()
    with gpu:
        gpu.driver.cuMemAlloc_v2(byref(address), 4096)
        gpu.driver.cuIpcGetMemHandle(byref(handle), address)
        with pytest.raises(CudaError):
            gpu.driver.cuIpcOpenMemHandle_v2(byref(c_ulonglong()), handle, 1)
        gpu.driver.cuMemFree_v2(address)


def test_memory_is_pinned_once(gpu: Device) -> None:
    memory = (ctypes.c_char * 8192)()
    address = (ctypes.addressof(memory) + 4095) & -4096
    with gpu:
        gpu.driver.cuMemHostRegister_v2(address, 4096, api.PORTABLE)
        with _refused(712):
            gpu.driver.cuMemHostRegister_v2(address, 4096, api.PORTABLE)
        gpu.driver.cuMemHostUnregister(address)
        with _refused(713):
            gpu.driver.cuMemHostUnregister(address)


@pytest.mark.usefixtures("fake")
def test_the_fake_driver_leaves_no_name_in_dev_shm() -> None:
    names = set(os.listdir("/dev/shm"))
    device(0).memory_info()

    assert not [name for name in set(os.listdir("/dev/shm")) - names if "fake" in name]


def test_the_numbers_are_those_of_nvidia_s_header() -> None:
    header = pytest.importorskip("cuda.bindings.driver")
    attributes, results = header.CUdevice_attribute, header.CUresult

    assert api.HAS_VIRTUAL_MEMORY == attributes.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert api.HAS_DESCRIPTORS == attributes.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    assert api.POINTER_KIND == header.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    assert api.POINTER_DEVICE == header.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    assert api.DEVICE_MEMORY == header.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert results.CUDA_ERROR_OUT_OF_MEMORY == api.OUT_OF_MEMORY
    assert results.CUDA_ERROR_NOT_READY == api.NOT_READY
    assert (api.BLOCKING_SYNC, api.DISABLE_TIMING, api.INTERPROCESS) == (
        header.CUevent_flags.CU_EVENT_BLOCKING_SYNC,
        header.CUevent_flags.CU_EVENT_DISABLE_TIMING,
        header.CUevent_flags.CU_EVENT_INTERPROCESS,
    )
    assert api.NON_BLOCKING == header.CUstream_flags.CU_STREAM_NON_BLOCKING
    assert header.CU_STREAM_LEGACY == api.LEGACY_STREAM
