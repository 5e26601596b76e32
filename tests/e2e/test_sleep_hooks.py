"""Tests of models with `sleep` and `wake`, in real stubs: what they free, and what happens if a hook fails."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.e2e.hosting import options, tensor
from tests.faults.known import MISBEHAVE
from tests.inside import boot_with, hosted_in, registry_of
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.model.states import Residence
from moonpool.runtime.residency import residents

PATIENCE_S = 60.0
MIB = 1 << 20
MODEL = """
import json, os, signal, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.plan, self.calls = "", []
        self.weights = np.ones(WEIGHTS, np.uint8)

    def execute(self, requests):
        responses = []
        for request in requests:
            self.plan = pb_utils.get_input_tensor_by_name(request, "PLAN").as_numpy()[0].decode()
            said = json.dumps([os.getpid(), self.calls, len(self.weights)])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([said], object))]))
        return responses

    def sleep(self):
        self.follow("sleep")
        self.weights = None

    def wake(self):
        self.follow("wake")
        self.weights = np.ones(WEIGHTS, np.uint8)

    def is_ready(self):
        return self.weights is not None

    def follow(self, hook):
        self.calls.append(hook)
        if self.plan == f"{hook} raises":
            raise ValueError("on purpose")
        if self.plan == f"{hook} exits":
            raise SystemExit
        if self.plan == f"{hook} dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.plan == f"{hook} hangs":
            time.sleep(3600)
"""
NATIVE = """
from moonpool import Batch, Float32

class Scale:
    def __init__(self):
        self.factor, self.wakes = 2.0, 0

    def __call__(self, X: Float32[Batch, 1]) -> Float32[Batch, 1]:
        return X * self.factor + self.wakes

    def sleep(self):
        self.factor = None

    async def wake(self):
        self.factor, self.wakes = 2.0, self.wakes + 1
"""
CONFIG: dict[str, Any] = {"input": [tensor("PLAN", "STRING", 1)], "output": [tensor("SAID", "STRING", 1)]}


def written(folder: Path, *, weights: int = 1, is_async: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "model.py"
    text = MODEL.replace("WEIGHTS", str(weights))
    file.write_text(re.sub("def (sleep|wake)", r"async def \1", text) if is_async else text)
    return file


@contextlib.contextmanager
def idle(tmp_path: Path, *, is_async: bool = False, **given: object) -> Iterator[moonpool.Runtime]:
    """Make a runtime with the model `m`, which sleeps soon when nobody asks it."""
    chosen = options(**{"IDLE_S": 0.05, "RESTART_BACKOFF_S": 0, **given})
    with moonpool.Runtime() as runtime:
        runtime.load("m", written(tmp_path, is_async=is_async), config=CONFIG | chosen)
        yield runtime


def ask(runtime: moonpool.Runtime, plan: str = "", name: str = "m") -> tuple[Any, ...]:
    outputs = runtime.infer(name, {"PLAN": [plan]}, timeout_s=PATIENCE_S)
    return tuple(json.loads(outputs["SAID"][0]))


def state_of(runtime: moonpool.Runtime, name: str = "m") -> Residence:
    residence = hosted_in(runtime, name).residence
    assert residence is not None
    return residence.state


def falls(runtime: moonpool.Runtime, state: Residence, name: str = "m") -> None:
    wait_until(lambda: state_of(runtime, name) is state, PATIENCE_S, f"{name} {state}")


@pytest.mark.promise(
    "Lifecycle",
    "A model with `sleep` and `wake` keeps its process while it sleeps: `sleep` is called when it is put to sleep, and "
    "`wake` before the next request is executed.",
)
@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "coroutines"])
def test_a_model_sleeps_and_wakes_in_its_process(tmp_path: Path, is_async: bool) -> None:
    with idle(tmp_path, is_async=is_async) as runtime:
        pid, *_ = ask(runtime)
        falls(runtime, Residence.DORMANT)
        (status,) = registry_of(runtime).statuses()["m"].versions
        assert status.reason == "asleep with its processes: the next request wakes it"
        assert [each["pid"] for each in runtime.instances("m")] == [pid]
        # Its own `is_ready` would say no, and is not asked.
        assert runtime.is_ready("m")
        metrics = runtime.metrics()
        assert 'moonpool_model_dormant{model="m",version="1"} 1' in metrics
        assert 'moonpool_model_awake{model="m",version="1"} 0' in metrics

        after, calls, size = ask(runtime)

        assert (after, size) == (pid, 1)
        assert calls[-2:] == ["sleep", "wake"]
        assert calls == ["sleep", "wake"] * (len(calls) // 2)


def test_a_native_model_sleeps_and_wakes(tmp_path: Path) -> None:
    file = tmp_path / "native.py"
    file.write_text(NATIVE)
    with moonpool.Runtime() as runtime:
        runtime.load("m", file, options={"MOONPOOL_IDLE_S": "0.05"})
        falls(runtime, Residence.DORMANT)
        found = runtime.infer("m", {"X": np.ones((1, 1), np.float32)}, timeout_s=PATIENCE_S)
        assert found["OUTPUT0"].flat[0] >= 3.0


def test_one_hook_alone_is_none(tmp_path: Path) -> None:
    """A model of Triton's may have a method of this name for something else."""
    file = written(tmp_path)
    file.write_text(file.read_text().replace("def wake(", "def wakens("))
    with moonpool.Runtime() as runtime:
        runtime.load("m", file, config=CONFIG | options(IDLE_S=0.05))
        falls(runtime, Residence.ASLEEP)
        assert runtime.instances("m") == []
        assert ask(runtime)[1] == []


