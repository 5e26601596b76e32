"""The gRPC server: its port, its handlers, its beginning and its end.

Theory of operation. `GrpcServer` makes all threads of gRPC except for the one of each relayed stream, and ends them in the opposite
order. `drain` ends the core and with it the polling thread, after which no handler is called. Then the pools for other RPCs end, and
last `GrpcInference`, which has the thread of `answers`: until then an execution of a cancelled request may still need it. `turn` is
the lock that the polling thread and that thread share (`grpc.answers`).
"""

from __future__ import annotations

import threading

from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.server.grpc.call import Method
from moonpool.runtime.server.grpc.control import GrpcControl
from moonpool.runtime.server.grpc.core import GrpcCore
from moonpool.runtime.server.grpc.inference import GrpcInference
from moonpool.runtime.server.grpc.methods import methods
from moonpool.runtime.server.grpc.options import GrpcOptions
from moonpool.runtime.server.grpc.stream import Streams
from moonpool.runtime.server.service import Service

# Each RPC except for inference and health has a thread while it is answered. RPCs that wait for models have a pool of their own.
_CONTROL_THREADS = 4
_PATIENT_THREADS = 16


class GrpcServer:
    """Serves a service over gRPC from `start` to `close`. Its methods may be called from any thread."""

    def __init__(self, service: Service, options: GrpcOptions) -> None:
        """Take the port. Raises `MoonpoolError` if it is taken, or a file for TLS cannot be read."""
        self._quick = TaskPool(_CONTROL_THREADS, "moonpool-grpc-control")
        self._slow = TaskPool(_PATIENT_THREADS, "moonpool-grpc-patient")
        self._control = GrpcControl(service)
        turn = threading.Lock()
        self._inference = self.make_inference(service, turn, options)
        self._streams = Streams(self._inference, options)
        try:
            meter = service.metrics.frontends.grpc
            answers = self._inference.answers
            self._core = GrpcCore(self.methods(), options, turn, answers, meter)
        except BaseException:
            self._end_threads()
            raise

    def make_inference(
        self, service: Service, turn: threading.Lock, options: GrpcOptions
    ) -> GrpcInference:
        """Return the part that answers requests for inference."""
        return GrpcInference(service, turn, options)

    def methods(self) -> dict[bytes, Method]:
        """Return all methods by their paths."""
        return methods(self._control, self._inference, self._streams, self._quick, self._slow)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._core.port

    def start(self) -> None:
        """Accept calls from now on."""
        self._core.start()

    def drain(self, timeout_s: float) -> bool:
        """Accept no more calls, finish those in flight, and cancel those that are not finished in time.

        Returns whether all were finished.
        """
        self._control.is_draining = True
        return self._core.stop(timeout_s)

    def close(self) -> None:
        """End at once. May be called many times, and before `start` and after `drain`."""
        self.drain(0)
        self._end_threads()

    def _end_threads(self) -> None:
        self._quick.shutdown()
        # A load goes on until it is done, and the runtime waits for it, too.
        self._slow.shutdown(cancel_futures=True)
        self._inference.close()
