"""What a backend is: seven functions around its models and their instances.

They are those of Triton's TRITONBACKEND API, and are called in this order, each once, except that `execute` comes
once a batch:

    initialize
      model_initialize                for each model version
        model_instance_initialize     for each of its instances
          model_instance_execute *
        model_instance_finalize
      model_finalize
    finalize

Every initialize that returned has its finalize, also where a later step failed. For one instance, or one
model, no two calls run at the same time; for different ones they do.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from moonpool.runtime.config_limits import ConfigLimits
from moonpool.runtime.device_intake import DeviceIntake

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moonpool.runtime.config import ModelConfig
    from moonpool.runtime.config_options import ModelOptions
    from moonpool.runtime.request import Answer, InferenceRequest, Outcome
    from moonpool.runtime.sandbox.confinement import Confinement
    from moonpool.runtime.source import ModelSource


class Model:
    """One version of a model as its backend sees it. `state` is the backend's to use."""

    def __init__(
        self, config: ModelConfig, options: ModelOptions, version: int, source: ModelSource
    ) -> None:
        self.config = config
        self.options = options
        self.version = version
        self.source = source
        # Whether it is asked to complete its configuration.
        self.completes = True
        # The most that the completed configuration may ask for.
        self.limits = ConfigLimits()
        # True if its processes may work in the memory of clients; False once a client has ended one by that.
        self.lends_clients_memory = True
        self.state: Any = None

    @property
    def name(self) -> str:
        return self.config.name

    def __repr__(self) -> str:
        return f"<Model {self.name} version {self.version}>"


class ModelInstance:
    """One instance of a model as its backend sees it. `state` is the backend's to use.

    `kind` is CPU, GPU, MODEL or AUTO and `device_id` the GPU's number, 0 for others.
    """

    def __init__(
        self, backend: Backend, model: Model, name: str, kind: str, device_id: int
    ) -> None:
        self.backend = backend
        self.model = model
        self.name = name
        self.kind = kind
        self.device_id = device_id
        self.state: Any = None
        # Whether the runtime gives it batches; False while it starts, drains or is broken.
        self.accepts = False
        # False once it broke; its finalize then has only to clean up.
        self.is_healthy = True
        self.blocks = backend.blocks
        # Called by the backend, from any thread, when the instance broke while it executed nothing.
        self.report_broken: Callable[[BaseException], None] = _ignored
        # Called by the backend, on the reactor's thread or before its execute returns, with a response of a request
        # for which it answers LATER, None where there is only a flag; and FINAL (1) with the last one.
        self.respond: Callable[[InferenceRequest, Outcome | None, int], None] = _unanswerable
        # What was reported: nobody gives it batches any more. None again before it is restarted.
        self.broken: BaseException | None = None
        # Requests that its present process has executed, and how many make it due for another one.
        self.served = 0
        self.serves_until = math.inf
        self.recycle: Callable[[Callable[[ModelInstance], bool]], bool] = _stays
        # Called by the backend, from any thread: with the memory of a process that holds too much, with the shared memory
        # of a process that was given too much, and with the number of requests that it has executed for others.
        self.report_grown: Callable[[int], None] = _ignored
        self.report_worn: Callable[[int], None] = _ignored
        self.report_served: Callable[[int], None] = _ignored

    def leaves(self, leave_room: Callable[[ModelInstance], bool]) -> bool:
        """Whether it has served long enough and is out of service now. `leave_room` is `WaitingRoom.retire`."""
        return self.served >= self.serves_until and self.recycle(leave_room)

    def execute(self, requests: Sequence[InferenceRequest]) -> Pending | list[Answer]:
        """Hand a batch to the backend."""
        return self.backend.model_instance_execute(self, requests)

    @property
    def confinement(self) -> Confinement | None:
        """How its process is confined; None where it has none, or says nothing of it yet."""
        found: Confinement | None = getattr(self.state, "confinement", None)
        return found

    def __repr__(self) -> str:
        sandbox = f", sandbox {self.confinement}" if self.confinement is not None else ""
        return f"<ModelInstance {self.name} {self.kind} {self.device_id}{sandbox}>"


def _ignored(_: object) -> None:
    """Until somebody listens."""


def _stays(_: object) -> bool:
    return False


