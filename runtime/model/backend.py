"""A model, its instances and their backend: seven functions that are called around them.

The functions are those of Triton's TRITONBACKEND API. Each is called once, in this order, except that `execute` is
called for every batch:

    initialize
      model_initialize                for each model version
        model_instance_initialize     for each of its instances
          model_instance_execute *
        model_instance_finalize
      model_finalize
    finalize

Every initialize that returned is followed by its finalize, even if a later step failed. For one instance, or one model,
no two calls run at the same time; for different ones they do.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from moonpool.ipc.port import RuntimePort
from moonpool.runtime.model.checksums import Checksums
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import ModelConfig, RateLimits
from moonpool.runtime.model.config.options import HostPolicies, ModelOptions
from moonpool.runtime.model.confinement import Confinement
from moonpool.runtime.model.denials import DenialBook
from moonpool.runtime.model.device_intake import DeviceIntake
from moonpool.runtime.model.request import Answer, InferenceRequest, Outcome
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.process.usage import MemoryAccount


class ModelAccounts:
    """Counts memory of the runtime that all versions of a model take together, those that are being replaced among
    them.
    """

    __slots__ = ("__weakref__", "metrics", "states")

    def __init__(self) -> None:
        # The states of its sequences.
        self.states = MemoryAccount()
        # Its own metrics, in characters.
        self.metrics = MemoryAccount()


class Model:
    """One version of a model as its backend sees it. `state` is the backend's to use."""

    def __init__(self, config: ModelConfig, options: ModelOptions, version: int, source: ModelSource) -> None:
        self.config = config
        self.options = options
        self.version = version
        self.source = source
        # True if the model is asked to complete its configuration.
        self.completes = True
        # The most that the completed configuration may ask for.
        self.limits = ConfigLimits()
        # How to get a response cache for the models of this program.
        self.cache_advice = ""
        # True if no link in its directory may lead its processes out of it.
        self.stays_inside = False
        # Patterns of the variables that its processes do not see at any level: the credentials for the runtime's
        # repositories.
        self.withheld: tuple[str, ...] = ()
        # The processors of each policy that the operator has given.
        self.host_policies: HostPolicies = {}
        # True if its instances wait for resources that they share with other models.
        self.is_rate_limited = False
        # Raises `ConfigError` for a configuration that the operator's rules do not let the model have.
        self.check: Callable[[ModelConfig], None] = _ignored
        # True if its processes may work in the memory of clients; False once a client has ended one by that.
        self.lends_clients_memory = True
        # Set once its load is not wanted any more. What may take longer than the start of a process then ends soon.
        self.given_up = threading.Event()
        # True while its instances are not wanted, and so no template of them either.
        self.is_asleep = False
        # What the sandbox has refused its instances.
        self.denials = DenialBook()
        # All versions of a model have the same ones, once it loads.
        self.accounts = ModelAccounts()
        self._checksums = Checksums(config.checksums, source.model_directory)
        self.state: Any = None

    @property
    def name(self) -> str:
        return self.config.name

    def check_files(self) -> None:
        """Check the digests that the configuration demands, before a process of the model starts. Raises
        `LoadFailed`.
        """
        self._checksums.check(stays_inside=self.stays_inside)

    def __repr__(self) -> str:
        return f"<Model {self.name} version {self.version}>"


class ModelInstance:
    """One instance of a model as its backend sees it. `state` is the backend's to use.

    `kind` is CPU, GPU, MODEL or AUTO and `device_id` the GPU's number, 0 for others.
    """

    def __init__(
        self,
        backend: Backend,
        model: Model,
        name: str,
        kind: str,
        device_id: int,
        rate_limits: RateLimits = RateLimits(),  # noqa: B008 - it is frozen
        host_policy: str = "",
    ) -> None:
        self.backend = backend
        self.model = model
        self.name = name
        self.kind = kind
        self.device_id = device_id
        # What it needs while it executes, where there is a rate limiter.
        self.rate_limits = rate_limits
        # The policy of its group that says on which processors it runs.
        self.host_policy = host_policy
        self.state: Any = None
        # The end of its work channel, which takes usual batches without the backend. None for a backend without one.
        self.port: RuntimePort | None = None
        # True while the runtime gives it batches. False while it starts, drains or is broken.
        self.accepts = False
        # False once it broke. Its finalize then only has to clean up.
        self.is_healthy = True
        self.blocks = backend.blocks
        # The backend calls it, from any thread, when the instance broke while it executed nothing.
        self.report_broken: Callable[[BaseException], None] = _ignored
        # The backend calls it with a response of a request for which it answers LATER, on the reactor's thread or
        # before its execute returns. The outcome is None if there is only a flag. The flags are FINAL (1) with the last
        # response.
        self.respond: Callable[[InferenceRequest, Outcome | None, int], None] = _unanswerable
        # The error that was reported. An instance with one gets no batches. None again before it is restarted.
        self.broken: BaseException | None = None
        # The requests that its present process has executed, and the number after which it gets a new process.
        self.served = 0
        self.serves_until = math.inf
        self.recycle: Callable[[Callable[[ModelInstance], bool]], bool] = _stays
        # The backend calls these from any thread: with the memory of a process that holds too much, and with the shared
        # memory of a process that was given too much.
        self.report_grown: Callable[[int], None] = _ignored
        self.report_worn: Callable[[int], None] = _ignored

    def leaves(self, retire: Callable[[ModelInstance], bool]) -> bool:
        """Return True if it has served long enough and is out of service now. `retire` is that of the scheduler's
        queue.
        """
        return self.served >= self.serves_until and self.recycle(retire)

    @property
    def confinement(self) -> Confinement | None:
        """The confinement of its process, None if it has no process or has not reported it yet."""
        found: Confinement | None = getattr(self.state, "confinement", None)
        return found

    def __repr__(self) -> str:
        sandbox = f", sandbox {self.confinement}" if self.confinement is not None else ""
        return f"<ModelInstance {self.name} {self.kind} {self.device_id}{sandbox}>"


