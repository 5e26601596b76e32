"""Arrays on a device between models, on the fake driver."""

from __future__ import annotations

import numpy as np
import pytest
from tests.runtime.devices.conftest import FakeHost, Foreign, Host, on_host
from tests.waiting import wait_until

from moonpool.ipc.cuda.array import DeviceArray

pytestmark = pytest.mark.promise(
    "GPUs in the runtime",
    "Tensors stay on the device from model to model; whatever the memories of two models, the "
    "values are the same, and they come in the memory that is preferred.",
)

VALUES = np.arange(1, 17, dtype=np.float32)


def seen(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the memory kinds in which the called models put their answers."""
    said = [record.message for record in caplog.records if "answered" in record.message]
    return [text.split("] ")[-1].partition(" (")[0] for text in said]


def test_a_tensor_stays_on_the_device_from_model_to_model(fake_host: FakeHost) -> None:
    fake_host.load("asks")
    fake_host.load("b")
    x = fake_host.on_device(VALUES, "asks")
    copies = fake_host.fake.calls("cuMemcpyAsync")

    y, _ = fake_host.infer(x, "ask b pass any", "asks")

    assert fake_host.fake.calls("cuMemcpyAsync") == copies
    assert isinstance(y, DeviceArray)
    assert (y.to_host() == VALUES).all()


@pytest.mark.parametrize("force", ["yes", "no"])
@pytest.mark.parametrize("kind", ["GPU", "CPU"])
def test_values_are_the_same_for_all_memories_of_two_models(host: Host, kind: str, force: str) -> None:
    host.load("asks")
    host.load("b", kind=kind, FORCE_CPU=force)

    for how in ("pass", "host"):
        for wanted in ("any", "cpu", "gpu"):
            for x in (VALUES, Foreign(VALUES)):
                y, _ = host.infer(x, f"ask b {how} {wanted}", "asks")

                assert (on_host(y) == VALUES + (how == "host")).all()


@pytest.mark.parametrize(("wanted", "there"), [("cpu", "on the CPU"), ("gpu", "on a GPU")])
def test_the_memory_that_a_model_prefers_is_what_it_gets(
    host: Host, wanted: str, there: str, caplog: pytest.LogCaptureFixture
) -> None:
    host.load("asks")
    host.load("b")
    with caplog.at_level("INFO"):
        host.infer(host.on_device(VALUES, "asks"), f"ask b pass {wanted}", "asks")
        host.infer(VALUES, f"ask b pass {wanted}", "asks")

        wait_until(lambda: len(seen(caplog)) == 2, what="what the model said of both")

    assert seen(caplog) == [f"b answered {there}"] * 2


@pytest.mark.promise("GPUs in the runtime", "Each reader of a tensor …")
def test_a_chain_of_models_waits_for_what_the_device_does_late(
    fake_host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DELAY_US", "20000")
    monkeypatch.setenv("FAKE_CUDA_BY_CHANCE", "1")
    for name in ("a", "b"):
        fake_host.load(name)
    fake_host.load("home", FORCE_CPU="yes")
    fake_host.fake.delay(20_000, by_chance=True)

    for i in range(8):
        y, _ = fake_host.infer(Foreign(VALUES + i), "ask b copy any", "a")
        z, _ = fake_host.infer(y, "ask home pass any", "a")

        assert (y.to_host() == VALUES + i).all()
        assert (z == VALUES + i).all()
