"""Processes that a model starts, by each start method and library, and what is left of their shared memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import Config, hosted, options, tensor
from tests.e2e.module_leaks import _leaves_nothing_behind  # noqa: F401
from tests.leaks import shm_names
from tests.waiting import wait_until

import moonpool

PATIENCE_S = 120.0
METHODS = ("fork", "spawn", "forkserver")
# Each makes 9 in a child. The names are those of the model's file, which the child has to import.
LIBRARIES = {
    "process": """
queue = context.SimpleQueue()
child = context.Process(target=put_square, args=(queue, 3))
child.start()
found = queue.get()
child.join()
""",
    "pool": """
with context.Pool(1) as pool:
    found = pool.map(square, [3])[0]
""",
    "executor": """
with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
    found = pool.submit(square, 3).result()
""",
    "joblib": """
import joblib
found = joblib.Parallel(2)(joblib.delayed(square)(each) for each in (3, 4))[0]
""",
    "torch": """
import torch
loader = torch.utils.data.DataLoader(Squares(), num_workers=1, multiprocessing_context=context, batch_size=None)
found = [int(each) for each in loader][3]
""",
}
FUNCTIONS = """
import concurrent.futures, multiprocessing, os, signal
import numpy as np

def square(x):
    # What a child has of the module: its classes, and no runtime to ask.
    tensor = pb_utils.Tensor("X", np.array([x], np.int64))
    try:
        pb_utils.load_model("other")
    except pb_utils.TritonModelException:
        return int(tensor.as_numpy()[0]) ** 2

def put_square(queue, x):
    queue.put(square(x))

class Squares:
    def __len__(self):
        return 4
    def __getitem__(self, i):
        import torch
        return torch.tensor(i * i)

def run(text):
    kind, _, code = text.partition("\\n")
    names = {**globals(), "context": multiprocessing.get_context(kind)}
    exec(code, names)
    return str(names["found"])
"""
MODEL = (
    "import triton_python_backend_utils as pb_utils\n"
    + FUNCTIONS
    + """
class TritonPythonModel:
    def execute(self, requests):
        texts = [run(r.inputs()[0].as_numpy()[0].decode()) for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([t], object))]) for t in texts]
"""
)
CONFIG: Config = {"input": [tensor("X", "STRING", 1)], "output": [tensor("Y", "STRING", 1)]}


def written(folder: Path, text: str = MODEL) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def runtime() -> Iterator[moonpool.Runtime]:
    with moonpool.Runtime() as runtime:
        yield runtime


@pytest.fixture(scope="module")
def parent(runtime: moonpool.Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with hosted(runtime, "parent", written(tmp_path_factory.mktemp("parent") / "parent"), CONFIG):
        yield


def found(runtime: moonpool.Runtime, method: str, code: str, name: str = "parent") -> str:
    answer = runtime.infer(name, {"X": [f"{method}\n{code}"]}, timeout_s=PATIENCE_S)
    return str(answer["Y"][0].decode())


def skip_without(library: str) -> None:
    """Skip the test if this library has to be installed and is not."""
    if library in ("joblib", "torch") and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.promise(
    "Models",
    "Processes that a model starts by fork, spawn and forkserver import its file and Triton's module, whichever "
    "library starts them.",
)
@pytest.mark.slow
@pytest.mark.needs("processes")
@pytest.mark.usefixtures("parent")
@pytest.mark.parametrize(
    ("library", "method"),
    # joblib has a method of its own.
    [(library, method) for library in LIBRARIES for method in METHODS if library != "joblib" or method == "spawn"],
)
def test_children_import_the_model(runtime: moonpool.Runtime, library: str, method: str) -> None:
    skip_without(library)
    assert found(runtime, method, LIBRARIES[library]) == "9"


@pytest.mark.promise("Models", "Processes that a model starts by fork …")
@pytest.mark.needs("processes")
def test_under_an_interpreter_of_its_own_children_import_it_too(
    runtime: moonpool.Runtime, tmp_path: Path, virtual: Path
) -> None:
    """That interpreter has neither moonpool nor msgpack."""
    config = CONFIG | {"parameters": {"EXECUTION_ENV_PATH": {"string_value": str(virtual)}}}
    with hosted(runtime, "own", written(tmp_path / "own"), config):
        assert found(runtime, "spawn", LIBRARIES["process"], "own") == "9"


NATIVE = """
import multiprocessing
from moonpool import Int64

class Square:
    def __call__(self, X: Int64[1]) -> Int64[1]:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.map(square, [X])[0]

def square(x):
    return x * x
