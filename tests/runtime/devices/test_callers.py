"""Arrays on a device between callers and models, on the fake driver."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from tests.inside import hosted_in
from tests.runtime.devices.conftest import FakeHost, Foreign, Host
from tests.waiting import wait_until

import moonpool
from moonpool.ipc.cuda.array import DeviceArray
from moonpool.runtime.schedule.callers import wait_for_response
from moonpool.runtime.server.inference.request import make_request

VALUES = np.arange(16, dtype=np.float32)
# Copies between memories of any kind.
COPIES = ("cuMemcpyAsync", "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2")


def copies(host: FakeHost) -> int:
    return sum(host.fake.calls(name) for name in COPIES)


@pytest.mark.promise(
    "GPUs in the runtime",
    "Memory of the runtime's own on a device, as it is or as a library has it, is lent to "
    "models and comes back without a copy.",
)
def test_memory_of_the_runtimes_own_is_lent_and_comes_back_as_it_is(fake_host: FakeHost) -> None:
    fake_host.load()
    x = fake_host.on_device(VALUES)
    before = copies(fake_host)

    y, on_cpu = fake_host.infer(x)

    assert copies(fake_host) == before
    assert not on_cpu
    assert isinstance(y, moonpool.DeviceArray)
    assert y.address == x.address
    assert (y.to_host() == VALUES).all()


@pytest.mark.promise("GPUs in the runtime", "Outputs arrive in the memory …")
def test_an_output_on_the_device_is_an_array_that_others_can_take(host: Host) -> None:
    host.load()

    y, _ = host.infer(host.on_device(VALUES), "add")

    assert isinstance(y, DeviceArray)
    assert y.__dlpack_device__() == (2, 0)
    interface = y.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"]) == ((16,), "<f4")
    assert (y.to_host() == VALUES + 1).all()


@pytest.mark.promise(
    "GPUs in the runtime",
    "Arrays of other libraries are copied once on the device; for a model that takes none "
    "there, once, into memory that it reads.",
)
def test_arrays_of_other_libraries_are_copied_once_on_the_device(fake_host: FakeHost) -> None:
    fake_host.load()
    x = Foreign(VALUES)
    before = {name: fake_host.fake.calls(name) for name in COPIES}

    y, on_cpu = fake_host.infer(x)

    after = {name: fake_host.fake.calls(name) for name in COPIES}
    assert after == {**before, "cuMemcpyAsync": before["cuMemcpyAsync"] + 1}
    assert not on_cpu
    assert (y.to_host() == VALUES).all()


@pytest.mark.promise("GPUs in the runtime", "Memory of the runtime's own on …")
def test_a_library_s_array_over_the_runtime_s_memory_is_lent_as_well(fake_host: FakeHost) -> None:
    fake_host.load()

    class View:
        """The second half of an array, as a library has it."""

        def __init__(self, array: DeviceArray) -> None:
            whole = array.__cuda_array_interface__
            self.owner, self.address = array, whole["data"][0] + 32
            changes = {"shape": (8,), "data": (self.address, False)}
            self.__cuda_array_interface__ = {**whole, **changes}

    x = View(fake_host.on_device(VALUES))
    before = copies(fake_host)

    y, _ = fake_host.infer(x)

    assert copies(fake_host) == before
    assert y.address == x.address
    assert (y.to_host() == VALUES[8:]).all()
    del x, y
    gc.collect()
    assert fake_host.memory_used() == 0


@pytest.mark.promise("GPUs in the runtime", "Arrays of other libraries are copied …")
def test_without_a_word_models_get_inputs_in_ordinary_memory_copied_once(fake_host: FakeHost) -> None:
    fake_host.load(FORCE_CPU="yes")
    x = fake_host.on_device(VALUES)
    before = copies(fake_host)

    y, on_cpu = fake_host.infer(x)

    assert copies(fake_host) == before + 1
    assert on_cpu
    assert isinstance(y, np.ndarray)
    assert (y == VALUES).all()


@pytest.mark.promise(
    "GPUs in the runtime",
    "Outputs arrive in the memory that `outputs_in` names. Without it they arrive in ordinary "
    "memory in a server, and elsewhere in the memory in which the model left them.",
)
@pytest.mark.parametrize("how", ["pass", "add"])
def test_outputs_are_asked_for_in_ordinary_memory(host: Host, how: str) -> None:
    host.load()

    y, _ = host.infer(host.on_device(VALUES), how, outputs_in="cpu")

    assert isinstance(y, np.ndarray)
    assert (y == VALUES + (how == "add")).all()


@pytest.mark.promise("GPUs in the runtime", "Outputs arrive in the memory …")
def test_outputs_are_asked_for_on_the_device(host: Host) -> None:
    host.load()

    y, on_cpu = host.infer(VALUES, outputs_in="gpu")

    assert on_cpu
    assert isinstance(y, DeviceArray)
    assert (y.to_host() == VALUES).all()


@pytest.mark.parametrize("wish", ["", "cuda", "gpu:", "gpu:99999", "GPU", "gpu:-1"])
def test_other_wishes_are_refused(host: Host, wish: str) -> None:
    host.load()

    with pytest.raises(moonpool.InvalidRequest, match="outputs_in must be"):
        host.infer(VALUES, outputs_in=wish)


@pytest.mark.promise("GPUs in the runtime", "Outputs arrive in the memory …")
@pytest.mark.parametrize("kind", ["GPU", "CPU"])
def test_outputs_for_servers_come_in_ordinary_memory(host: Host, kind: str) -> None:
    """HTTP and gRPC send such outputs on as bytes."""
    host.load(kind=kind)
    hosted = hosted_in(host.runtime, "m", None)
    inputs: dict[str, Any] = {"X": host.on_device(VALUES), "HOW": np.array([b"add"], object)}
    request = make_request(hosted, inputs)

    y: Any = wait_for_response(hosted.scheduler, request, 30).outputs["Y"]

    assert isinstance(y.raw, np.ndarray)
    assert (y.raw.view(np.float32) == VALUES + 1).all()


@pytest.mark.promise("GPUs in the runtime", "The driver is not loaded if …")
def test_the_runtime_has_no_context_before_device_memory_is_handled(fake_host: FakeHost) -> None:
    before = fake_host.fake.calls("cuDevicePrimaryCtxRetain")
    fake_host.load()

    y, on_cpu = fake_host.infer(VALUES)

    assert on_cpu
    assert isinstance(y, np.ndarray)
    assert fake_host.fake.calls("cuDevicePrimaryCtxRetain") == before


@pytest.mark.promise("GPUs in the runtime", "Each reader of a tensor waits until the device has written it.")
def test_late_work_of_the_device_is_waited_for(fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "20000")
    monkeypatch.setenv("FAKE_CUDA_BY_CHANCE", "1")
    fake_host.load()
    fake_host.fake.delay(20_000, by_chance=True)

    for i in range(12):
        x = Foreign(VALUES + i)
        y, _ = fake_host.infer(x, "copy")
        z, _ = fake_host.infer(y, "copy")
        x.overwrite()

        assert (z.to_host() == VALUES + i).all()
        assert (y.to_host() == VALUES + i).all()


@pytest.mark.promise("GPUs in the runtime", "Requests in memories of all kinds are batched together.")
def test_requests_with_arrays_of_all_kinds_are_one_batch(host: Host) -> None:
    host.load(batch=4)
    row = VALUES.reshape(1, -1)
    futures = [
        host.runtime.submit("m", {"X": x, "HOW": np.array([[b"pass"]], object)})
        for x in (row, host.on_device(row + 1), Foreign(row + 2), Foreign(row + 3))
    ]

    outputs: list[Any] = [future.result(60).outputs["Y"] for future in futures]

    assert host.runtime.statistics("m")["execution_count"] == 1
    assert (outputs[0] == VALUES).all()
    for i, output in enumerate(outputs[1:], 1):
        assert (output.to_host() == VALUES + i).all()


@pytest.mark.promise(
    "GPUs in the runtime",
    "An output on a device outlives the process that made it; an input that a model keeps stays what it is.",
)
def test_an_answer_outlives_the_stub_that_made_it(host: Host) -> None:
    host.load()
    y, _ = host.infer(host.on_device(VALUES), "add")

    with pytest.raises(moonpool.StubDied):
        host.infer(host.on_device(VALUES), "die")

    assert (y.to_host() == VALUES + 1).all()
    wait_until(lambda: host.runtime.is_ready("m"), what="the instance to be back")
    assert (host.infer(host.on_device(VALUES), "add")[0].to_host() == VALUES + 1).all()


@pytest.mark.promise("GPUs in the runtime", "An output on a device outlives …")
def test_an_input_that_a_model_keeps_stays_what_it_is(host: Host) -> None:
    host.load()
    first, second = host.on_device(VALUES), host.on_device(VALUES + 1)

    host.infer(first, "keep")
    del first
    gc.collect()
    third = host.on_device(VALUES + 2)
    kept, _ = host.infer(second, "keep")

    assert (kept.to_host() == VALUES).all()
    assert (third.to_host() == VALUES + 2).all()


@pytest.mark.promise(
    "GPUs in the runtime",
    "Memory of a device has limits like ordinary memory, and if it runs out, one request gets an error.",
)
def test_more_than_a_model_may_have_is_an_error_and_the_model_lives(host: Host) -> None:
    host.load(REGION_LIMIT_BYTES="2M")
    large = np.zeros(1 << 20, np.float32)

    with pytest.raises(moonpool.OutOfMemory, match="REGION_LIMIT_BYTES"):
        host.infer(Foreign(large))
    with pytest.raises(moonpool.OutOfMemory, match="REGION_LIMIT_BYTES"):
        host.runtime.empty("m", "X", large.shape, device=0)

    assert (host.infer(Foreign(VALUES))[0].to_host() == VALUES).all()


def test_a_device_that_is_not_there_is_an_error(host: Host) -> None:
    host.load()

    with pytest.raises(moonpool.MoonpoolError, match="device 7 cannot be used"):
        host.runtime.empty("m", "X", 4, device=7)


def test_an_input_of_another_datatype_is_refused_where_it_lies(host: Host) -> None:
    host.load()

    class Whole(Foreign):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {**super().__cuda_array_interface__, "typestr": "<i4"}

    class Gaps(Foreign):
        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            return {**super().__cuda_array_interface__, "shape": (8,), "strides": (8,)}

    with pytest.raises(moonpool.InvalidRequest, match="data-type is 'INT32', but model 'm' expects"):
        host.infer(Whole(VALUES))
    with pytest.raises(moonpool.InvalidRequest, match=r"input 'X' for model 'm'.* contiguous"):
        host.infer(Gaps(VALUES))


@pytest.mark.promise("GPUs in the runtime", "Many requests leave nothing on the device.")
def test_many_requests_leave_nothing_on_the_device(fake_host: FakeHost) -> None:
    fake_host.load()
    x = Foreign(VALUES)
    for _ in range(20):
        fake_host.infer(fake_host.infer(x, "add")[0])
    before = fake_host.fake.live()

    for _ in range(200):
        fake_host.infer(fake_host.infer(x, "add")[0])

    assert fake_host.fake.live() == before