def _ignored(_: object) -> None:
    """Do nothing, until a callback is set."""


def _stays(_: object) -> bool:
    return False


def _unanswerable(*_: object) -> None:
    """Do nothing, until there can be requests."""


class Pending(Protocol):
    """The answer to a batch that an instance executes."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait` does not block."""

    def wait(self) -> None:
        """Block until the answer has come or cannot come any more."""

    def is_received(self) -> bool:
        """Return True if `wait` has taken the answer from the descriptor, which is then not readable again."""

    def finish(self, requests: Sequence[InferenceRequest]) -> list[Answer]:
        """Return one answer for each request, in order. Does not block. Raises the error that broke the instance."""


class Backend(ABC):
    """Base class of backends. A subclass implements at least `model_instance_execute`.

    The other functions do nothing by default. An error of an initialize fails the load; an error of a finalize is
    logged. `state` is the backend's to use.
    """

    # True if `model_instance_execute` blocks until the model has run. If the caller must not block, it then runs on a
    # thread of the runtime.
    blocks = True

    def __init__(self, name: str = "") -> None:
        self.name = name or type(self).__name__
        self.state: Any = None

    def initialize(self) -> None:  # noqa: B027 - optional
        """Prepare the backend, before its first model."""

    def finalize(self) -> None:  # noqa: B027 - optional
        """End the backend, after its last model, when the runtime is closed."""

    def model_initialize(self, model: Model) -> None:  # noqa: B027 - optional
        """Prepare a model version. May replace `model.config` by a completed one."""

    def model_finalize(self, model: Model) -> None:  # noqa: B027 - optional
        """End a model version, after its last instance was finalized."""

    def model_sleep(self, model: Model) -> None:  # noqa: B027 - optional
        """Give up the processes that a model has beside its instances, after these have ended. The model may wake
        again.
        """

    def model_processes(self, model: Model) -> list[int]:  # noqa: ARG002
        """Return the processes that a model has beside its instances."""
        return []

    def model_shared_bytes(self, model: Model) -> int:  # noqa: ARG002
        """Return the size of the shared memory that callers write into for a model."""
        return 0

    def model_wake(self, model: Model) -> None:  # noqa: B027 - optional
        """Take back what `model_sleep` gave up, before the instances start. Raises as `model_initialize`."""

    def model_instance_initialize(self, instance: ModelInstance) -> None:  # noqa: B027 - optional
        """Make an instance ready to execute. Instances of a model are initialized in parallel."""

    def can_sleep(self, instance: ModelInstance) -> bool:  # noqa: ARG002
        """Return True if the model of an instance may free memory while its process stays (`model_instance_sleep`)."""
        return False

    def model_instance_sleep(self, instance: ModelInstance) -> None:  # noqa: B027 - optional
        """Let an instance that executes nothing free memory. Blocks. Raises what goes wrong; then the instance is
        ended.
        """

    def model_instance_wake(self, instance: ModelInstance) -> None:  # noqa: B027 - optional
        """Let an instance take back what it has freed. Blocks. Raises what goes wrong; then the instance is started
        anew.
        """

    def model_instance_finalize(self, instance: ModelInstance) -> None:  # noqa: B027 - optional
        """End an instance, which executes nothing."""

    @abstractmethod
    def model_instance_execute(
        self, instance: ModelInstance, requests: Sequence[InferenceRequest]
    ) -> Pending | list[Answer]:
        """Run one batch. Returns the answers in order, or a `Pending` that will have them.

        An answer is a `Response`, an exception, or `LATER`. An exception that is raised fails all requests of
        the batch; `PeerGone` and `RemoteProtocolError` mean that the instance is broken and took nothing.
        """

    def device_intake(self, model: Model) -> DeviceIntake:  # noqa: ARG002
        """Return the intake of inputs that lie on devices. The default copies them to ordinary memory."""
        return DeviceIntake()

    def cancel(self, instance: ModelInstance, request: InferenceRequest) -> None:  # noqa: B027 - optional
        """Note that nobody waits any more for a request that the instance executes or has open. Does not block."""

    def model_instance_ready(
        self,
        instance: ModelInstance,  # noqa: ARG002
        answer: Callable[[str | None], object],
    ) -> None:
        """Call `answer` once, on any thread, with None if the instance is ready, else with the reason.

        Does not block; the answer may come later. May be called at any time, also while the instance executes.
        """
        answer(None)

    def explain(self, instance: ModelInstance, error: BaseException) -> BaseException:  # noqa: ARG002
        """Return the error for callers of an instance that broke. May block for a second."""
        return error

    def abort(self, instance: ModelInstance, reason: BaseException) -> None:  # noqa: B027 - optional
        """Break an instance that takes too long to execute or to start, so that `explain` returns `reason`.

        Does not block.
        """

    def model_abort(self, model: Model, reason: BaseException) -> None:  # noqa: B027 - optional
        """Let `model_initialize`, which takes too long, raise `reason` soon. Does not block."""

    def tidy(self, instance: ModelInstance) -> None:  # noqa: B027 - optional
        """Give back memory that an instance, idle at the moment, has not needed lately. Does not block."""