@pytest.mark.promise(
    "Lifecycle",
    "If a model's `sleep` raises, takes too long or ends its process, the model is ended as one without hooks, and the "
    "next request starts it.",
)
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("raises", "`sleep` of 'm_0' failed: ValueError: on purpose"),
        ("exits", "`sleep` of 'm_0' failed: SystemExit"),
        ("dies", "SIGKILL"),
        ("hangs", "`sleep` of 'm_0' took longer than 0.5 s (MOONPOOL_SLEEP_TIMEOUT_S)"),
    ],
)
def test_a_sleep_that_fails_ends_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plan: str, reason: str
) -> None:
    with (
        caplog.at_level(logging.ERROR, "moonpool"),
        idle(tmp_path, SLEEP_TIMEOUT_S=0.5 if plan == "hangs" else PATIENCE_S) as runtime,
    ):
        pid, *_ = ask(runtime, f"sleep {plan}")
        falls(runtime, Residence.ASLEEP)
        assert runtime.instances("m") == []
        assert not os.path.exists(f"/proc/{pid}")
        assert ask(runtime)[0] != pid
    assert "model 'm' cannot sleep, so its processes end" in caplog.text
    assert reason in caplog.text


@pytest.mark.promise(
    "Lifecycle",
    "If a model's `wake` raises, takes too long or ends its process, the instance is started anew, and the request "
    "that woke it is answered.",
)
@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("raises", "`wake` of 'm_0' failed: ValueError: on purpose"),
        ("dies", "SIGKILL"),
        ("hangs", "`wake` of 'm_0' took longer than 0.5 s (MOONPOOL_WAKE_TIMEOUT_S)"),
    ],
)
def test_a_wake_that_fails_starts_the_instance_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plan: str, reason: str
) -> None:
    with (
        caplog.at_level(logging.ERROR, "moonpool"),
        idle(tmp_path, WAKE_TIMEOUT_S=0.5 if plan == "hangs" else PATIENCE_S) as runtime,
    ):
        pid, *_ = ask(runtime, f"wake {plan}")
        falls(runtime, Residence.DORMANT)
        after, calls, _ = ask(runtime)
        assert after != pid
        assert calls == []
    assert reason in caplog.text


def test_a_process_that_dies_while_it_sleeps_is_noticed_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "moonpool"), idle(tmp_path) as runtime:
        pid, *_ = ask(runtime)
        falls(runtime, Residence.DORMANT)
        os.kill(pid, signal.SIGKILL)
        falls(runtime, Residence.ASLEEP)
        assert runtime.instances("m") == []
        assert ask(runtime)[0] != pid
    assert "model 'm' ends: an instance has ended" in caplog.text


def test_a_model_is_unloaded_while_it_sleeps(tmp_path: Path) -> None:
    with idle(tmp_path) as runtime:
        pid, *_ = ask(runtime)
        falls(runtime, Residence.DORMANT)
        runtime.unload("m")
        assert not os.path.exists(f"/proc/{pid}")


def test_another_number_of_instances_holds_from_the_next_start_on(tmp_path: Path) -> None:
    with idle(tmp_path) as runtime:
        falls(runtime, Residence.DORMANT)
        runtime.scale("m", 2)
        ask(runtime)
        assert len(hosted_in(runtime, "m").supervisor.records) == 2


def test_all_objects_of_a_process_sleep(tmp_path: Path) -> None:
    with idle(tmp_path, INSTANCES_PER_PROCESS=2) as runtime:
        falls(runtime, Residence.DORMANT)
        found = [ask(runtime) for _ in range(4)]
        assert {size for _, _, size in found} == {1}
        assert all(calls[:2] == ["sleep", "wake"] for _, calls, _ in found)


