"""Nodes and variables of a GPU for a contained process, by the names that the driver has. The driver is a fake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.gpu.cards import Fake, fake, fake_library
from tests.runtime.repository.test_grants import model

from moonpool.ipc.policy import STRICT
from moonpool.runtime.cli.sandbox import Gpu, _gpu
from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.isolation import gpu_access
from moonpool.runtime.isolation.gpu_access import GpuAccess, access_to
from moonpool.runtime.isolation.plan import IsolationPlan, plan_for
from moonpool.runtime.model import gpus
from moonpool.runtime.repository.environment import resolve

pytestmark = pytest.mark.promise("GPUs in the runtime", "A contained instance gets the nodes …")

__all__ = ["fake", "fake_library"]

UUID = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture
def driver_folder(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: ARG001
    """The files of the kernel's module about its GPUs; its first one is not the first of the machine."""
    folder = tmp_path / "0000:10:00.0"
    folder.mkdir()
    (folder / "information").write_text("Model: \t\t Fake\nDevice Minor: \t 3\nGPU Excluded:\t No\n")
    monkeypatch.setattr(gpu_access, "_INFORMATION", f"{tmp_path}/{{}}/information")
    return folder


def planned(*gpus: int) -> IsolationPlan:
    strict = model(SANDBOX=STRICT)
    return plan_for(strict, resolve(None, Path("/")), "", gpus=gpus)


def test_a_gpu_is_known_to_cuda_by_a_name_of_its_own(fake: Fake) -> None:  # noqa: ARG001
    assert gpus.uuid(0) == UUID
    assert gpus.bus_id(0) == "0000:10:00.0"


@pytest.mark.usefixtures("driver_folder")
def test_a_gpu_is_the_drivers_nodes_and_its_own_alone() -> None:
    assert access_to(()) == GpuAccess()
    assert access_to([0]) == GpuAccess(
        ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia3"), UUID
    )


def test_a_gpu_without_a_known_node_cannot_be_given(driver_folder: Path) -> None:
    (driver_folder / "information").write_text("Model: Fake\n")
    with pytest.raises(LoadFailed, match=r"GPU 0.* has no line 'Device Minor'"):
        access_to([0])
    (driver_folder / "information").unlink()
    with pytest.raises(LoadFailed, match=r"GPU 0.*No such file.*MOONPOOL_SANDBOX to standard"):
        access_to([0])


@pytest.mark.usefixtures("driver_folder")
def test_a_contained_instance_sees_its_gpu_as_the_only_one() -> None:
    plan = planned(0)
    try:
        assert plan.policy.devices[-1] == "/dev/nvidia3"
        assert plan.gpus == (0,)
        assert plan.number_of(0) == 0
        assert plan.granted == ("use GPU 0",)
        assert plan.environment["CUDA_VISIBLE_DEVICES"] == UUID
        assert plan.environment["CUDA_CACHE_PATH"] == os.path.join(plan.folder, "cuda")
    finally:
        plan.release()


def test_a_contained_instance_on_the_cpu_is_given_no_device() -> None:
    plan = planned()
    try:
        assert plan.policy.devices == []
        assert plan.gpus == ()
        assert plan.granted == ()
    finally:
        plan.release()


def test_it_is_told_whether_a_gpu_could_be_given(driver_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the nodes is there: the driver is a fake."""
    monkeypatch.setattr(gpu_access, "_SHARED", ("/dev/null",))

    assert _gpu(0) == Gpu(0, ("/dev/null", "/dev/nvidia3"), "there is no /dev/nvidia3")
    (driver_folder / "information").unlink()
    assert "is not known" in _gpu(0).why
