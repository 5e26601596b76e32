"""HTTP in a front end: inference here where that can be, everything else at the main process."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.frontend.http.inference import InferCall, Inference
from moonpool.runtime.frontend.http.routes import Routes
from moonpool.runtime.frontend.http.server import HttpServer
from moonpool.runtime.frontend.pool.relay import Relay

if TYPE_CHECKING:
    from moonpool.runtime.frontend.http.exchange import Exchange
    from moonpool.runtime.frontend.http.inference import InferTarget
    from moonpool.runtime.frontend.http.options import HttpOptions
    from moonpool.runtime.frontend.pool.front_service import FrontService
    from moonpool.runtime.frontend.pool.guest import GuestModel
    from moonpool.runtime.frontend.pool.guest_models import GuestModels
    from moonpool.runtime.regions import CallerMemory

# Letters of it may be escaped, which no library does that writes JSON.
_SHARED = re.compile(rb"shared_memory_region|\\u00[4-7]")


class FrontInference(Inference):
    """The route for inference, with models whose stubs belong to another process."""

    def __init__(self, relay: Relay, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._relay = relay

    def handle(self, exchange: Exchange, target: InferTarget) -> None:
        model = self._model(target)
        if model is None or self._may_name_shared_memory(exchange, target):
            self._relay.handle(exchange)
        else:
            InferCall(self, exchange, target, model).begin()

    def _model(self, target: InferTarget) -> GuestModel | None:
        models: GuestModels = self.service.models  # type: ignore[assignment]
        try:
            model = models.find(target.model, target.version)
        except MoonpoolError:
            return None
        return None if model.model.config.decoupled else model

    @staticmethod
    def _may_name_shared_memory(exchange: Exchange, target: InferTarget) -> bool:
        """Clients register their memory with the main process. What is compressed nobody can tell."""
        if target.encoding != "identity":
            return True
        body = exchange.body
        length = len(body) if target.header_length is None else target.header_length
        return _SHARED.search(body, 0, length) is not None

    def caller_memory(self, target: InferTarget) -> CallerMemory | None:
        model = self._model(target)
        return None if model is None else model.memory


class FrontHttpServer(HttpServer):
    """Listens beside other processes, at the port of all."""

    def __init__(self, service: FrontService, options: HttpOptions, upstream: str) -> None:
        """`upstream` is the socket at which the main process listens."""
        super().__init__(service, options)
        self._upstream = upstream
        self._relay: Relay | None = None

    def make_routes(self) -> Routes:
        loop, options = asyncio.get_running_loop(), self._options
        relay = self._relay = Relay(loop, self._upstream)
        return Routes(
            FrontInference(relay, self._service, loop, self._executor, options.limits),
            relay,
            *self.guards(),
        )

    def close(self) -> None:
        super().close()
        if self._relay is not None:
            self._relay.close()
