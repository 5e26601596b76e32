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
        raise self.refusal(f"load model '{name}'")

    def unload_model(self, name: str, unload_dependents: bool) -> None:  # noqa: ARG002
        """Begin to unload a model."""
        raise self.refusal(f"unload model '{name}'")

    def is_model_ready(self, name: str, version: str) -> bool:  # noqa: ARG002
        """Whether a request to this model could run now. An empty `version` is the latest."""
        raise self.refusal(f"check the readiness of model '{name}'")

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
        raise self.refusal(f"create metric '{name}'")

    def failure(self, why: str) -> str:
        """How this host words what it refuses."""
        return why

    def refusal(self, doing: str) -> TritonModelException:
        """What this host says where it offers nothing of the kind."""
        return TritonModelException(f"Failed to {doing}: no runtime hosts this process.")

    def change_metric(self, metric: int, operation: int, value: float) -> None:  # noqa: ARG002
        """Change a metric; does not wait until that is done."""
        raise self.refusal(f"change metric {metric}")

    def metric_value(self, metric: int) -> float:
        """The value of a metric, with all changes that this process made before."""
        raise self.refusal(f"read metric {metric}")

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
