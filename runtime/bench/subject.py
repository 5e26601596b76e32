"""What is measured: a model, reached one way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from moonpool.runtime.bench.callers import measure, measure_async
from moonpool.runtime.bench.digests import of_configuration
from moonpool.runtime.bench.load import Concurrency, Load
from moonpool.runtime.bench.split import between

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from moonpool.runtime.bench.window import Window
    from moonpool.runtime.runtime import Runtime


class Subject(Protocol):
    """For one thread."""

    # Where it is: an address, or a few words.
    where: str

    def window(self, load: Load, seconds: float) -> Window:
        """Press for so long, with what the subject itself counted meanwhile."""

    def configuration_fields(self) -> dict[str, str] | None:
        """Return the digests of `digests.of_configuration` for the model; None if its configuration is unknown."""


class InProcess:
    """A model in this process's runtime, called from threads or from tasks of an event loop."""

    def __init__(
        self,
        runtime: Runtime,
        model: str,
        inputs: Mapping[str, NDArray[np.generic]],
        *,
        is_async: bool,
        timeout_s: float,
    ) -> None:
        self.where = f"in process, {'asyncio' if is_async else 'threads'}"
        self._runtime = runtime
        self._model = model
        self._inputs = inputs
        self._is_async = is_async
        self._timeout_s = timeout_s

    def window(self, load: Load, seconds: float) -> Window:
        if not isinstance(load, Concurrency):
            raise ValueError("callers in this process ask again when they were answered")
        before = self._runtime.statistics(self._model)
        if self._is_async:
            import asyncio

            found = asyncio.run(measure_async(self._acall, load.callers, seconds))
        else:
            found = measure(self.call, load.callers, seconds)
        found.split = between(before, self._runtime.statistics(self._model))
        return found

    def configuration_fields(self) -> dict[str, str]:
        return of_configuration(self._runtime.config(self._model).raw)

    def call(self) -> object:
        """One request."""
        return self._runtime.infer(self._model, self._inputs, timeout_s=self._timeout_s)

    async def _acall(self) -> object:
        return await self._runtime.ainfer(self._model, self._inputs, timeout_s=self._timeout_s)
