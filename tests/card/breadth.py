"""Whatever else meets a GPU:   python -m tests.card.breadth onnx|torch|cupy|cuda_core|pipeline|full [SETTING]

Other libraries' arrays in and out, the backends for ONNX and PyTorch with KIND_GPU, and instances until the card is
full. `sleep` and `wake` are among the figures (`moonpool.benchmarks.suites.gpu`), which this stage measures last.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tests.card import figures
from tests.card.results import record, recorded, share

if TYPE_CHECKING:
    from moonpool.ipc.cuda.device import Device

# What a library's allocator may be set to. It must be in the environment before the library is imported, here and in
# the model.
_EXPANDABLE = "expandable_segments:True"
_ASK_S = 20.0
# Until no more instances are started; the last one may take as long as a second.
_FILL_S = 12.0
_RELEASE_S, _MOST_KEPT_MIB = 5.0, 64
X = np.arange(1, 17, dtype=np.float32)
MIB = 1 << 20


class Missing(Exception):
    """Raised for something that this machine does not have, which is no failure."""


def needed(name: str) -> Any:
    """Return a module. Raises `Missing`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except Exception as error:
            raise Missing(f"{name} cannot be imported: {error}") from error


def tried(name: str, attempt: Callable[[], object], expected: str = "works") -> None:
    """Record what became of an attempt, whatever that is. `attempt` may return words."""
    began = time.monotonic()
    try:
        words = attempt()
    except Missing as error:
        record(name, None, expected=expected, text=str(error))
    except Exception as error:
        # What the fake driver lacks says nothing about a card.
        ok = None if is_fake() and not isinstance(error, AssertionError) else False
        record(name, ok, expected=expected, text=f"{type(error).__name__}: {error}")
    else:
        took_s = round(time.monotonic() - began, 3)
        record(name, True, took_s, "s", expected, str(words or ""))


def is_fake() -> bool:
    """Return True if the device is the fake driver's."""
    from moonpool.ipc.cuda.device import device, device_count

    return device_count() > 0 and figures.is_fake(device(0).name)


def equal(found: Any, expected: Any, what: str) -> None:
    """Raise AssertionError, which is a failure on the fake driver, too, unless two arrays are equal."""
    if not np.array_equal(found, expected):
        raise AssertionError(f"{what}: {found!r} in place of {expected!r}")


def on_host(array: Any) -> Any:
    """Return the values, wherever they lie."""
    return array.to_host() if hasattr(array, "to_host") else array


def placed(runtime: Any, model: str, name: str, values: Any) -> Any:
    """Return these values in the runtime's own memory on the device."""
    array = runtime.empty(model, name, values.shape, device=0)
    array.settle()
    array.device.write(array.address, values)
    return array


def config(inputs: str, outputs: str, datatype: str = "FP32", **parameters: object) -> Any:
    """Return a configuration with tensors of one datatype, on the GPU."""
    tensors = [
        [{"name": name, "data_type": f"TYPE_{datatype}", "dims": [-1]} for name in names.split()]
        for names in (inputs, outputs)
    ]
    given = {"FORCE_CPU_ONLY_INPUT_TENSORS": "no", **parameters}
    return {
        "input": tensors[0],
        "output": tensors[1],
        "instance_group": [{"kind": "KIND_GPU", "gpus": [0]}],
        "parameters": {key: {"string_value": str(value)} for key, value in given.items()},
    }


# Backends


def onnx() -> None:
    """A graph in the backend for ONNX."""
    tried("onnxruntime, KIND_GPU", lambda: _backend("onnxruntime", _write_onnx))


