"""One server from its options to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.frontend.http.server import HttpServer
from moonpool.runtime.frontend.pool.directory import Directory
from moonpool.runtime.frontend.pool.front_ends import FrontEnds
from moonpool.runtime.server.assembly import make_service
from moonpool.runtime.server.frontends import grpc_options, http_options
from moonpool.runtime.server.option_sources import BadOption
from moonpool.runtime.server.report import model_table, option_table, remarks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Iterator

    from moonpool.runtime.frontend.grpc.server import GrpcServer
    from moonpool.runtime.progress import Progress
    from moonpool.runtime.server.log_lines import ServerLog
    from moonpool.runtime.server.options import ServerOptions

_log = logging.getLogger("moonpool.server")
# How often a load that is not wanted any more is told so: it may have begun a moment later.
_INSIST_S = 0.2
# For what models do for themselves when no client waits any more.
_LAST_DRAIN_S = 1.0


class StartFailed(MoonpoolError):
    """The server could not be started; the text is all there is to say."""

    code = "UNAVAILABLE"


class Server:
    """Runs once, on the main thread, whose signals it takes. Everything it starts has ended when `run` returns.

    SIGTERM and SIGINT end it in order, a second one at once. SIGHUP polls the repositories, where the mode is `poll`.
    """

    def __init__(self, options: ServerOptions, log: ServerLog, progress: Progress | None) -> None:
        """Check the options and make what serves; nothing listens yet, and no model is loaded.

        Raises `BadOption`, `RepositoryError`.
        """
        _check(options)
        self._options = options
        self._http_options = http_options(options)
        self._grpc_options = grpc_options(options) if options.allow_grpc else None
        directory = Directory() if options.frontends > 1 else None
        self._service = make_service(options, log, progress, directory)
        self._runtime = self._service.runtime
        self._grpc: GrpcServer | None = None
        self._front_ends: FrontEnds | None = None
        if directory is not None:
            self._share(directory, log)
        self._http = HttpServer(self._service, self._http_options)
        self._service.metadata.is_open = False
        # Set by the first signal that ends the server.
        self._ending = asyncio.Event()
        self._woken = asyncio.Event()

    def _share(self, directory: Directory, log: ServerLog) -> None:
        """Let other processes serve at the public ports, and this one what they pass on."""
        # Requests are traced by the process that the settings are in.
        traces = self._service.traces
        directory.pass_on(traces.is_on)
        traces.on_change = directory.pass_on
        directory.traffic = self._service.metrics.frontends
        directory.traffic.count_elsewhere()
        http, grpc = self._http_options, self._grpc_options
        self._front_ends = front_ends = FrontEnds(
            self._options.frontends, directory, http, grpc, log.options
        )
        self._http_options = front_ends.own_http(http)
        self._grpc_options = None if grpc is None else front_ends.own_grpc(grpc)

    async def run(self) -> int:
        """Serve until a signal; the exit code. Raises `StartFailed`."""
        with self._signals():
            try:
                await self._bind()
                if await self._load():
                    await self._open()
                    await self._keep_up()
                return await self._drain()
            finally:
                self._http.close()
                await self._insist(asyncio.to_thread(self._close))

    async def _insist(self, ending: Coroutine[object, object, None]) -> None:
        """Wait for an end, and have loads that it would wait for given up, however late they begin."""
        task = asyncio.ensure_future(ending)
        while not task.done():
            self._service.repository.give_up()
            await asyncio.wait({task}, timeout=_INSIST_S)
        await task

    def _close(self) -> None:
        if self._front_ends is not None:
            self._front_ends.close()
        if self._grpc is not None:
            self._grpc.close()
        self._service.overview.close()
        self._runtime.registry.drain_timeout_s = _LAST_DRAIN_S
        self._runtime.close()
        self._service.traces.close()
        self._service.metrics.close()

    # Start

    async def _bind(self) -> None:
        """Take the ports, so that one that is taken is known before any model is loaded."""
        if self._front_ends is not None:
            self._front_ends.bind()
        await self._http.bind()
        if self._grpc_options is not None:
            from moonpool.runtime.frontend.grpc.server import GrpcServer

            self._grpc = GrpcServer(self._service, self._grpc_options)

    async def _load(self) -> bool:
        """Load what is to be there from the start; False if the server was told to end meanwhile."""
        loading = asyncio.ensure_future(asyncio.to_thread(self._load_models))
        ending = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait({loading, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not loading.done():
            await self._insist(_done(loading))
        are_all_loaded = loading.result()
        if self._ending.is_set():
            return False
        table = model_table(self._runtime.registry.statuses())
        _log.info("%s", table, extra={"is_table": True})
        _log.info("%s", option_table(self._options), extra={"is_table": True})
        if not are_all_loaded and self._options.exit_on_error:
            raise StartFailed("creating server: Internal - failed to load all models")
        return True

    def _load_models(self) -> bool:
        options, control = self._options, self._service.repository
        names = None
        if options.model_control_mode == "explicit" and options.load_model != ("*",):
            names = options.load_model
        return control.load_all(names, tries=1 + options.model_load_retry_count)

    async def _open(self) -> None:
        options, addresses = self._options, self._service.overview.addresses
        self._service.overview.start()
        if self._grpc is not None:
            self._grpc.start()
        await self._http.start()
        ports = await self._public_ports()
        if "grpc" in ports:
            addresses["grpc"] = _place(options.grpc_address, ports["grpc"])
            _log.info("Started GRPCInferenceService at %s", addresses["grpc"])
        if "http" in ports:
            addresses["http"] = _place(options.http_address, ports["http"])
            _log.info("Started HTTPService at %s", addresses["http"])
        if "metrics" in ports:
            addresses["metrics"] = _place(self._http_options.metrics_address, ports["metrics"])
            _log.info("Started Metrics Service at %s", addresses["metrics"])
        for level, text in remarks(options):
            _log.log(level, "%s", text)
        # What is there now stays: no collection looks at it while clients wait.
        gc.collect()
        gc.freeze()
        self._service.metadata.is_open = True
        _log.info("Ready")

    async def _public_ports(self) -> dict[str, int]:
        """What clients can connect to; once others serve there, if it is not this process itself."""
        ports = dict(self._http.ports)
        if self._front_ends is not None:
            await asyncio.to_thread(self._front_ends.start, self._runtime.registry.stubs.reactor)
            return ports | self._front_ends.ports
        if self._grpc is not None:
            ports["grpc"] = self._grpc.port
        return ports

    # Serve

    async def _keep_up(self) -> None:
        """Until the server is told to end, poll when it is time or somebody says so."""
        mode = self._options.model_control_mode
        polls = mode == "poll"
        while not self._ending.is_set():
            # Without a pause, only a signal says when.
            pause_s = (self._options.repository_poll_secs or None) if polls else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), pause_s)
            is_wanted = self._woken.is_set()
            self._woken.clear()
            if self._ending.is_set():
                return
            if polls:
                await self._poll(again=is_wanted)
            else:
                _log.warning("SIGHUP: nothing is polled with --model-control-mode=%s", mode)

    async def _poll(self, *, again: bool) -> None:
        polling = asyncio.ensure_future(
            asyncio.to_thread(self._service.repository.poll, again=again)
        )
        ending = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait({polling, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not polling.done():
            await self._insist(_done(polling))
        polling.result()

    async def _drain(self) -> int:
        """Take nothing new, and finish what is there, if there is time enough; the exit code."""
        timeout_s = self._options.exit_timeout_secs
        _log.info("Waiting for in-flight requests to complete, %d s at most.", timeout_s)
        is_drained = True
        if self._front_ends is not None:
            # First, as what they pass on is answered here.
            is_drained = await asyncio.to_thread(self._front_ends.drain, timeout_s)
        drains: list[Awaitable[bool]] = [self._http.drain(timeout_s)]
        if self._grpc is not None:
            drains.append(asyncio.to_thread(self._grpc.drain, timeout_s))
        if all([is_drained, *await asyncio.gather(*drains)]):
            _log.info("All requests are completed; unloading models.")
            return 0
        _log.error("Exit timeout expired: requests were cut off. Unloading models.")
        return 1

    # Signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        ends = (signal.SIGTERM, signal.SIGINT)
        for number in ends:
            loop.add_signal_handler(number, self._told_to_end, number)
        loop.add_signal_handler(signal.SIGHUP, self._woken.set)
        try:
            yield
        finally:
            for number in (*ends, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _told_to_end(self, number: int) -> None:
        if self._ending.is_set():
            _log.error("Signal (%d) received again. Exiting immediately.", number)
            # The kernel ends the models' processes with this one.
            os._exit(128 + number)
        _log.info("Signal (%d) received.", number)
        self._service.metadata.is_open = False
        self._ending.set()
        self._woken.set()


async def _done(future: asyncio.Future[bool] | asyncio.Future[None]) -> None:
    """When it is done, however."""
    await asyncio.wait({future})


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _check(options: ServerOptions) -> None:
    """Raises `BadOption` for what makes no sense together."""
    if not options.model_repository:
        raise BadOption("there is nothing to serve: name a model repository")
    if not (options.allow_http or options.allow_grpc):
        raise BadOption(
            "there is nothing to serve with: --allow-http and --allow-grpc are both false"
        )
    if "*" in options.load_model and len(options.load_model) > 1:
        raise BadOption("--load-model=* must be the only --load-model")
    if options.model_load_thread_count < 1:
        raise BadOption("--model-load-thread-count must be at least 1")
    if options.frontends < 1:
        raise BadOption("--frontends must be at least 1")
