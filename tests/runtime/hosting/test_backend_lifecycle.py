"""Tests of the seven functions of a backend: their order, their pairs, and the effect of each failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.recorder import PATIENCE_S, Call, Planned, Recorder, config, counted, echo, model_directory, x
from tests.waiting import wait_until

import moonpool
from moonpool import LoadFailed, ModelInstance, Runtime
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.request import InferenceRequest


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def runtime(recorder: Recorder) -> Iterator[Runtime]:
    with Runtime(backends=[recorder]) as runtime:
        yield runtime


@pytest.mark.promise(
    "Lifecycle",
    "The seven functions of a backend are called in their order, each once, and each "
    "`initialize` that returned is followed by its `finalize`.",
)
def test_the_seven_functions_are_called_in_their_order(folder: Path, recorder: Recorder) -> None:
    with Runtime(backends=[recorder]) as runtime:
        runtime.load("m", folder, config=config())
        assert runtime.infer("m", x(1, 2))["Y"].tolist() == [1, 2]
        runtime.infer("m", x(3))
    assert recorder.calls == [
        ("initialize", "recorder"),
        ("model_initialize", "m:1"),
        ("model_instance_initialize", "m:1 m_0_0"),
        ("model_instance_execute", "m:1 m_0_0"),
        ("model_instance_execute", "m:1 m_0_0"),
        ("model_instance_finalize", "m:1 m_0_0"),
        ("model_finalize", "m:1"),
        ("finalize", "recorder"),
    ]


def test_a_backend_without_models_is_never_called(recorder: Recorder) -> None:
    with Runtime(backends=[recorder]):
        pass
    assert recorder.calls == []


def test_a_backend_is_initialized_once_for_all_its_models(folder: Path, recorder: Recorder) -> None:
    with Runtime(backends=[recorder]) as runtime:
        for name in ("a", "b"):
            runtime.load(name, folder, config=config())
        runtime.unload("a")
        runtime.load("a", folder, config=config())
    assert recorder.calls.count(("initialize", "recorder")) == 1
    assert recorder.calls[-1] == ("finalize", "recorder")
    assert recorder.calls.count(("model_initialize", "a:1")) == 2
    assert recorder.calls.count(("model_finalize", "a:1")) == 2
    assert recorder.calls.count(("model_finalize", "b:1")) == 1


def test_models_that_are_loaded_at_the_same_time_initialize_their_backend_once(
    folder: Path, recorder: Recorder, runtime: Runtime
) -> None:
    start = threading.Barrier(4)

    def load(name: str) -> None:
        start.wait(PATIENCE_S)
        runtime.load(name, folder, config=config())

    threads = [threading.Thread(target=load, args=(f"m{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert recorder.calls.count(("initialize", "recorder")) == 1
    assert recorder.calls[0] == ("initialize", "recorder")
    assert sorted(runtime.models()) == ["m0", "m1", "m2", "m3"]


def test_every_version_is_a_model_with_instances_of_its_own(tmp_path: Path, recorder: Recorder) -> None:
    folder = model_directory(tmp_path / "m", 1, 3)
    with Runtime(backends=[recorder]) as runtime:
        runtime.load("m", folder, config=config(version_policy={"all": {}}, **counted(2)))
        assert runtime.models() == {"m": [1, 3]}
        runtime.infer("m", x(1), version=1)
        runtime.infer("m", x(1))
    executes = [s for f, s in recorder.calls if f == "model_instance_execute"]
    assert [subject.split()[0] for subject in executes] == ["m:1", "m:3"]
    for version in (1, 3):
        mine = [c for c in recorder.without_executes() if c[1].startswith(f"m:{version}")]
        assert mine[0] == ("model_initialize", f"m:{version}")
        assert {f for f, _ in mine[1:3]} == {"model_instance_initialize"}
        assert {f for f, _ in mine[3:5]} == {"model_instance_finalize"}
        assert mine[5:] == [("model_finalize", f"m:{version}")]
    recorder.check_pairs()


def test_two_backends_of_one_runtime_know_nothing_of_each_other(folder: Path) -> None:
    one, other = Recorder("one"), Recorder("other")
    with Runtime(backends=[one, other]) as runtime:
        runtime.load("a", folder, config=config(backend="one"))
        runtime.load("b", folder, config=config(backend="other"))
    for recorder, model in ((one, "a"), (other, "b")):
        assert {subject.split(":")[0] for _, subject in recorder.calls} == {recorder.name, model}
        recorder.check_pairs()


def test_backend_models_and_instances_carry_state(folder: Path) -> None:
    class Stateful(Recorder):
        def initialize(self) -> None:
            self.state = []

        def model_initialize(self, model: moonpool.Model) -> None:
            model.state = {"name": model.name}

        def model_instance_initialize(self, instance: ModelInstance) -> None:
            instance.state = 0

        def model_instance_execute(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
            instance.state += len(requests)
            self.state.append((instance.model.state["name"], instance.name, instance.state))
            return echo(instance, requests)

    backend = Stateful()
    with Runtime(backends=[backend]) as runtime:
        runtime.load("a", folder, config=config())
        runtime.load("b", folder, config=config())
        for name in ("a", "b", "a"):
            runtime.infer(name, x(1))
    assert backend.state == [("a", "a_0_0", 1), ("b", "b_0_0", 1), ("a", "a_0_0", 2)]


def test_only_execute_must_be_written(folder: Path) -> None:
    class Least(moonpool.Backend):
        def model_instance_execute(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
            return echo(instance, requests)

    with Runtime(backends=[Least("recorder")]) as runtime:
        runtime.load("m", folder, config=config())
        assert runtime.infer("m", x(5))["Y"].tolist() == [5]
    with pytest.raises(TypeError, match="model_instance_execute"):
        moonpool.Backend()  # type: ignore[abstract]


def test_a_backend_is_found_by_the_name_of_its_class_where_it_has_no_other(folder: Path) -> None:
    class Nameless(moonpool.Backend):
        def model_instance_execute(self, instance: ModelInstance, requests: Sequence[InferenceRequest]) -> Any:
            return echo(instance, requests)

    with Runtime(backends=[Nameless()]) as runtime:
        runtime.load("m", folder, config=config(backend="Nameless"))
        assert runtime.is_ready("m")


def test_a_backend_that_is_not_there_is_refused_with_those_that_are(folder: Path, runtime: Runtime) -> None:
    with pytest.raises(LoadFailed, match=r"for backend 'tensorrt'.*there are: onnxr.*, python, .*rec"):
        runtime.load("m", folder, config=config(backend="tensorrt"))
    assert runtime.models() == {}


@pytest.mark.promise("Lifecycle", "Instances of a model are initialized in parallel.")
def test_instances_of_a_model_are_initialized_in_parallel(folder: Path) -> None:
    together = threading.Barrier(3)

    class Meeting(Recorder):
        def model_instance_initialize(self, instance: ModelInstance) -> None:
            together.wait(PATIENCE_S)
            super().model_instance_initialize(instance)

        def model_instance_finalize(self, instance: ModelInstance) -> None:
            together.wait(PATIENCE_S)
            super().model_instance_finalize(instance)

    recorder = Meeting()
    with Runtime(backends=[recorder]) as runtime:
        runtime.load("m", folder, config=config(**counted(3)))
        assert [shown["name"] for shown in runtime.instances("m")] == ["m_0_0", "m_0_1", "m_0_2"]
    recorder.check_pairs()


def test_instance_groups_become_instances_with_kind_and_device(folder: Path) -> None:
    seen: dict[str, tuple[str, int]] = {}

    class Looking(Recorder):
        def model_instance_initialize(self, instance: ModelInstance) -> None:
            seen[instance.name] = (instance.kind, instance.device_id)

    groups = [{"kind": "KIND_CPU", "count": 2}, {"name": "own", "kind": "KIND_MODEL"}]
    with Runtime(backends=[Looking()]) as runtime:
        runtime.load("m", folder, config=config(instance_group=groups))
    assert seen == {"m_0_0": ("CPU", 0), "m_0_1": ("CPU", 0), "own_0": ("MODEL", 0)}


def test_a_backend_may_complete_the_configuration(folder: Path) -> None:
    class Completing(Recorder):
        def model_initialize(self, model: moonpool.Model) -> None:
            raw = {**config(max_batch_size=4), "name": model.name}
            model.config = ModelConfig.from_dict(raw)

    with Runtime(backends=[Completing()]) as runtime:
        runtime.load("m", folder, config={"backend": "recorder"})
        assert runtime.config("m").max_batch_size == 4
        assert runtime.infer("m", {"X": np.ones((2, 1), np.float32)})["Y"].shape == (2, 1)


# The end


def test_close_waits_for_what_is_being_loaded_and_unloads_it(folder: Path) -> None:
    loading, proceed = threading.Event(), threading.Event()

    class Slow(Recorder):
        def model_initialize(self, model: moonpool.Model) -> None:
            super().model_initialize(model)
            loading.set()
            proceed.wait(PATIENCE_S)

    recorder = Slow()
    runtime = Runtime(backends=[recorder])
    loader = threading.Thread(target=runtime.load, args=("m", folder), kwargs={"config": config()})
    loader.start()
    assert loading.wait(PATIENCE_S)
    closers = [threading.Thread(target=runtime.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    wait_until(lambda: repr(runtime) == "<moonpool.Runtime, closed>")
    with pytest.raises(moonpool.RuntimeClosed):
        runtime.load("other", folder, config=config())
    assert all(closer.is_alive() for closer in closers)
    proceed.set()
    loader.join(PATIENCE_S)
    for closer in closers:
        closer.join(PATIENCE_S)
    assert recorder.calls[-3:] == [
        ("model_instance_finalize", "m:1 m_0_0"),
        ("model_finalize", "m:1"),
        ("finalize", "recorder"),
    ]
    recorder.check_pairs()


def test_every_close_returns_only_when_everything_is_finalized(folder: Path) -> None:
    finalizing, proceed = threading.Event(), threading.Event()

    class Slow(Recorder):
        def finalize(self) -> None:
            finalizing.set()
            proceed.wait(PATIENCE_S)
            super().finalize()

    recorder = Slow()
    runtime = Runtime(backends=[recorder])
    runtime.load("m", folder, config=config())
    first = threading.Thread(target=runtime.close)
    first.start()
    assert finalizing.wait(PATIENCE_S)
    seen: list[Call] = []

    def close_too() -> None:
        runtime.close()
        seen.append(recorder.calls[-1])

    second = threading.Thread(target=close_too)
    second.start()
    # This gives a close that does not wait the time to return. It does not affect one that waits.
    second.join(0.1)
    proceed.set()
    first.join(PATIENCE_S)
    second.join(PATIENCE_S)
    assert seen == [("finalize", "recorder")]


def test_a_model_that_loads_or_unloads_takes_no_requests(folder: Path) -> None:
    steps = threading.Barrier(2)

    class Slow(Recorder):
        def model_initialize(self, _: moonpool.Model) -> None:
            steps.wait(PATIENCE_S)
            steps.wait(PATIENCE_S)

        def model_finalize(self, _: moonpool.Model) -> None:
            steps.wait(PATIENCE_S)
            steps.wait(PATIENCE_S)

    with Runtime(backends=[Slow()]) as runtime:
        for act in (lambda: runtime.load("m", folder, config=config()), lambda: runtime.unload("m")):
            thread = threading.Thread(target=act)
            thread.start()
            steps.wait(PATIENCE_S)
            with pytest.raises(moonpool.ModelUnavailable, match="loading or unloading"):
                runtime.infer("m", x(1))
            assert not runtime.is_ready("m")
            steps.wait(PATIENCE_S)
            thread.join(PATIENCE_S)
        assert runtime.models() == {}


def test_the_listener_hears_every_step_and_may_fail(
    folder: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[tuple[str, str]] = []

    def listen(subject: str, state: str, _: str) -> None:
        heard.append((subject, state))
        raise Planned("the listener is broken")

    with Runtime(backends=[recorder], listener=listen) as runtime:
        runtime.load("m", folder, config=config())
    assert heard == [
        ("m:1", "LOADING"),
        ("m_0_0", "STARTING"),
        ("m_0_0", "READY"),
        ("m:1", "READY"),
        ("m:1", "UNLOADING"),
        ("m_0_0", "DRAINING"),
        ("m_0_0", "FINALIZING"),
        ("m_0_0", "STOPPED"),
        ("m:1", "UNAVAILABLE"),
    ]
    assert "the listener failed" in caplog.text
