"""What a stub has from the template that it was forked from: the model, and what that asked of its host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.stub import host
from moonpool.stub.errors import TritonModelException
from moonpool.stub.host import Host
from moonpool.stub.loader import LoadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Callable

    from moonpool.stub.model import Model


class TemplateHost(Host):
    """The host of a model in a template: it keeps in mind what is done to metrics, for each fork to do it."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._metrics = 0

    def new_metric(
        self,
        name: str,
        description: str,
        kind: int,
        labels: Mapping[str, str] | None,
        buckets: Sequence[float] | None,
    ) -> int:
        self._calls.append(("new_metric", (name, description, kind, labels, buckets)))
        # As the runtime numbers those of a stub.
        self._metrics += 1
        return self._metrics

    def change_metric(self, metric: int, operation: int, value: float) -> None:
        self._calls.append(("change_metric", (metric, operation, value)))

    def drop_metric(self, metric: int) -> None:
        self._calls.append(("drop_metric", (metric,)))

    def refusal(self, doing: str) -> TritonModelException:
        return TritonModelException(
            f"Failed to {doing}: a template process has no runtime to ask; set MOONPOOL_PREFORK to "
            "imports, or to no."
        )

    def repeat(self, other: Host) -> None:
        """Do the same to another host. Raises TritonModelException."""
        for method, arguments in self._calls:
            do: Callable[..., object] = getattr(other, method)
            do(*arguments)


class Inherited:
    """A model of which a template has imported the class and, perhaps, called `initialize`."""

    def __init__(
        self, model: Model, asked: TemplateHost, allow_threads: Callable[[], object]
    ) -> None:
        self.model = model
        self._asked = asked
        self._allow_threads = allow_threads

    def catch_up(self) -> None:
        """In a fork: let libraries have threads, and ask its host for what the template's was asked.

        Raises `LoadError`.
        """
        self._allow_threads()
        try:
            self._asked.repeat(host.current())
        except TritonModelException as error:
            raise LoadError("initialize", str(error)) from error
