"""What a model asks of the process that hosts it, behind one object.

In a stub it is `stub_host.StubHost`, which asks the runtime. A test of a model in its own process may put another
one in its place with `use`. Where there is none, everything is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.stub.errors import TritonModelException

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping, Sequence
    from typing import Union

    from moonpool.stub.request import InferenceRequest
    from moonpool.stub.response import InferenceResponse
    from moonpool.stub.response_iterator import ResponseIterator

    Answer = Union[InferenceResponse, ResponseIterator]

ONLY_IN_EXECUTE = "BLS is only supported during the 'execute' function."


class Host:
    """Refuses everything with TritonModelException. A subclass says what it offers.

    Any thread may call any method.
    """

    def infer(self, request: InferenceRequest, decoupled: bool) -> Answer:  # noqa: ARG002
        """Run a request on another model, and wait for it."""
        raise TritonModelException(ONLY_IN_EXECUTE)

    def ainfer(self, request: InferenceRequest, decoupled: bool) -> Awaitable[Answer]:  # noqa: ARG002
        """As `infer`, without blocking the running event loop."""
        raise TritonModelException(ONLY_IN_EXECUTE)

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:  # noqa: ARG002
        """Load a model, and return when it is ready. An empty `config` is the one in its directory."""
        raise _no_host(f"load model '{name}'")

    def unload_model(self, name: str, unload_dependents: bool) -> None:  # noqa: ARG002
        """Begin to unload a model."""
        raise _no_host(f"unload model '{name}'")

    def is_model_ready(self, name: str, version: str) -> bool:  # noqa: ARG002
        """Whether a request to this model could run now. An empty `version` is the latest."""
        raise _no_host(f"check the readiness of model '{name}'")

    def new_metric(
        self,
        name: str,
        description: str,  # noqa: ARG002
        kind: int,  # noqa: ARG002
        labels: Mapping[str, str] | None,  # noqa: ARG002
        buckets: Sequence[float] | None,  # noqa: ARG002
    ) -> int:
        """Make a metric, or the family alone where `labels` is None; returns its number.

        The others know it by that. Operations and kinds are numbered as in `ipc.metric_kinds`.
        """
        raise _no_host(f"create metric '{name}'")

    def failure(self, why: str) -> str:
        """How this host words what it refuses."""
        return why

    def change_metric(self, metric: int, operation: int, value: float) -> None:  # noqa: ARG002
        """Change a metric; does not wait until that is done."""
        raise _no_host(f"change metric {metric}")

    def metric_value(self, metric: int) -> float:
        """The value of a metric, with all changes that this process made before."""
        raise _no_host(f"read metric {metric}")

    def drop_metric(self, metric: int) -> None:
        """Nobody refers to the metric any more. Called by finalizers: neither blocks nor takes a lock."""


class _Current:
    host: Host = Host()


def current() -> Host:
    """The host of this process."""
    return _Current.host


def use(host: Host | None) -> None:
    """From now on, models ask `host`; None refuses everything."""
    _Current.host = Host() if host is None else host


def _no_host(what: str) -> TritonModelException:
    return TritonModelException(f"Failed to {what}: no runtime hosts this process.")
