"""Models at `strict` on the card, in a runtime of this process: parts of the stage `strict`, each a process of its own.

python -m tests.card.models_at_strict plan FILE write the plan of a contained model to a file python -m
tests.card.models_at_strict models load and ask models at `strict` python -m tests.card.models_at_strict hostile have a
hostile model try what it was not given, at `off` and at `strict`
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from ctypes import byref, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.card import cuda, results
from tests.card.nodes import nodes_known
from tests.card.strict import WORKLOADS
from tests.e2e.hosting import MODELS, tensor
from tests.hostile.attacker import PATIENT, SIGNATURE, Attacker, answers, copied, load_sibling

import moonpool
from moonpool.ipc.cuda.device import Device, device
from moonpool.ipc.cuda.driver import HANDLE_BYTES, IpcHandle
from moonpool.ipc.cuda.region import DeviceRegion
from moonpool.runtime.hosting import python_backend
from moonpool.runtime.isolation.plan import IsolationPlan, plan_for

GPU = [{"kind": "KIND_GPU", "count": 1, "gpus": [0]}]
X = np.arange(16, dtype=np.float32)
REFUSED = ("EACCES", "EPERM", "EROFS", "killed")
MARK = 0x5A
_LOAD_S, _ASK_S = 20.0, 15.0
# A request that runs a kernel for ever is over after this time. A first context may take a second or two of it.
_EXECUTE_S = 4.0


def _config(**parameters: object) -> dict[str, Any]:
    return {
        "instance_group": GPU,
        "parameters": {key: {"string_value": str(value)} for key, value in parameters.items()},
    }


def _recorded(name: str, attempt: Callable[[], object], expected: str = "works") -> bool:
    """Record whether an attempt works, and the error's text if it does not."""
    began = time.monotonic()
    try:
        text = attempt() or f"{time.monotonic() - began:.2f} s"
    except Exception as error:
        results.record(name, False, type(error).__name__, expected=expected, text=str(error))
        return False
    results.record(name, True, "works", expected=expected, text=str(text))
    return True


# The plan of a contained model


def plan(file: str) -> None:
    """Load a model at `strict`, and write what the runtime has planned for its process.

    It is written before the process starts: what the sandbox lacks is of most use where a model hangs in it.
    """

    def kept(*arguments: Any, **options: Any) -> IsolationPlan:
        planned = plan_for(*arguments, **options)
        if not Path(file).exists():
            _write(planned, Path(file))
        return planned

    with pytest.MonkeyPatch.context() as patch, nodes_known():
        patch.setattr(python_backend, "plan_for", kept)
        with moonpool.Runtime(drain_timeout_s=1) as runtime:
            _load_workload(runtime, "driver")


def _write(planned: IsolationPlan, file: Path) -> None:
    found = {
        "policy": planned.policy.to_json(),
        "python": planned.python,
        "environment": planned.environment,
        "folder": planned.folder,
    }
    # Whoever reads it may come while it is written.
    made = file.with_name(f".{file.name}")
    made.write_text(json.dumps(found))
    os.replace(made, file)


def _load_workload(runtime: moonpool.Runtime, workload: str) -> None:
    config = _config(workload=workload, MOONPOOL_SANDBOX="strict", MOONPOOL_ENVIRONMENT="FAKE_*")
    config |= {"input": [tensor("X", "FP32", -1)], "output": [tensor("Y", "FP32", -1)]}

    def load() -> None:
        runtime.load(workload, WORKLOADS, config=config)
        runtime.unload(workload)

    _recorded(f"a model at strict starts {workload}", load)


# Models that work


def models(*libraries: str) -> None:
    """Load and ask models at `strict`, with these libraries."""
    with nodes_known(), moonpool.Runtime(drain_timeout_s=1) as runtime:
        _recorded("memory of the card goes in and out of a model at strict", lambda: _passes(runtime))
        if "torch" in libraries:
            _recorded("a model at strict adds and subtracts with torch", lambda: _adds(runtime))
        else:
            why = "there is no torch that can use the card"
            results.record("a model at strict adds and subtracts with torch", None, text=why)
        if "cupy" in libraries:
            _load_workload(runtime, "cupy")


