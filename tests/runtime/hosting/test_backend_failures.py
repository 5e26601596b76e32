"""Tests of failures of a backend's seven functions: what was initialized is finalized."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.recorder import Call, Planned, Recorder, config, counted, model_directory, x

import moonpool
from moonpool import LoadFailed, Runtime

STEPS: list[Call] = [
    ("initialize", "recorder"),
    ("model_initialize", "m:1"),
    ("model_instance_initialize", "m:1 m_0_0"),
    ("model_instance_initialize", "m:1 m_0_1"),
    ("model_initialize", "m:2"),
    ("model_instance_initialize", "m:2 m_0_1"),
]


@pytest.mark.promise("Lifecycle", "The seven functions of a …")
@pytest.mark.parametrize("step", STEPS, ids=" ".join)
@pytest.mark.parametrize("error", [Planned("as planned"), SystemExit("as planned")], ids=repr)
def test_initialized_parts_are_finalized_when_a_later_step_fails(
    tmp_path: Path, step: Call, error: BaseException
) -> None:
    folder = model_directory(tmp_path / "m", 1, 2)
    recorder = Recorder(failures={step: error})
    with Runtime(backends=[recorder]) as runtime:
        with pytest.raises((LoadFailed, SystemExit), match="as planned"):
            runtime.load("m", folder, config=config(version_policy={"all": {}}, **counted(2)))
        assert runtime.models() == {}
        recorder.failures.clear()
        if step[0] != "initialize":
            # The failure leaves nothing behind.
            runtime.load("m", folder, config=config())
            assert runtime.infer("m", x(1))["Y"].tolist() == [1]
    assert recorder.calls.count(("initialize", "recorder")) == 1
    recorder.check_pairs()


@pytest.mark.parametrize("step", STEPS[1:4], ids=" ".join)
def test_finalizing_goes_backwards_also_after_a_failure(folder: Path, step: Call) -> None:
    recorder = Recorder(failures={step: Planned()})
    with Runtime(backends=[recorder]) as runtime, pytest.raises(LoadFailed):
        runtime.load("m", folder, config=config(**counted(2)))
    order = ["initialize", "model_initialize", "model_instance_initialize"]
    order += ["model_instance_finalize", "model_finalize", "finalize"]
    places = [order.index(function) for function, _ in recorder.calls]
    assert places == sorted(places)
    recorder.check_pairs()


def test_the_error_of_a_load_names_the_instance_and_has_its_cause(folder: Path) -> None:
    planned = Planned("no such device")
    recorder = Recorder(failures={("model_instance_initialize", "m:1 m_0_0"): planned})
    with Runtime(backends=[recorder]) as runtime:
        with pytest.raises(LoadFailed, match="m_0_0 cannot be initialized: Planned: no such device") as caught:
            runtime.load("m", folder, config=config())
        assert caught.value.__cause__ is planned
        with pytest.raises(moonpool.ModelNotFound):
            runtime.infer("m", x(1))


def test_a_backend_whose_initialize_failed_is_not_asked_again(folder: Path) -> None:
    recorder = Recorder(failures={("initialize", "recorder"): Planned("no licence")})
    with Runtime(backends=[recorder]) as runtime:
        for _ in range(2):
            with pytest.raises(LoadFailed, match="no licence"):
                runtime.load("m", folder, config=config())
    assert recorder.calls == [("initialize", "recorder")]


@pytest.mark.parametrize(
    "step",
    [("model_instance_finalize", "m:1 m_0_0"), ("model_finalize", "m:1"), ("finalize", "recorder")],
    ids=" ".join,
)
def test_a_finalize_that_fails_is_logged_and_the_others_still_run(
    folder: Path, step: Call, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(failures={step: Planned("finalize failed as planned")})
    with Runtime(backends=[recorder]) as runtime:
        runtime.load("m", folder, config=config(**counted(2)))
    recorder.check_pairs()
    assert "finalize failed as planned" in caplog.text
    assert {f for f, _ in recorder.calls if f.endswith("finalize")} == {
        "model_instance_finalize",
        "model_finalize",
        "finalize",
    }
