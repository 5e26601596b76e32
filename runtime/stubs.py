"""The stubs of one runtime that are alive, and what they share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moonpool.ipc.messages import Kind
from moonpool.runtime.audience import Audience
from moonpool.runtime.limits.watcher import Watcher
from moonpool.runtime.metrics import MetricRegistry
from moonpool.runtime.own_metrics import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moonpool.runtime.log_settings import LogSettings
    from moonpool.runtime.model_registry import ModelRegistry
    from moonpool.runtime.reactor import Reactor
    from moonpool.runtime.stub_handle import StubHandle

# The reactor's callbacks do not block.
_SOON_S = 5.0


class Stubs:
    """Any thread may call any method."""

    def __init__(
        self,
        reactor: Reactor,
        models: ModelRegistry,
        log: LogSettings,
        audience: Audience | None = None,
    ) -> None:
        """`models` are those that the models in the stubs may ask."""
        self.models = models
        # Who else sends batches to the stubs.
        self.audience = audience or Audience()
        self.reactor = reactor
        self.metrics = MetricRegistry(KINDS)
        # A stub that is started takes those of this moment.
        self.log = log
        self.watcher = Watcher()
        self._log_changing = threading.Lock()
        self._alive: set[StubHandle] = set()

    def add(self, stub: StubHandle) -> None:
        """A stub that was started."""
        self._alive.add(stub)

    def remove(self, stub: StubHandle) -> None:
        """A stub that has been given up."""
        self._alive.discard(stub)

    def is_beyond_control(self) -> bool:
        """True if neither clients nor models may load a model."""
        return not self.models.is_controllable

    def change_log(self, changes: Mapping[str, object]) -> LogSettings:
        """Change settings, in the stubs as well, and return all of them. Raises `InvalidRequest`."""
        with self._log_changing:
            changed = self.log.changed(changes)
            before, self.log = self.log, changed
            if changed.levels != before.levels:
                for stub in self._alive.copy():
                    stub.tell(Kind.LOGGING, *changed.levels)
            return changed

    def catch_up(self) -> None:
        """Take in what the stubs, and the others who send them batches, have told until now."""
        if self.reactor.is_here:
            self._catch_up()
            return
        done = threading.Event()

        def act() -> None:
            self._catch_up()
            done.set()

        self.reactor.call_soon(act)
        done.wait(_SOON_S)
        self.take_in_counts()

    def take_in_counts(self) -> None:
        """Add to the statistics of models what others have counted who send batches to their stubs."""
        if self.audience.is_there:
            outcomes = {hosted.model: hosted.scheduler.outcomes for hosted in self.models.served()}
            self.audience.catch_up(outcomes.get)

    def _catch_up(self) -> None:
        for stub in self._alive.copy():
            stub.catch_up()