def _passes(runtime: moonpool.Runtime) -> str:
    given = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", "MOONPOOL_GPU_AS_NUMPY": "copy"}
    given |= {"MOONPOOL_SANDBOX": "strict", "MOONPOOL_ENVIRONMENT": "FAKE_*"}
    config = _config(**given) | {
        "input": [tensor("X", "FP32", -1), tensor("HOW", "STRING", 1)],
        "output": [tensor("Y", "FP32", -1), tensor("ON_CPU", "BOOL", 1)],
    }
    runtime.load("passes", MODELS / "on_device.py", config=config)
    for how in ("pass", "add"):
        array = runtime.empty("passes", "X", X.shape, device=0)
        array.settle()
        array.device.write(array.address, X)
        inputs = {"X": array, "HOW": np.array([how.encode()], object)}
        y = runtime.infer("passes", inputs, timeout_s=_ASK_S)["Y"]
        if not isinstance(y, moonpool.DeviceArray):
            raise TypeError(f"an output is {type(y).__name__}, not a DeviceArray")
        if not np.array_equal(y.to_host(), X + (how == "add")):
            raise ValueError(f"{how}: the model sent {y.to_host()[:4]}")
    sandbox = runtime.instances("passes")[0]["sandbox"]
    runtime.unload("passes")
    return f"layers {' '.join(sandbox['layers'])}; granted {sandbox['granted']}"


def _adds(runtime: moonpool.Runtime) -> None:
    names = ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1")
    config = _config(MOONPOOL_SANDBOX="strict", FORCE_CPU_ONLY_INPUT_TENSORS="no") | {
        "input": [tensor(name, "FP32", -1) for name in names[0]],
        "output": [tensor(name, "FP32", -1) for name in names[1]],
    }
    runtime.load("adds", MODELS / "gpu_add_sub_torch.py", config=config)
    inputs = {"INPUT0": X, "INPUT1": np.full_like(X, 2)}
    outputs = runtime.infer("adds", inputs, timeout_s=_ASK_S, outputs_in="cpu")
    if not np.array_equal(outputs["OUTPUT0"], X + 2) or not np.array_equal(outputs["OUTPUT1"], X - 2):
        raise ValueError(f"the model sent {outputs}")


# A hostile model


class Scene:
    """Things of the runtime's that a hostile model was not sent, and is to reach."""

    def __init__(self, folder: Path) -> None:
        self.device: Device = device(0)
        size_bytes = self.device.rounded(1)
        self.region = DeviceRegion.create(1 << 20, size_bytes, self.device)
        self.region.write(0, np.full(64, MARK, np.uint8))
        handle, event = IpcHandle(), c_void_p()
        with self.device as here:
            here.driver.cuEventCreate(byref(event), cuda.OF_PROCESSES)
            here.driver.cuIpcGetEventHandle(byref(handle), event)
        self.event = bytes(handle)[:HANDLE_BYTES].hex()
        self.size_bytes = size_bytes
        self.node = _other_node(folder)

    def attempts(self) -> dict[str, tuple[str, Mapping[str, object]]]:
        """Return what to try, by what it reaches."""
        region = {"pid": os.getpid(), "fd": self.region.fd, "size": self.size_bytes}
        found: dict[str, tuple[str, Mapping[str, object]]] = {
            "a region that it was not sent": ("gpu.steal_region", region),
            "an event's 64 bytes": ("gpu.open_event", {"handle": self.event}),
        }
        if self.node is not None:
            found["another device node"] = ("gpu.open_node", {"path": str(self.node)})
        for path in sorted(Path("/dev").glob("nvidia-caps*")):
            found[str(path)] = ("gpu.list_folder", {"path": str(path)})
        for path in (Path("/dev/nvidia-modeset"), *sorted(Path("/dev").glob("nvidia-caps*/*"))):
            if path.exists():
                found[str(path)] = ("gpu.open_node", {"path": str(path)})
        return found


def _other_node(folder: Path) -> Path | None:
    """Make a node with the card's numbers at another path: the second card of a machine that has one card."""
    nodes = [path for path in (Path("/dev/nvidia0"), Path("/dev/null")) if path.exists()]
    path = folder / "node"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, nodes[0].stat().st_rdev)
        path.chmod(0o666)
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        results.record("another device node", None, text=f"it cannot be made here: {error}")
        return None
    return path