"""


@pytest.mark.promise("Models", "Processes that a model starts by fork …")
@pytest.mark.needs("processes")
def test_children_of_a_native_model_import_it_too(runtime: moonpool.Runtime, tmp_path: Path, virtual: Path) -> None:
    file = tmp_path / "square.py"
    file.write_text(NATIVE)
    config = {"parameters": {"EXECUTION_ENV_PATH": {"string_value": str(virtual)}}}
    for name, more in (("ours", {}), ("own", config)):
        with hosted(runtime, name, file, more):
            answer = runtime.infer(name, {"X": np.array([3])}, timeout_s=PATIENCE_S)
            assert answer["OUTPUT0"].tolist() == [9]


# A worker that lives holds the pipe at whose end the tracker of the shared memory cleans up.
MAKES = """
from multiprocessing import shared_memory
block, lock = shared_memory.SharedMemory(create=True, size=100_000), multiprocessing.get_context("spawn").Lock()
worker = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
worker.start()
square.keeps = block, lock, worker
found = f"{block._name} /sem.{lock._semlock.name.lstrip('/')}"
"""
ENDS = {
    "unload": None,
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "exit": "os._exit(3)",
    "crash": "os.abort()",
    "timeout": "signal.pause()",
}


@pytest.mark.promise(
    "Lifecycle",
    "Shared memory and semaphores that a model made with `multiprocessing` are gone after its process, however it "
    "ended.",
)
@pytest.mark.needs("processes")
@pytest.mark.parametrize("prefork", ["no", "imports"])
@pytest.mark.parametrize("end", ENDS)
def test_shared_memory_of_a_model_ends_with_it(
    runtime: moonpool.Runtime, tmp_path: Path, end: str, prefork: str
) -> None:
    if prefork == "imports" and end in ("exit", "crash"):
        pytest.skip("as with the other ends")
    # The tracker of the template must not be that of its forks, which outlive them.
    head = "from multiprocessing import resource_tracker\nresource_tracker.ensure_running()\n"
    limit_s = 5 if end == "timeout" else PATIENCE_S
    config = CONFIG | options(PREFORK=prefork, EXECUTE_TIMEOUT_S=limit_s, RESTART_WINDOW_S=0.001)
    before = shm_names()
    with hosted(runtime, "makes", written(tmp_path / "makes", head + MODEL), config):
        names = {f"/dev/shm{name}" for name in found(runtime, "fork", MAKES, "makes").split()}
        assert names <= shm_names() - before
        code = ENDS[end]
        if code is not None:
            with pytest.raises(moonpool.MoonpoolError):
                found(runtime, "fork", code, "makes")
            wait_until(lambda: not names & shm_names(), PATIENCE_S, "the end of the memory")
    assert not names & shm_names()


# joblib keeps arrays for its workers in files of a folder there.
MAKES_BY_JOBLIB = """
import joblib
square.keeps = parallel = joblib.Parallel(2, max_nbytes=1)
parallel.__enter__()
sizes = parallel(joblib.delayed(len)(np.zeros(1000)) for _ in range(2))
found = " ".join(os.listdir("/dev/shm"))
"""


@pytest.mark.promise("Lifecycle", "Shared memory and semaphores that a model made …")
@pytest.mark.needs("processes")
@pytest.mark.parametrize("end", ["unload", "kill"])
def test_shared_memory_of_joblib_ends_with_the_model(
    runtime: moonpool.Runtime, tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    skip_without("joblib")
    before = shm_names()
    with hosted(runtime, "makes", written(tmp_path / "makes"), CONFIG):
        files = found(runtime, "spawn", MAKES_BY_JOBLIB, "makes").split()
        names = {f"/dev/shm/{file}" for file in files} - before
        assert any("folder" in name for name in names)
        code = ENDS[end]
        if code is not None:
            with pytest.raises(moonpool.StubDied):
                found(runtime, "fork", code, "makes")
            wait_until(lambda: not names & shm_names(), PATIENCE_S, "the end of the memory")
    assert not names & shm_names()
    assert "killing it" not in caplog.text


# Each leaves a pool as a model does that uses it for each request.
KEEPS = {
    "executor": """
square.keeps = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
found = square.keeps.submit(square, 3).result()
""",
    "threads": """
square.keeps = concurrent.futures.ThreadPoolExecutor(1)
square.keeps.submit(signal.pause)
found = 9
""",
    "threads that begin at the end": """
import threading
square.keeps = concurrent.futures.ThreadPoolExecutor(1)
threading._register_atexit(square.keeps.submit, signal.pause)
found = 9
""",
}


@pytest.mark.promise(
    "Lifecycle",
    "A model that keeps a pool of processes or threads ends without waiting for its deadline, as a program does, also "
    "while a thread of it is at work.",
)
@pytest.mark.needs("processes")
@pytest.mark.parametrize("library", KEEPS)
def test_a_pool_that_a_model_keeps_ends_with_it(
    runtime: moonpool.Runtime, tmp_path: Path, library: str, caplog: pytest.LogCaptureFixture
) -> None:
    with hosted(runtime, "keeps", written(tmp_path / "keeps"), CONFIG):
        assert found(runtime, "fork", KEEPS[library], "keeps") == "9"
    assert "killing it" not in caplog.text
