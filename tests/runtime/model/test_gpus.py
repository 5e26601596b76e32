"""Models get GPUs, or an error if there is none. The GPUs are made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moonpool.ipc.cuda import driver
from moonpool.ipc.errors import CudaUnavailable
from moonpool.ipc.messages import NO_DEVICE
from moonpool.runtime.cli.main import make_parser
from moonpool.runtime.model import gpus
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.model import ConfigError, minimal
from moonpool.runtime.model.config.options import ModelOptions
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.repository.grants import Grants, check_not_looser, granted
from moonpool.runtime.repository.loading import HostingRules, model_of
from moonpool.runtime.stubs.start_message import start_of


def model(*groups: dict[str, Any], **options: str) -> Model:
    raw = minimal("m")
    raw["instance_group"] = list(groups)
    raw["parameters"] = {f"MOONPOOL_{key}": {"string_value": options[key]} for key in options}
    here = Path("/models/m")
    source = ModelSource("triton", here / "model.py", None, here, here)
    return model_of("m", source, raw, None, 1, {})


def kinds(placed: Model) -> list[tuple[str, tuple[int, ...]]]:
    return [(group.kind, group.gpus) for group in gpus.placed(placed).instance_groups]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "usable_gpus", lambda: ((0, 1), ""))


@pytest.fixture
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> object:
        raise AssertionError("nobody was to ask the driver")

    monkeypatch.setattr(gpus, "usable_gpus", look)


@pytest.mark.promise(
    "GPUs in the runtime",
    "Instances are placed on GPUs as Triton places them. A contained model, or one that is forked "
    "after `initialize`, gets a GPU only if its configuration names one.",
)
@pytest.mark.usefixtures("two_gpus")
def test_without_a_kind_instances_go_to_every_gpu_as_in_triton() -> None:
    assert kinds(model()) == [("GPU", (0, 1))]
    assert kinds(model({"gpus": [1]})) == [("GPU", (1,))]
    assert kinds(model({"kind": "KIND_CPU"})) == [("CPU", ())]


@pytest.mark.promise("GPUs in the runtime", "Instances are placed on GPUs as …")
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("options", [{"SANDBOX": "strict"}, {"PREFORK": "initialize"}])
def test_a_model_that_cannot_use_a_gpu_gets_one_only_by_name(options: dict[str, str]) -> None:
    assert kinds(model(**options)) == [("CPU", ())]
    assert kinds(model({"kind": "KIND_GPU", "gpus": [1]}, **options)) == [("GPU", (1,))]


@pytest.mark.promise(
    "GPUs in the runtime",
    "The driver is not loaded if no model could use it, and the runtime makes no context before "
    "it handles device memory.",
)
@pytest.mark.usefixtures("no_look")
def test_the_driver_is_not_looked_for_where_no_model_could_use_it() -> None:
    assert kinds(model({"kind": "KIND_CPU"})) == [("CPU", ())]
    assert kinds(model({"kind": "KIND_MODEL"})) == [("MODEL", ())]
    assert kinds(model(SANDBOX="strict")) == [("CPU", ())]


@pytest.mark.promise("GPUs in the runtime", "If a configuration names a …")
def test_a_gpu_where_there_is_none_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> object:
        raise CudaUnavailable("there is no driver of NVIDIA here; install it")

    monkeypatch.setattr(driver, "load", load)
    gpus.usable_gpus.cache_clear()
    try:
        assert kinds(model()) == [("CPU", ())]
        with pytest.raises(ConfigError, match="no GPUs are available: there is no driver of NVID"):
            gpus.placed(model({"kind": "KIND_GPU"}))
    finally:
        gpus.usable_gpus.cache_clear()


@pytest.mark.promise(
    "GPUs in the runtime",
    "Until a card has run it, the help, the first load of a model on a GPU and the page say that it is experimental.",
)
@pytest.mark.usefixtures("two_gpus")
def test_that_gpus_are_experimental_is_said_once_where_a_user_meets_them(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus._warn.cache_clear()
    kinds(model({"kind": "KIND_CPU"}))
    assert caplog.messages == []
    for name in range(2):
        kinds(model({"kind": "KIND_GPU", "gpus": [name]}))
    assert caplog.messages == [gpus.EXPERIMENTAL]

    for command in ((), ("serve",)):
        with pytest.raises(SystemExit):
            make_parser().parse_args([*command, "--help"])
        assert capsys.readouterr().out.count(gpus.EXPERIMENTAL) == 1
    page = Path(__file__).parents[3] / "docs" / "GPU.md"
    assert not page.exists() or page.read_text().count(gpus.EXPERIMENTAL.partition(" (")[0]) == 1


@pytest.mark.promise("GPUs in the runtime", "A contained instance gets the nodes …")
def test_a_server_that_contains_its_models_lets_none_take_a_gpu() -> None:
    asking = model({"kind": "KIND_GPU"})

    with pytest.raises(ConfigError, match=r"instance_group: .*a GPU; .*--sandbox-grants=m"):
        HostingRules("strict").apply_to(asking)
    HostingRules("strict", grants=Grants(["m"])).apply_to(asking)
    HostingRules("standard").apply_to(asking)


@pytest.mark.promise("GPUs in the runtime", "A contained instance gets the nodes …")
def test_a_contained_model_gives_no_other_one_a_gpu() -> None:
    brought = model({"kind": "KIND_GPU"}, SANDBOX="strict")

    with pytest.raises(ConfigError, match="cannot give another a GPU"):
        check_not_looser(brought, ModelOptions(sandbox="strict"))
    check_not_looser(brought, ModelOptions())


def test_a_gpu_is_among_what_is_granted() -> None:
    assert granted(ModelOptions(sandbox="strict"), [1]) == ("use GPU 1",)


def test_an_instance_is_told_its_gpu_and_others_that_they_have_none() -> None:
    asking = model(GPU_AS_NUMPY="copy")

    def start(kind: str) -> dict[str, Any]:
        return start_of(asking, "m_0", kind, 1, "serve", backend_dir="", log=LogSettings())

    assert start("GPU")["device"] == 1
    assert start("CPU")["device"] == NO_DEVICE
    assert start("GPU")["copies_gpu_to_numpy"] is True
    assert start("GPU")["args"]["model_instance_device_id"] == "1"
