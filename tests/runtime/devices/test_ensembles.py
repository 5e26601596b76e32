"""Arrays on a device through the steps of an ensemble, on the fake driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.ensemble_repositories import Io, chain, step, write_ensemble
from tests.runtime.devices.conftest import FakeHost, Host, on_host

from moonpool.ipc.cuda.array import DeviceArray

pytestmark = pytest.mark.promise(
    "Ensembles", "A tensor on a device stays there from step to step, and is copied for a model that takes none."
)
VALUES = np.arange(1, 17, dtype=np.float32)
X, Y = (Io("X", dims="-1"),), (Io("Y", dims="-1"),)
HOW = Io("HOW", "STRING", "1")
# Each step gets the first input of the ensemble, or what the one before wrote, and HOW.
STEPS = [step("a", {"X": "X", "HOW": "HOW"}, {"Y": "t"}), step("b", {"X": "t", "HOW": "HOW"}, {"Y": "Y"})]


def load_ensemble(host: Host, folder: Path, steps: Sequence[str], inputs: Sequence[Io] = X) -> None:
    write_ensemble(folder, "e", steps, inputs, Y)
    host.runtime.load("e", folder / "e")


def ask(host: Host, inputs: Mapping[str, object], **options: str) -> object:
    return host.runtime.request("e", inputs, **options).outputs["Y"]  # type: ignore[arg-type]


@pytest.mark.parametrize("is_chain", [True, False])
def test_a_tensor_stays_on_the_device_from_step_to_step(fake_host: FakeHost, tmp_path: Path, *, is_chain: bool) -> None:
    for name in ("a", "b"):
        fake_host.load(name)
    inputs: dict[str, object] = {"X": fake_host.on_device(VALUES, "a")}
    if is_chain:
        load_ensemble(fake_host, tmp_path, chain(["a", "b"], "X", "Y"))
    else:
        load_ensemble(fake_host, tmp_path, STEPS, (*X, HOW))
        inputs["HOW"] = np.array([b"pass"], object)
    copies = fake_host.fake.calls("cuMemcpyAsync")

    y = ask(fake_host, inputs)

    assert isinstance(y, DeviceArray)
    # The models copy on the device; the runtime copies nothing.
    assert fake_host.fake.calls("cuMemcpyAsync") == copies
    assert (y.to_host() == VALUES).all()
    assert isinstance(ask(fake_host, inputs, outputs_in="cpu"), np.ndarray)


@pytest.mark.parametrize("kinds", [("GPU", "CPU"), ("CPU", "GPU"), ("CPU", "CPU")])
def test_a_step_that_takes_no_memory_of_devices_gets_a_copy(host: Host, tmp_path: Path, kinds: tuple[str, str]) -> None:
    for name, kind in zip(("a", "b"), kinds, strict=True):
        host.load(name, kind=kind, FORCE_CPU="yes" if kind == "CPU" else "no")
    load_ensemble(host, tmp_path, STEPS, (*X, HOW))
    how = np.array([b"host"], object)

    for x in (VALUES, host.on_device(VALUES, "a")):
        y = ask(host, {"X": x, "HOW": how})

        assert (on_host(y) == VALUES + 2).all()  # type: ignore[arg-type]
