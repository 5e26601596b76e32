"""The gRPC server: its port, its handlers, its beginning and its end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from moonpool.runtime.frontend.grpc.control import Control
from moonpool.runtime.frontend.grpc.core import GrpcCore
from moonpool.runtime.frontend.grpc.inference import Inference
from moonpool.runtime.frontend.grpc.methods import methods

if TYPE_CHECKING:
    from moonpool.runtime.frontend.grpc.methods import Method
    from moonpool.runtime.frontend.grpc.options import GrpcOptions
    from moonpool.runtime.frontend.service import Service

# Each RPC but inference and health has a thread while it is answered; those that wait for models have their own.
_CONTROL_THREADS = 4
_PATIENT_THREADS = 16


class GrpcServer:
    """Serves a service over gRPC from `start` to `close`. Its methods may be called from any thread."""

    def __init__(self, service: Service, options: GrpcOptions) -> None:
        """Take the port. Raises `MoonpoolError` where it is taken, or a file of TLS cannot be read."""
        self._quick = ThreadPoolExecutor(_CONTROL_THREADS, "moonpool-grpc-control")
        self._slow = ThreadPoolExecutor(_PATIENT_THREADS, "moonpool-grpc-patient")
        self._control = Control(service)
        turn = threading.Lock()
        self._inference = self.make_inference(service, turn, options)
        try:
            meter = service.metrics.frontends.grpc
            answers = self._inference.answers
            self._core = GrpcCore(self.methods(), options, turn, answers, meter)
        except BaseException:
            self._end_threads()
            raise

    def make_inference(
        self, service: Service, turn: threading.Lock, options: GrpcOptions
    ) -> Inference:
        """Who answers requests for inference."""
        return Inference(service, turn, options)

    def methods(self) -> dict[bytes, Method]:
        """Who answers what."""
        return methods(self._control, self._inference, self._quick, self._slow)

    @property
    def port(self) -> int:
        """Where it listens, also where any port was asked for."""
        return self._core.port

    def start(self) -> None:
        """Answer from now on."""
        self._core.start()

    def drain(self, timeout_s: float) -> bool:
        """Take nothing new, and finish what there is; what is not finished in time is cancelled.

        Returns whether all was finished.
        """
        self._control.is_draining = True
        return self._core.stop(timeout_s)

    def close(self) -> None:
        """End at once. May be called many times, also before `start` and after `drain`."""
        self.drain(0)
        self._end_threads()

    def _end_threads(self) -> None:
        self._quick.shutdown()
        # A load goes on until it is done, whoever asked for it; the runtime waits for it, too.
        self._slow.shutdown(cancel_futures=True)
        self._inference.close()