def hostile() -> None:
    """Load the attacker at both levels, and record what it reaches."""
    with (
        tempfile.TemporaryDirectory(prefix="moonpool-card-") as name,
        nodes_known(),
        moonpool.Runtime(drain_timeout_s=1) as runtime,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        load_sibling(runtime)
        scene = Scene(folder)
        source = copied(folder / "attacker")
        for level in ("off", "strict"):
            attacker = _attacker(runtime, level, source)
            if attacker is None:
                continue
            for what, (attempt, arguments) in scene.attempts().items():
                _try(attacker, level, what, attempt, arguments)
            if level == "strict":
                _survive(attacker, scene)
        scene.region.close()


def _attacker(runtime: moonpool.Runtime, level: str, source: Path) -> Attacker | None:
    limit_s = max(1.0, _EXECUTE_S * results.share())
    given = {**PATIENT, "SANDBOX": level, "EXECUTE_TIMEOUT_S": limit_s, "ENVIRONMENT": "FAKE_*"}
    config = SIGNATURE | _config(**{f"MOONPOOL_{key}": value for key, value in given.items()})
    name = f"attacker_{level}"
    if not _recorded(f"a hostile model at {level}", lambda: runtime.load(name, source, config=config)):
        return None
    return Attacker(runtime, name)


def _try(attacker: Attacker, level: str, what: str, attempt: str, arguments: Mapping[str, object]) -> None:
    expected = "done" if level == "off" else "refused"
    name = f"{what}, at {level}"
    try:
        outcome = attacker.tries(attempt, **arguments)
    except Exception as error:
        results.record(name, False, type(error).__name__, expected=expected, text=str(error))
        return
    ok = outcome.word == "done" if level == "off" else outcome.word in REFUSED
    if outcome.word == "done" and "region" in what:
        ok = ok and outcome.done == MARK
    text = outcome.text or f"it got {outcome.done!r}"
    results.record(name, ok, outcome.word, expected=expected, text=text)


def _survive(attacker: Attacker, scene: Scene) -> None:
    """Have the model take all memory, loop in a kernel, die in one and fault in one, and look at the others after
    each.
    """
    ptx, share = cuda.PTX.decode().rstrip("\0"), results.share()
    before = scene.device.memory_info()[0]
    _harm(attacker, scene, "fills the card", "gpu.fill", piece=1 << 30)
    _kill(attacker)
    began = time.monotonic()
    while (left := scene.device.memory_info()[0]) < 0.95 * before and time.monotonic() < began + 5:
        time.sleep(0.05)
    took_s = round(time.monotonic() - began, 2)
    results.record("its memory is back after its death", left >= 0.95 * before, took_s, "s")
    _recorded("the model comes back after its death", lambda: _comes_back(attacker))
    _harm(attacker, scene, "loops in a kernel", "gpu.spin", ptx=ptx, seconds=20.0)
    _harm(attacker, scene, "dies in a kernel", "gpu.spin", ptx=ptx, seconds=5 * share, dies=True)
    _harm(attacker, scene, "faults in a kernel", "gpu.fault", ptx=ptx)
    # Its context is broken, and nothing of the runtime's was asked of it.
    _kill(attacker)
    _recorded("the model comes back after its fault", lambda: _comes_back(attacker))


def _kill(attacker: Attacker) -> None:
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.kill(attacker.pid, signal.SIGKILL)


def _harm(attacker: Attacker, scene: Scene, what: str, attempt: str, **arguments: object) -> None:
    began = time.monotonic()
    try:
        outcome = attacker.tries(attempt, **arguments)
        word, text = outcome.word, outcome.text or f"it got {outcome.done!r}"
    except Exception as error:
        word, text = type(error).__name__, str(error)
    results.record(f"it {what}", True, word, text=f"{time.monotonic() - began:.2f} s; {text}")
    name = f"others, when it {what}"
    _recorded(f"{name}: another model", lambda: _answers(attacker.runtime))
    _recorded(f"{name}: the runtime's own memory", lambda: _is_whole(scene))
    _recorded(f"{name}: the model itself comes back", lambda: _comes_back(attacker))


def _answers(runtime: moonpool.Runtime) -> None:
    if not answers(runtime):
        raise ValueError("it answers with other values")


def _is_whole(scene: Scene) -> None:
    found = scene.region.read(0, 64)
    if found != bytes([MARK]) * 64:
        raise ValueError(f"its bytes are {found[:8].hex()}")


def _comes_back(attacker: Attacker) -> str:
    began, found = time.monotonic(), "nothing"
    while time.monotonic() < began + 5:
        outcome = attacker.tries("self.identity")
        found = f"{outcome.word}: {outcome.text}"
        if outcome.word != "died":
            return f"after {time.monotonic() - began:.2f} s"
        time.sleep(0.05)
    raise TimeoutError(found)


PARTS: dict[str, Callable[..., None]] = {"plan": plan, "models": models, "hostile": hostile}


def main(part: str, *arguments: str) -> None:
    """Run a part, and record what it did not expect."""
    try:
        PARTS[part](*arguments)
    except Exception as error:
        traceback.print_exc()
        results.record(part, False, type(error).__name__, text=str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