def _unanswerable(*_: object) -> None:
    """Until there are requests."""


class Pending(Protocol):
    """An answer that is on its way."""

    def fileno(self) -> int:
        """A descriptor that is readable when `wait` does not block."""

    def wait(self) -> None:
        """Block until the answer is there, or never will be."""

    def is_received(self) -> bool:
        """Whether `wait` took the answer from the descriptor already, which is then not readable again."""

    def finish(self, requests: Sequence[InferenceRequest]) -> list[Answer]:
        """One answer for each request, in order; does not block. Raises what broke the instance."""


class Backend(ABC):
    """Subclass it and write at least `model_instance_execute`.

    The other functions do nothing unless they are written. What they raise fails the load, or is
    logged where something is being ended. `state` is the backend's to use.
    """

    # Whether `model_instance_execute` blocks until the model has run. Such executions of callers
    # that must not block run on threads of the runtime.
    blocks = True

    def __init__(self, name: str = "") -> None:
        self.name = name or type(self).__name__
        self.state: Any = None

    def initialize(self) -> None:  # noqa: B027 - optional
        """Before the first model of this backend."""

    def finalize(self) -> None:  # noqa: B027 - optional
        """After the last model, when the runtime is closed."""

    def model_initialize(self, model: Model) -> None:  # noqa: B027 - optional
        """Prepare a model version; may replace `model.config` by a completed one."""

    def model_finalize(self, model: Model) -> None:  # noqa: B027 - optional
        """After the last instance of the model version has been finalized."""

    def model_instance_initialize(self, instance: ModelInstance) -> None:  # noqa: B027 - optional
        """Make an instance ready to execute. Instances of a model are initialized in parallel."""

    def model_instance_finalize(self, instance: ModelInstance) -> None:  # noqa: B027 - optional
        """End an instance, which executes nothing."""

    @abstractmethod
    def model_instance_execute(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest]
    ) -> Pending | list[Answer]:
        """Run one batch: either the answers in order, or a `Pending` that will have them.

        An answer is a `Response`, an exception, or `LATER`. An exception that is raised fails all requests of
        the batch; `PeerGone` and `RemoteProtocolError` say that the instance is broken and took nothing.
        """

    def device_intake(self, model: Model) -> DeviceIntake:  # noqa: ARG002
        """What is done with inputs that lie on devices; they are copied to ordinary memory unless this says otherwise."""
        return DeviceIntake()

    def cancel(self, instance: ModelInstance, request: InferenceRequest) -> None:  # noqa: B027 - optional
        """Nobody waits any more for a request that the instance executes or has open. Does not block."""

    def began_ns(self, instance: ModelInstance, sent_ns: int) -> int | None:  # noqa: ARG002
        """When the instance began to execute the batch that it was sent at that time.

        None while it is busy with what others have sent it. In nanoseconds of `time.monotonic_ns`.
        """
        return sent_ns

    def model_instance_ready(
        self,
        instance: ModelInstance,  # noqa: ARG002
        answer: Callable[[str | None], object],
    ) -> None:
        """Call `answer` with None if an instance is ready, else with why not; once, on any thread.

        Does not block; the answer may come later. Asked at any time, also while the instance executes.
        """
        answer(None)

    def explain(self, instance: ModelInstance, error: BaseException) -> BaseException:  # noqa: ARG002
        """What to tell callers of an instance that broke; may block for a second."""
        return error

    def abort(self, instance: ModelInstance, reason: BaseException) -> None:  # noqa: B027 - optional
        """The instance takes too long to execute, or to start: break it, so that `explain` says `reason`.

        Does not block.
        """

    def model_abort(self, model: Model, reason: BaseException) -> None:  # noqa: B027 - optional
        """`model_initialize` takes too long: let it raise `reason` soon. Does not block."""

    def withdraw(self, instance: ModelInstance, timeout_s: float) -> bool:  # noqa: ARG002
        """Have others who send batches to an instance past the runtime finish theirs, and send no more.

        Waits for it. False where they have not in time; then they go on.
        """
        return True

    def tidy(self, instance: ModelInstance) -> None:  # noqa: B027 - optional
        """Give back what an instance, idle at the moment, has not needed lately. Does not block."""
