"""torch.multiprocessing with tensors on a GPU: the tensor goes over a queue, one as large comes back."""

from __future__ import annotations

import importlib
from typing import Any

from moonpool.benchmarks.suites.peer.peer import Unavailable
from moonpool.benchmarks.suites.peer.standard_library import end_queues

# The other process imports torch and makes its context first.
_TIMEOUT_S = 40.0


class TorchDeviceQueues:
    """Queues to a process that made its answers beforehand, so nothing is computed or copied."""

    def __init__(self, ordinal: int, sizes: list[int]) -> None:
        """Raises Unavailable."""
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise Unavailable(f"{error}; pip install torch") from error
        if not self._torch.cuda.is_available():
            raise Unavailable("this torch sees no GPU")
        processes = importlib.import_module("torch.multiprocessing").get_context("spawn")
        self._asked, self._answered = processes.Queue(), processes.Queue()
        self._tensors = {size: _bytes(self._torch, ordinal, size) for size in sizes}
        arguments = (self._asked, self._answered, ordinal, sizes)
        self._process = processes.Process(target=serve, args=arguments)
        self._process.start()

    def call(self, size: int) -> None:
        """Send a tensor of so many bytes, and receive one."""
        self._asked.put(self._tensors[size])
        self._answered.get(timeout=_TIMEOUT_S)

    def close(self) -> None:
        """End the other process."""
        end_queues(self._process, self._asked, self._answered)


def serve(asked: Any, answered: Any, ordinal: int, sizes: list[int]) -> None:
    """Serve in the other process."""
    torch: Any = importlib.import_module("torch")
    answers = {size: _bytes(torch, ordinal, size) for size in sizes}
    while (tensor := asked.get()) is not None:
        answered.put(answers[tensor.numel()])
        # Given back to its owner before the next one comes.
        del tensor


def _bytes(torch: Any, ordinal: int, size: int) -> Any:
    return torch.ones(size, dtype=torch.uint8, device=f"cuda:{ordinal}")