def _write_onnx(folder: Path) -> str:
    proto, runtime = needed("onnx"), needed("onnxruntime")
    helper, kind = proto.helper, proto.TensorProto.FLOAT
    names = {"A": ["N"], "B": ["N"], "SUM": ["N"]}
    infos = {name: helper.make_tensor_value_info(name, kind, dims) for name, dims in names.items()}
    node = helper.make_node("Add", ["A", "B"], ["SUM"])
    graph = helper.make_graph([node], "g", [infos["A"], infos["B"]], [infos["SUM"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    proto.save(model, folder / "model.onnx")
    return f"onnxruntime {runtime.__version__} offers {', '.join(runtime.get_available_providers())}"


def _write_torch(folder: Path) -> str:
    torch = needed("torch")

    class Add(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, A: Any, B: Any) -> Any:  # noqa: N803
            return A + B

    example = torch.ones(4)
    torch.jit.trace(Add(), (example, example)).save(str(folder / "model.pt"))
    return f"torch {torch.__version__}"


def _backend(name: str, write: Callable[[Path], str]) -> str:
    import moonpool

    with tempfile.TemporaryDirectory(prefix="moonpool-card-") as place:
        # A contained instance would have to read it.
        os.chmod(place, 0o755)
        folder = Path(place, "add")
        (folder / "1").mkdir(parents=True)
        words = write(folder / "1")
        with moonpool.Runtime(place, models=[], drain_timeout_s=1) as runtime:
            # The backends take tensors in ordinary memory, which is the default.
            given = config("A B", "SUM", FORCE_CPU_ONLY_INPUT_TENSORS="yes")
            given["backend"] = name
            runtime.load("add", config=given)
            for kind, a in (("numpy", X), ("device", placed(runtime, "add", "A", X))):
                found: Any = runtime.infer("add", {"A": a, "B": X}, timeout_s=_ASK_S)["SUM"]
                equal(on_host(found), 2 * X, f"{name}, inputs on {kind}")
            where = "in ordinary memory" if isinstance(found, np.ndarray) else "on the GPU"
    return f"{words}; outputs came {where}"


def torch(setting: str = "") -> None:
    """The backend for PyTorch, and arrays of PyTorch with each of its allocators."""
    if setting == "expandable":
        # Its name in newer versions, and in older ones.
        os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = _EXPANDABLE
    else:
        tried("pytorch backend, KIND_GPU", lambda: _backend("pytorch", _write_torch))
    name = f"torch in and out{', expandable segments' if setting else ''}"
    tried(name, lambda: _library("torch"))


def cupy(setting: str = "") -> None:
    """Arrays of CuPy with each of its allocators."""
    name = f"cupy in and out{', asynchronous pool' if setting else ''}"
    tried(name, lambda: _library("cupy", is_asynchronous=bool(setting)))


def _library(name: str, *, is_asynchronous: bool = False) -> str:
    import moonpool

    library = needed(name)
    if name == "torch" and not library.cuda.is_available():
        raise Missing("this torch sees no GPU")
    if is_asynchronous:
        library.cuda.set_allocator(library.cuda.MemoryAsyncPool().malloc)

    def made(values: Any) -> Any:
        on_device = {"device": "cuda:0"} if name == "torch" else {}
        return (library.tensor if name == "torch" else library.asarray)(values, **on_device)

    models = Path(__file__).parents[1] / "models"
    with moonpool.Runtime(drain_timeout_s=1) as runtime:
        given = config("INPUT0 INPUT1", "OUTPUT0 OUTPUT1", MOONPOOL_ENVIRONMENT="*")
        runtime.load("add_sub", models / f"gpu_add_sub_{name}.py", config=given)
        total, x = made(X), made(X)
        for _ in range(20):
            outputs = runtime.infer("add_sub", {"INPUT0": total, "INPUT1": x}, timeout_s=_ASK_S)
            total = library.from_dlpack(outputs["OUTPUT0"])
        found = total.cpu().numpy() if name == "torch" else library.asnumpy(total)
        equal(found, 21 * X, f"{name}, 20 sums")
    return f"{name} {library.__version__}"


def cuda_core() -> None:
    """A buffer of cuda.core goes in, and is filled with what comes out."""
    tried("a buffer of cuda.core in and out", _cuda_core)


def _cuda_core() -> str:
    import moonpool
    from moonpool.benchmarks.suites.hosted import MODELS
    from moonpool.ipc.cuda.array import DeviceArray
    from moonpool.ipc.cuda.device import device
    from moonpool.ipc.tensors import NAMES

    core, here = needed("cuda.core"), device(0)
    where = core.Device(0)
    where.set_current()
    stream = where.create_stream()
    values, found = np.arange(256, dtype=np.uint8), np.empty(256, np.uint8)
    buffer, back = (where.allocate(values.nbytes, stream=stream) for _ in range(2))
    stream.sync()
    here.write(int(buffer.handle), values)
    seen = DeviceArray.of(buffer)
    kind = "no device array" if seen is None else NAMES[seen.datatype]
    del seen
    with moonpool.Runtime(drain_timeout_s=1) as runtime:
        given = config("X", "Y", datatype=kind)
        runtime.load("identity", MODELS / "device_identity.py", config=given)
        y: Any = runtime.infer("identity", {"X": buffer}, timeout_s=_ASK_S)["Y"]
        view = core.utils.StridedMemoryView.from_any_interface(y, stream_ptr=int(stream.handle))
        back.copy_from(core.Buffer.from_handle(view.ptr, y.nbytes, owner=y), stream=stream)
        stream.sync()
        with here.borrowed_stream() as own:
            here.read(found, int(back.handle), own)
        del view, y
    equal(found, values, "bytes through cuda.core")
    return f"cuda.core {core.__version__}, its buffers are of {kind}"


# Models


def pipeline() -> None:
    """Three models one after the other, each of which computes."""
    tried("a pipeline of three models", _pipeline)


def _pipeline() -> str:
    import moonpool

    model = Path(__file__).parents[1] / "models" / "on_device.py"
    given = config("X", "Y", MOONPOOL_GPU_AS_NUMPY="copy", MOONPOOL_ENVIRONMENT="FAKE_*")
    given["input"].append({"name": "HOW", "data_type": "TYPE_STRING", "dims": [1]})
    given["output"].append({"name": "ON_CPU", "data_type": "TYPE_BOOL", "dims": [1]})
    how = np.array([b"add"], object)
    with moonpool.Runtime(drain_timeout_s=1) as runtime:
        for name in ("a", "b", "c"):
            runtime.load(name, model, config=given)
        y: Any = placed(runtime, "a", "X", X)
        for name in ("a", "b", "c"):
            y = runtime.infer(name, {"X": y, "HOW": how}, timeout_s=_ASK_S)["Y"]
        equal(on_host(y), X + 3, "three models")
        return f"the output is {y!r}"


def full() -> None:
    """Instances of a model until the card is full, the error of the one that has no room, and what is left
    afterwards.
    """
    tried("instances until the card is full", _full)


def _full() -> str:
    import moonpool
    from moonpool.benchmarks.suites import gpu
    from moonpool.ipc.cuda.device import device

    where = device(0)
    # The runtime's own first region and lane stay.
    before = where.memory_info()[0]
    # So large that some dozen instances fill the card: a process takes half a second to start.
    size = before // 12 >> 21 << 21
    most = 3 if is_fake() else 24
    ends = time.monotonic() + _FILL_S * share()
    x, count, why = np.ones(16, np.uint8), 1, "no time was left"
    with moonpool.Runtime(drain_timeout_s=1) as runtime:
        given = gpu.weights_config(size, "moonpool")
        runtime.load("fills", gpu.MODELS / "device_weights.py", config=given)
        call: Callable[[], object] = lambda: runtime.infer("fills", {"X": x}, timeout_s=_ASK_S)  # noqa: E731
        while count < most and (count < 2 or time.monotonic() < ends):
            if count in (1, 4):
                _rate(gpu, call, count)
            try:
                runtime.scale("fills", count + 1)
            except moonpool.LoadFailed as error:
                why = str(error)
                break
            count += 1
        record("instances on the card", True, count, "instances", text=f"then: {why}")
        _rate(gpu, call, count)
        if not is_fake():
            is_told = "memory" in why
            record("an instance that has no room is told so", is_told, expected="memory", text=why)
    kept = _kept_mib(where, before)
    record("memory that a full card keeps afterwards", kept <= _MOST_KEPT_MIB, kept, "MiB", f"at most {_MOST_KEPT_MIB}")
    return f"{size / 1e9:.1f} GB each"


def _kept_mib(where: Device, before: int) -> float:
    """Return how much less is free than before, when it is little or after a while: the driver frees what a process had
    in its time.
    """
    ends = time.monotonic() + _RELEASE_S
    while True:
        gc.collect()
        where.tidy()
        kept = (before - where.memory_info()[0]) / MIB
        if kept <= _MOST_KEPT_MIB or time.monotonic() > ends:
            return kept
        time.sleep(0.05)


def _rate(gpu: Any, call: Callable[[], object], instances: int) -> None:
    found = [gpu.rate(call, 16, 0.3 * share()) for _ in range(3)]
    words = f"{min(found):.0f} to {max(found):.0f}, 3 windows"
    record(f"16 callers, {instances} instances", True, round(sorted(found)[1]), "requests/s", text=words)


PARTS: dict[str, Callable[..., None]] = {
    "onnx": onnx,
    "torch": torch,
    "cupy": cupy,
    "cuda_core": cuda_core,
    "pipeline": pipeline,
    "full": full,
}


if __name__ == "__main__":
    with recorded(sys.argv[1]):
        PARTS[sys.argv[1]](*sys.argv[2:])
