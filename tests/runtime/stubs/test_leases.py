"""Outputs are views of shared memory. They are valid as long as a caller has them; then the memory is reused."""

from __future__ import annotations

import gc
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.inside import hosted_in
from tests.runtime.recorder import PATIENCE_S, tensor
from tests.waiting import wait_until

import moonpool
from moonpool import Runtime
from moonpool.runtime.stubs.link import Link
from moonpool.stub.peers.placement import PASSED_BYTES

MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        wanted = request.requested_output_names()
        outputs = {"DOUBLE": x * 2, "SAME": x}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor(name, outputs[name]) for name in outputs if name in wanted]
        )
"""
CONFIG: dict[str, Any] = {
    "input": [tensor("X", "FP32", -1)],
    "output": [tensor("DOUBLE", "FP32", -1), tensor("SAME", "FP32", -1)],
    "instance_group": [{"kind": "KIND_CPU", "count": 1}],
    "parameters": {"MOONPOOL_REGION_BYTES": {"string_value": "256K"}},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("models") / "model.py"
    file.write_text(MODEL)
    return file


@pytest.fixture
def runtime(file: Path) -> Iterator[Runtime]:
    with Runtime() as runtime:
        runtime.load("m", file, config=CONFIG)
        yield runtime


def ask(runtime: Runtime, *values: float, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    return runtime.infer("m", {"X": np.array(values, np.float32)}, timeout_s=PATIENCE_S, **options)


def link_of(runtime: Runtime) -> Link:
    (record,) = hosted_in(runtime, "m").supervisor.records
    link = record.instance.state.link
    assert isinstance(link, Link)
    return link


def _unload(runtime: Runtime) -> None:
    runtime.unload("m")


def _close(runtime: Runtime) -> None:
    runtime.close()


def _crash(runtime: Runtime) -> None:
    os.kill(runtime.instances("m")[0]["pid"], signal.SIGKILL)
    wait_until(lambda: runtime.instances("m")[0]["restarts"] == 1 and runtime.is_ready("m"))
    assert ask(runtime, 1)["DOUBLE"].tolist() == [2]


@pytest.mark.parametrize("end", [_unload, _close, _crash], ids=lambda end: end.__name__)
def test_outputs_stay_valid_after(runtime: Runtime, end: Callable[[Runtime], None]) -> None:
    shared = runtime.empty("m", "X", 3)
    shared[...] = [7, 8, 9]
    outputs = ask(runtime, 1, 2)
    passed = runtime.infer("m", {"X": shared})["SAME"]
    end(runtime)
    gc.collect()
    assert outputs["DOUBLE"].tolist() == [2, 4]
    assert outputs["SAME"].tolist() == [1, 2]
    assert passed.tolist() == shared.tolist() == [7, 8, 9]
    outputs["DOUBLE"][0] = 5
    assert outputs["DOUBLE"].tolist() == [5, 4]


def test_outputs_are_not_overwritten_while_somebody_has_them(runtime: Runtime) -> None:
    kept = [ask(runtime, i, i) for i in range(100)]
    for i, outputs in enumerate(kept):
        assert outputs["DOUBLE"].tolist() == [2 * i, 2 * i]
        assert outputs["SAME"].tolist() == [i, i]


def test_a_slice_keeps_the_memory_and_a_copy_does_not(runtime: Runtime) -> None:
    link = link_of(runtime)
    outputs = ask(runtime, *range(1000), outputs=["DOUBLE"])
    tail, copy = outputs["DOUBLE"][-2:], outputs["DOUBLE"].copy()
    del outputs
    gc.collect()
    assert not link.released
    ask(runtime, 0)
    assert tail.tolist() == [1996, 1998]
    del tail
    assert len(link.released) >= 1
    assert copy[3] == 6


def test_memory_does_not_grow_over_many_requests_whose_outputs_are_dropped_late(runtime: Runtime) -> None:
    link = link_of(runtime)
    x = {"X": np.arange(200, dtype=np.float32)}
    late: deque[dict[str, np.ndarray[Any, Any]]] = deque(maxlen=40)
    for _ in range(1000):
        late.append(runtime.infer("m", x))
    size_bytes, fds = link.size_bytes(), len(os.listdir("/proc/self/fd"))
    resident = _resident_kib(runtime)
    for i in range(10_000):
        late.append(runtime.infer("m", x))
        if i % 1000 == 0:
            assert late[0]["DOUBLE"][3] == 6
    assert link.size_bytes() <= size_bytes
    # Whoever looks at processes has files of /proc open for a moment.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= fds)
    assert len(link.released) <= 2 * 40
    assert not link.borrowed_blocks.is_kept
    late.clear()
    ask(runtime, 1)
    assert link.borrowed_blocks.used_bytes == 0
    # Tensors of the same size need no further pages. An allocator may take a few MiB.
    assert _resident_kib(runtime) <= resident + 4096


def _resident_kib(runtime: Runtime) -> int:
    status = Path(f"/proc/{runtime.instances('m')[0]['pid']}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


# Memory that callers write into


def test_inputs_in_shared_memory_are_not_copied(runtime: Runtime) -> None:
    count = PASSED_BYTES // 4
    x = runtime.empty("m", "X", (count,))
    assert (x.shape, x.dtype) == ((count,), np.dtype(np.float32))
    link = link_of(runtime)
    for i in range(5):
        x[...] = i
        x[1] = i + 1
        outputs = runtime.infer("m", {"X": x})
        assert outputs["DOUBLE"][:3].tolist() == [2 * i, 2 * i + 2, 2 * i]
        # The model passed the input through, so the output is the caller's own memory.
        x[0] = 99
        assert outputs["SAME"][0] == 99
        assert link.borrowed_blocks.used_bytes == 0


def test_a_small_output_is_a_copy_wherever_it_lay(runtime: Runtime) -> None:
    x = runtime.empty("m", "X", (3,))
    x[...] = [1, 2, 3]
    outputs = runtime.infer("m", {"X": x})
    x[0] = 99
    assert outputs["SAME"].tolist() == [1, 2, 3]


def test_an_array_in_shared_memory_serves_many_requests_at_once(runtime: Runtime) -> None:
    x = runtime.empty("m", "X", 4)
    x[...] = [1, 2, 3, 4]
    futures = [runtime.submit("m", {"X": part}) for part in (x, x[1:], x[:2], x[::2])]
    sums = [float(f.result(PATIENCE_S).outputs["DOUBLE"].sum()) for f in futures]
    assert sums == [20, 18, 6, 8]


def test_memory_of_callers_is_used_again(runtime: Runtime) -> None:
    memory = hosted_in(runtime, "m").model.state.caller_memory
    for i in range(300):
        x = runtime.empty("m", "X", 1000)
        x[...] = i
        assert runtime.infer("m", {"X": x})["DOUBLE"][5] == 2 * i
    assert memory.size_bytes <= 4 * 4096


def test_an_array_of_a_model_that_was_unloaded_is_ordinary_memory(runtime: Runtime, file: Path) -> None:
    x = runtime.empty("m", "X", 2)
    x[...] = [1, 2]
    runtime.unload("m")
    with pytest.raises(moonpool.ModelNotFound):
        runtime.empty("m", "X", 2)
    runtime.load("m", file, config=CONFIG)
    assert runtime.infer("m", {"X": x})["DOUBLE"].tolist() == [2, 4]


def test_every_instance_reads_the_memory_of_callers(file: Path) -> None:
    with Runtime() as runtime:
        runtime.load("m", file, config={**CONFIG, "instance_group": []}, instances=3)
        x = runtime.empty("m", "X", 2)
        x[...] = [3, 4]
        for _ in range(4):
            futures = [runtime.submit("m", {"X": x}) for _ in range(6)]
            for future in futures:
                assert future.result(PATIENCE_S).outputs["DOUBLE"].tolist() == [6, 8]
        for record in hosted_in(runtime, "m").supervisor.records:
            os.kill(record.instance.state.process.pid, signal.SIGKILL)
        records = hosted_in(runtime, "m").supervisor.records
        wait_until(lambda: all(record.restarts == 1 for record in records) and runtime.is_ready("m"))
        # The restarted instances do not have the region yet.
        assert runtime.infer("m", {"X": x})["DOUBLE"].tolist() == [6, 8]