class HostMemoryAsGpu:
    """Stands for the driver: what a process has in memory, it has on the GPU."""

    def bytes_by_process(self) -> dict[int, int]:
        found = {}
        for entry in Path("/proc").glob("[0-9]*/statm"):
            with contextlib.suppress(OSError):
                found[int(entry.parent.name)] = int(entry.read_text().split()[1]) * resource.getpagesize()
        return found

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.promise(
    "Lifecycle",
    "If memory of GPUs is short, a model with `sleep` and `wake` is asked to sleep, its memory is measured again, and "
    "its process stays if that is enough.",
)
def test_memory_of_gpus_is_freed_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(residents, "GpuMetrics", HostMemoryAsGpu)
    # Room for the weights of one model and for two processes.
    resident = moonpool.Resident(gpu_memory=300 * MIB, least_stay_s=0.0)
    with caplog.at_level(logging.INFO, "moonpool"), moonpool.Runtime(resident=resident) as runtime:
        for name in ("a", "b"):
            file = written(tmp_path / name, weights=128 * MIB)
            runtime.load(name, file, config=CONFIG)
        pids = {name: ask(runtime, name=name)[0] for name in ("a", "b")}
        # What both take is known now, so the next look lets one of them sleep.
        for _ in range(4):
            wait_until(lambda: len(dormant(runtime, *pids)) == 1, PATIENCE_S)
            (name,) = dormant(runtime, *pids)
            found = hosted_in(runtime, name).residence
            assert found is not None
            assert 0 < found.dormant_need.gpu_bytes < 128 * MIB < found.need.gpu_bytes
            assert found.sleeps["memory"] >= 1
            pid, calls, size = ask(runtime, name=name)
            assert (pid, size) == (pids[name], 128 * MIB)
            assert calls == ["sleep", "wake"] * found.sleeps["memory"]
    assert "sleeps with its processes: models may take" in caplog.text


def dormant(runtime: moonpool.Runtime, *names: str) -> list[str]:
    return [name for name in names if state_of(runtime, name) is Residence.DORMANT]


def test_other_limits_end_models_that_have_hooks(tmp_path: Path) -> None:
    resident = moonpool.Resident(models=1, least_stay_s=0.0)
    with moonpool.Runtime(resident=resident) as runtime:
        for name in ("a", "b"):
            runtime.load(name, written(tmp_path / name), config=CONFIG | options(IDLE_S=0.05))
        pid, *_ = ask(runtime, name="a")
        falls(runtime, Residence.DORMANT, "a")
        ask(runtime, name="b")
        assert state_of(runtime, "a") is Residence.ASLEEP
        assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.promise(
    "Containment",
    "A stub that answers a sleep or a wake with anything else is ended, with the reason in the log, and the model "
    "serves on in another process.",
)
@pytest.mark.parametrize("hook", ["sleep", "wake"])
@pytest.mark.parametrize(
    ("nonsense", "reason"),
    [
        ("garbage", "broke the protocol"),
        ("another kind", "came out of turn"),
        ("an answer", "ANSWER came out of turn"),
        ("twice", "came out of turn"),
        ("a place in memory that it has not", "a block of 1099511627776 bytes"),
        ("nothing", "took longer than 0.5 s"),
    ],
)
def test_a_stub_that_answers_with_nonsense_is_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    hook: str,
    nonsense: str,
    reason: str,
) -> None:
    boot_with(MISBEHAVE, monkeypatch)
    monkeypatch.setenv("FAULT_HOOK", f"{hook}:{nonsense}")
    limit_s = 0.5 if nonsense == "nothing" else PATIENCE_S
    config: dict[str, Any] = {
        "input": [tensor("X", "FP32", 4)],
        "output": [tensor("Y", "FP32", -1), tensor("STRINGS", "STRING", -1)],
        **options(
            ENVIRONMENT="FAULT_*",
            IDLE_S=0.05,
            RESTART_BACKOFF_S=0,
            MAX_RESTARTS=100,
            # A second answer to WAKE is read as the one to the batch, whose request goes to the next process then.
            RETRY="yes",
            SLEEP_TIMEOUT_S=limit_s if hook == "sleep" else PATIENCE_S,
            WAKE_TIMEOUT_S=limit_s if hook == "wake" else PATIENCE_S,
        ),
    }
    with caplog.at_level(logging.ERROR, "moonpool"), moonpool.Runtime() as runtime:
        runtime.load("rogue", written(tmp_path), config=config)
        is_ended = hook == "sleep" and nonsense != "twice"
        falls(runtime, Residence.ASLEEP if is_ended else Residence.DORMANT, "rogue")
        before = [each["pid"] for each in runtime.instances("rogue")]
        assert bool(before) is not is_ended
        runtime.infer("rogue", {"X": np.zeros(4, np.float32)}, timeout_s=PATIENCE_S)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in before)
    assert reason in caplog.text
