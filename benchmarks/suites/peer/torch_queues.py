"""torch.multiprocessing: queues of tensors, whose memory is shared by descriptor."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from moonpool.benchmarks.suites.peer.peer import Floats, Peer, Unavailable
from moonpool.benchmarks.suites.peer.standard_library import end_queues


class TorchQueues(Peer):
    """Two queues of torch.multiprocessing."""

    def __init__(self) -> None:
        try:
            self._torch: ModuleType = importlib.import_module("torch")
        except ImportError as error:
            raise Unavailable(f"{error}; pip install torch") from error
        processes = importlib.import_module("torch.multiprocessing").get_context("spawn")
        self._asked, self._answered = processes.Queue(), processes.Queue()
        self._process = processes.Process(target=serve, args=(self._asked, self._answered))
        self._process.start()

    def call(self, a: Floats, b: Floats) -> tuple[Floats, Floats]:
        from_numpy = self._torch.from_numpy
        self._asked.put((from_numpy(a), from_numpy(b)))
        total, difference = self._answered.get()
        return total.numpy(), difference.numpy()

    def close(self) -> None:
        end_queues(self._process, self._asked, self._answered)


def serve(asked: Any, answered: Any) -> None:
    """Serve in the other process, with one thread there, too: pools of threads do not help with four floats."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    while (inputs := asked.get()) is not None:
        a, b = inputs
        answered.put((a + b, a - b))
    # The answers' memory goes with this process. The caller has read it by now.
