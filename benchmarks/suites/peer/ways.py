"""The ways that need no program of their own: numpy here, moonpool, Triton over HTTP, a pool, a pipe, and queues."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import moonpool
from moonpool.benchmarks.hosts.kserve import TritonHost
from moonpool.benchmarks.suites.hosted import MODELS, folders_of
from moonpool.benchmarks.suites.peer.peer import Floats, Peer, Unavailable, rate_of_threads

# Never fork: this process has threads.
_processes = multiprocessing.get_context("spawn")
# The other process imports torch and makes its context first.
_TIMEOUT_S = 40.0


class Here(Peer):
    """numpy in this process: the work itself."""

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        return add_sub(a, b)


def add_sub(a: Any, b: Any) -> tuple[Any, Any]:
    """The work, for arrays and for tensors of torch."""
    return a + b, a - b


class Moonpool(Peer):
    """`infer` with ordinary arrays, and the same `model.py` that Triton gets."""

    def __init__(self) -> None:
        self._runtime = moonpool.Runtime()
        self._runtime.load("add_sub", MODELS / "add_sub")

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        outputs = self._runtime.infer("add_sub", {"INPUT0": a, "INPUT1": b})
        return outputs["OUTPUT0"], outputs["OUTPUT1"]

    def rate(self, callers: int, total: int) -> float:
        return rate_of_threads(self, callers, total)

    def close(self) -> None:
        self._runtime.close()


class MoonpoolInPlace(Moonpool):
    """`infer` with arrays in shared memory from `empty`, so that nothing is copied on the way in."""

    def inputs(self, elements: int) -> tuple[Floats, Floats]:
        a = self._runtime.empty("add_sub", "INPUT0", (1, elements))
        b = self._runtime.empty("add_sub", "INPUT1", (1, elements))
        a[:], b[:] = 1, 2
        return a, b


class TritonHttp(Peer):
    """tritonclient.http with binary tensors; every calling thread has a connection of its own."""

    def __init__(self) -> None:
        try:
            self._http: Any = importlib.import_module("tritonclient.http")
        except (ImportError, RuntimeError) as error:  # RuntimeError: it is installed without HTTP
            raise Unavailable(f"{error}; pip install tritonclient[http]") from error
        self._clients = threading.local()
        models = folders_of(("add_sub",))
        self._server = TritonHost(Path(sys.executable), models, ("--pinned-memory-pool-byte-size=0",))

    def _client(self) -> Any:
        client = getattr(self._clients, "client", None)
        if client is None:
            client = self._clients.client = self._http.InferenceServerClient(
                f"127.0.0.1:{self._server.http_port}", network_timeout=600.0
            )
        return client

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        inputs = []
        for name, array in (("INPUT0", a), ("INPUT1", b)):
            tensor = self._http.InferInput(name, array.shape, "FP32")
            tensor.set_data_from_numpy(array)
            inputs.append(tensor)
        answer = self._client().infer("add_sub", inputs)
        return answer.as_numpy("OUTPUT0"), answer.as_numpy("OUTPUT1")

    def rate(self, callers: int, total: int) -> float:
        return rate_of_threads(self, callers, total)

    def leave(self) -> None:
        client = getattr(self._clients, "client", None)
        if client is not None:
            client.close()
            del self._clients.client

    def close(self) -> None:
        # The server waits long for connections that are still open.
        self.leave()
        self._server.close()


class Pool(Peer):
    """concurrent.futures.ProcessPoolExecutor with one worker, which pickles."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, _processes)

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        return self._pool.submit(add_sub, a, b).result()

    def rate(self, callers: int, total: int) -> float:
        return rate_of_threads(self, callers, total)

    def close(self) -> None:
        self._pool.shutdown()


class Pipe(Peer):
    """multiprocessing.Pipe, which pickles."""

    def __init__(self) -> None:
        self._ours, theirs = _processes.Pipe()
        self._process = _processes.Process(target=serve_pipe, args=(theirs,))
        self._process.start()
        theirs.close()

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        self._ours.send((a, b))
        answer: tuple[Floats, Floats] = self._ours.recv()
        return answer

    def close(self) -> None:
        self._ours.send(None)
        self._process.join()
        self._process.close()
        self._ours.close()


def serve_pipe(pipe: Connection) -> None:
    """Serve in the other process."""
    while (inputs := pipe.recv()) is not None:
        pipe.send(add_sub(*inputs))


class OverQueues:
    """Two queues to another process, which answers what it gets until it gets None."""

    def __init__(self, processes: Any, serve: Any, *arguments: object) -> None:
        """Start `serve` with the queues and the arguments in a process of this context."""
        self._asked, self._answered = processes.Queue(), processes.Queue()
        self._process = processes.Process(target=serve, args=(self._asked, self._answered, *arguments))
        self._process.start()

    def ask(self, question: object) -> Any:
        """Send something, and wait for the answer."""
        self._asked.put(question)
        return self._answered.get(timeout=_TIMEOUT_S)

    def close(self) -> None:
        """End the other process, and close both queues."""
        self._asked.put(None)
        self._process.join()
        self._process.close()
        for queue in (self._asked, self._answered):
            queue.close()
            queue.join_thread()


class Queues(Peer):
    """Two multiprocessing.Queue, which pickle."""

    def __init__(self) -> None:
        self._queues = OverQueues(_processes, serve_queues)

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        answer: tuple[Floats, Floats] = self._queues.ask((a, b))
        return answer

    def close(self) -> None:
        self._queues.close()


class TorchQueues(Queues):
    """Two queues of torch.multiprocessing: of tensors, whose memory is shared by descriptor."""

    def __init__(self) -> None:
        self._torch, processes = torch_and_its_processes()
        self._queues = OverQueues(processes, serve_queues, "torch")

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        from_numpy = self._torch.from_numpy
        total, difference = self._queues.ask((from_numpy(a), from_numpy(b)))
        return total.numpy(), difference.numpy()


def serve_queues(asked: Any, answered: Any, library: str = "") -> None:
    """Serve in the other process. Torch has one thread there, too: pools of threads do not help with four floats."""
    if library:
        importlib.import_module(library).set_num_threads(1)
    while (inputs := asked.get()) is not None:
        answered.put(add_sub(*inputs))


def torch_and_its_processes() -> tuple[Any, Any]:
    """Return torch, and its context of multiprocessing. Raises Unavailable."""
    try:
        return importlib.import_module("torch"), importlib.import_module("torch.multiprocessing").get_context("spawn")
    except ImportError as error:
        raise Unavailable(f"{error}; pip install torch") from error


class TorchDeviceQueues:
    """Queues with tensors on a GPU, to a process that made its answers beforehand: nothing is computed or copied."""

    def __init__(self, ordinal: int, sizes: list[int]) -> None:
        """Raises Unavailable."""
        torch, processes = torch_and_its_processes()
        if not torch.cuda.is_available():
            raise Unavailable("this torch sees no GPU")
        self._tensors = {size: _bytes(torch, ordinal, size) for size in sizes}
        self._queues = OverQueues(processes, serve_device_tensors, ordinal, sizes)

    def call(self, size: int) -> None:
        """Send a tensor of so many bytes, and receive one."""
        self._queues.ask(self._tensors[size])

    def close(self) -> None:
        """End the other process."""
        self._queues.close()


def serve_device_tensors(asked: Any, answered: Any, ordinal: int, sizes: list[int]) -> None:
    """Serve in the other process."""
    torch: Any = importlib.import_module("torch")
    answers = {size: _bytes(torch, ordinal, size) for size in sizes}
    while (tensor := asked.get()) is not None:
        answered.put(answers[tensor.numel()])
        # Given back to its owner before the next one comes.
        del tensor


def _bytes(torch: Any, ordinal: int, size: int) -> Any:
    return torch.ones(size, dtype=torch.uint8, device=f"cuda:{ordinal}")
