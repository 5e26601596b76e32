"""The life of one server, from its options to its exit code.

Theory of operation. The event loop of the main thread starts and ends everything, and serves HTTP and gRPC. Signals
become two events in it, `_ending` and `_woken`. Everything that blocks (loads, polls, closing) runs in threads, while
the loop waits for them and for a signal at the same time.

Order of the start: `_bind` takes the ports, so that a port that is taken is an error before minutes of loading. `_load`
loads the models. `_open` begins to listen, so no client connects before the models are loaded.

Order of the end: the first signal makes the server not ready (`is_open`). `_drain` drains HTTP and gRPC together,
within the exit timeout. `_close` ends the samples of the page, which use the runtime, then the runtime with its models,
and last the traces and metrics, to which ending models may still add.

A load may take minutes, and a server that ends must not wait for it. `give_up` has loads in flight fail soon, but a
thread may begin another one a moment after that. So `_insist` repeats it until the thing it waits for has ended. A
second signal ends the process at once, and the kernel ends the models' processes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import InvalidRequest, OutOfThreads
from moonpool.runtime.hosting.progress import Progress
from moonpool.runtime.log import RuntimeLog, flush
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.options import HostPolicies, by_pattern, read_host_policies
from moonpool.runtime.observe.metrics_options import MetricsOptions, metrics_options
from moonpool.runtime.process.threads import TaskPool
from moonpool.runtime.repository.grants import as_flag
from moonpool.runtime.residency.policy import Resident
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.server.capture import Capture
from moonpool.runtime.server.clients import AllClients
from moonpool.runtime.server.http.options import HttpOptions
from moonpool.runtime.server.http.server import HttpServer
from moonpool.runtime.server.listening import connections
from moonpool.runtime.server.log import LogControl, ServerLog
from moonpool.runtime.server.metadata import Metadata
from moonpool.runtime.server.openai.routes import OpenAIEndpoints
from moonpool.runtime.server.options.protocols import cache_bytes, grpc_options, http_options, trace_flags
from moonpool.runtime.server.options.sources import BadOption
from moonpool.runtime.server.options.table import ServerOptions
from moonpool.runtime.server.report import model_table, no_such_models, not_all_loaded, not_ready, option_table, remarks
from moonpool.runtime.server.repository_control import RepositoryControl
from moonpool.runtime.server.service import Service
from moonpool.runtime.server.setting_values import BadSetting
from moonpool.runtime.server.shared_memory import SystemSharedMemory
from moonpool.runtime.server.tracing.settings import trace_options
from moonpool.runtime.server.tracing.traces import Traces

if TYPE_CHECKING:
    from moonpool.runtime.server.grpc.options import GrpcOptions
    from moonpool.runtime.server.grpc.server import GrpcServer


_log = RuntimeLog("moonpool.server")
# The pause between two calls that have loads given up: one may have begun a moment after the last call.
_INSIST_S = 0.2
# The pause between two looks at a server that is not ready yet.
_LOOK_S = 0.5
# The time for requests among models when no client waits any more.
_LAST_DRAIN_S = 1.0
# For loads or polls, and for the end, which may begin meanwhile.
_THREADS = 4
P = ParamSpec("P")
R = TypeVar("R")


class StartFailed(MoonpoolError):
    """The server could not be started. The text says why."""

    code = "UNAVAILABLE"


class Server:
    """Runs once, on the main thread, and handles its signals. Everything that it has started has ended when `run`
    returns.

    SIGTERM and SIGINT end it in order, a second one at once. In the mode `poll`, SIGHUP polls the repositories.
    """

    def __init__(self, options: ServerOptions, log: ServerLog, progress: Progress | None) -> None:
        """Check the options, and make the service and its protocols. Nothing listens yet, and no model is loaded.

        Raises `BadOption`, `RepositoryError`.
        """
        _check(options)
        self._options = options
        self._http_options = http_options(options)
        self._grpc_options = grpc_options(options) if options.allow_grpc else None
        _check_ports(self._http_options, self._grpc_options)
        self._service = make_service(options, log, progress)
        self._runtime = self._service.runtime
        self._together = AllClients(connections(options).together)
        self._grpc: GrpcServer | None = None
        self._http = HttpServer(self._service, self._http_options, OpenAIEndpoints, self._together)
        self._service.metadata.is_open = False
        # Set by the first signal to end the server.
        self._ending = asyncio.Event()
        self._woken = asyncio.Event()
        self._threads = TaskPool(_THREADS, "moonpool-server")
        # Logs `Ready`, and ends.
        self._becoming_ready: asyncio.Future[None] | None = None

    async def run(self) -> int:
        """Serve until a signal comes, and return the exit code. Raises `StartFailed`."""
        with self._signals():
            try:
                await self._bind()
                if await self._load():
                    await self._open()
                    await self._keep_up()
                return await self._drain()
            finally:
                if self._becoming_ready is not None:
                    self._becoming_ready.cancel()
                self._http.close()
                if self._grpc is not None:
                    self._grpc.close()
                await self._insist(self._closed())
                self._threads.shutdown()

    async def _apart(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a function that blocks on another thread. Raises `OutOfThreads`."""
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def _insist(self, ending: Awaitable[R]) -> R:
        """Wait for what may wait for loads, and have these given up, however late they begin."""
        task = asyncio.ensure_future(ending)
        while not task.done():
            self._service.repository.give_up()
            await asyncio.wait({task}, timeout=_INSIST_S)
        return await task

    async def _unless_ending(self, loading: Coroutine[object, object, R]) -> R:
        """Wait for loads, which are given up if a signal comes meanwhile."""
        task = asyncio.ensure_future(loading)
        ending = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait({task, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        return await self._insist(task)

    async def _closed(self) -> None:
        try:
            await self._apart(self._close)
        except OutOfThreads:  # it must end all the same; a load can no longer be given up meanwhile
            self._close()

    def _close(self) -> None:
        self._service.overview.close()
        self._runtime._models.drain_timeout_s = _LAST_DRAIN_S
        self._runtime.close()
        if self._service.capture is not None:
            self._service.capture.close()
        self._service.traces.close()
        self._service.metrics.close()

    # Start

    async def _bind(self) -> None:
        """Take the ports before any model is loaded."""
        await self._http.bind()
        if self._grpc_options is not None:
            from moonpool.runtime.server.grpc import MissingHttp2
            from moonpool.runtime.server.grpc.server import GrpcServer

            try:
                self._grpc = GrpcServer(self._service, self._grpc_options, self._together)
            except MissingHttp2 as error:
                raise StartFailed(f"{error}; or serve HTTP alone (--allow-grpc=false)") from error
            await self._grpc.bind()

    async def _load(self) -> bool:
        """Load the models for the start; False if a signal came meanwhile."""
        are_all_loaded = await self._unless_ending(self._apart(self._load_models))
        if self._ending.is_set():
            return False
        table = model_table(self._runtime._models.statuses())
        _log.info("%s", table, extra={"is_table": True})
        _log.info("%s", option_table(self._options), extra={"is_table": True})
        if not are_all_loaded and self._options.exit_on_error:
            there = {*self._runtime._models.repositories.listing().names, "*"}
            missing = [name for name in self._options.load_model if name not in there]
            text = no_such_models(missing) if missing else ""
            raise StartFailed(text or not_all_loaded(self._options, self._runtime._models.statuses()))
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
            await self._grpc.start()
        await self._http.start()
        ports = self._http.ports
        if self._grpc is not None:
            addresses["grpc"] = _place(options.grpc_address, self._grpc.port)
            _log.info("Started GRPCInferenceService at %s", addresses["grpc"])
        if "http" in ports:
            addresses["http"] = _place(options.http_address, ports["http"])
            _log.info("Started HTTPService at %s", addresses["http"])
        if "openai" in ports:
            addresses["openai"] = _place(self._http_options.openai_address, ports["openai"])
            _log.info("Started OpenAI Service at %s", addresses["openai"])
        if "metrics" in ports:
            addresses["metrics"] = _place(self._http_options.metrics_address, ports["metrics"])
            _log.info("Started Metrics Service at %s", addresses["metrics"])
        for level, text in remarks(options):
            _log.log(level, "%s", text)
        # All these objects stay until the end. Frozen, they cost no collection any time while clients wait.
        gc.collect()
        gc.freeze()
        self._service.metadata.is_open = True
        self._becoming_ready = asyncio.ensure_future(self._log_ready())

    async def _log_ready(self) -> None:
        """Log `Ready` as soon as clients that ask get this answer, too."""
        metadata = self._service.metadata
        if missing := metadata.missing():
            _log.warning("%s", not_ready(missing))
        while not metadata.is_ready():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _LOOK_S)
                return
        _log.info("Ready")

    # Serve

    async def _keep_up(self) -> None:
        """Wait for a signal to end, and poll the repositories meanwhile, in time and on SIGHUP."""
        mode = self._options.model_control_mode
        polls = mode == "poll"
        while not self._ending.is_set():
            # With a pause of 0, only SIGHUP polls.
            pause_s = (self._options.repository_poll_secs or None) if polls else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), pause_s)
            is_wanted = self._woken.is_set()
            self._woken.clear()
            if self._ending.is_set():
                return
            if polls:
                await self._unless_ending(self._apart(self._service.repository.poll, again=is_wanted))
            else:
                _log.warning("SIGHUP: nothing is polled with --model-control-mode=%s", mode)

    async def _drain(self) -> int:
        """Take no new requests, wait for those in flight, and return the exit code."""
        timeout_s = self._options.exit_timeout_secs
        _log.info("Waiting for in-flight requests to complete, %d s at most.", timeout_s)
        drains: list[Awaitable[bool]] = [self._http.drain(timeout_s)]
        if self._grpc is not None:
            drains.append(self._grpc.drain(timeout_s))
        if all(await asyncio.gather(*drains)):
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
            loop.add_signal_handler(number, self._on_signal, number)
        handled = [*ends]
        # Under nohup, the signal means that a terminal was closed, and is ignored.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._woken.set)
            handled.append(signal.SIGHUP)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self._ending.is_set():
            _log.error("Signal (%d) received again. Exiting immediately.", number)
            flush()
            # The kernel kills the stubs with this process.
            os._exit(128 + number)
        _log.info("Signal (%d) received.", number)
        self._service.metadata.is_open = False
        self._ending.set()
        self._woken.set()


def _place(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _check(options: ServerOptions) -> None:
    """Raise `BadOption` for options that make no sense together."""
    if not options.model_repository:
        raise BadOption("there is nothing to serve: name a model repository")
    if not (options.allow_http or options.allow_grpc or options.openai_port is not None):
        raise BadOption("there is nothing to serve with: --allow-http and --allow-grpc are both false")
    if options.openai_port is not None and not options.allow_openai:
        raise BadOption("--openai-port serves nothing with --allow-openai=false")
    # The words of the next two are Triton's.
    if options.load_model and options.model_control_mode != "explicit":
        raise BadOption("Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as well.")
    if "*" in options.load_model and len(options.load_model) > 1:
        raise BadOption("Wildcard model name '*' must be the ONLY startup model if specified at all.")
    if options.model_load_thread_count < 1:
        raise BadOption("--model-load-thread-count must be at least 1")
    limits = {
        "--resident-models": options.resident_models,
        "--resident-memory": options.resident_memory,
        "--resident-gpu-memory": options.resident_gpu_memory,
    }
    for flag, value in limits.items():
        if value is not None and options.model_control_mode != "demand":
            raise BadOption(f"{flag} needs --model-control-mode=demand")


def _check_ports(http: HttpOptions, grpc: GrpcOptions | None) -> None:
    """Raise `BadOption` if two protocols have one port. The kernel would say so only after the models are loaded."""
    wanted = {
        "--http-port": (http.address, http.port),
        "--openai-port": (http.openai_address, http.openai_port),
        "--metrics-port": (http.metrics_address, http.metrics_port),
        "--grpc-port": (grpc.address, grpc.port) if grpc is not None else ("", None),
    }
    flags: dict[tuple[str, int], str] = {}
    for flag, (address, port) in wanted.items():
        if port and (other := flags.setdefault((address, port), flag)) != flag:
            raise BadOption(f"{other} and {flag} are both {port}; give one of them another port")


def config_limits(texts: Iterable[str]) -> ConfigLimits:
    """Read the limits of `--model-config-limit`. Raises `BadOption`."""
    try:
        return ConfigLimits().raised(texts)
    except ValueError as error:
        raise BadOption(f"--model-config-limit {error}") from error


def _host_policies(texts: Iterable[str]) -> HostPolicies:
    """Read the processors of `--host-policy`. Raises `BadOption`."""
    try:
        return read_host_policies(texts)
    except ValueError as error:
        raise BadOption(f"--host-policy {error}") from error


# The time that requests have when a model is unloaded while the server goes on.
_DRAIN_S = 30.0


def _capture(options: ServerOptions) -> Capture | None:
    """Begin to capture requests, if that is wanted. Raises `BadOption`."""
    if not options.capture:
        return None
    try:
        return Capture(options.capture, rate=options.capture_rate, most_bytes=options.capture_byte_size)
    except FileExistsError as error:
        raise BadOption(f"--capture: {options.capture} exists already: name a new file") from error
    except OSError as error:
        raise BadOption(f"--capture: {options.capture}: {error.strerror}") from error


def _resident(options: ServerOptions) -> Resident | None:
    """Return the limits of models that are loaded on demand; None if they are loaded at the start."""
    if options.model_control_mode != "demand":
        return None
    return Resident(options.resident_models, options.resident_memory, options.resident_gpu_memory)


def _make_runtime(
    options: ServerOptions, progress: Progress | None, metrics: MetricsOptions, limits: ConfigLimits
) -> Runtime:
    """Make the runtime of a server, without models. Raises `BadOption`, `RepositoryError`."""
    runtime = Runtime(
        options.model_repository,
        models=(),
        backend_directory=options.backend_directory or None,
        drain_timeout_s=max(_DRAIN_S, options.exit_timeout_secs),
        verbose=options.log_verbose > 0,
        listener=progress,
        metrics=metrics,
        sandbox=options.sandbox or None,
        sandbox_grants=options.sandbox_grants,
        model_options=by_pattern(options.model_option),
        response_cache_bytes=cache_bytes(options),
        spares=options.spares,
        rate_limit=options.rate_limit_resource if options.rate_limit else None,
        resident=_resident(options),
    )
    registry = runtime._models
    registry.repositories.config_name = options.model_config_name
    registry.rules = replace(
        registry.rules,
        completes=not options.disable_auto_complete_config,
        grant_form=as_flag,
        cache_advice="start the server with --cache-config=local,size=BYTES",
        limits=limits,
        host_policies=_host_policies(options.host_policy),
    )
    return runtime


def make_service(options: ServerOptions, log: ServerLog, progress: Progress | None) -> Service:
    """Make a service whose runtime has no model yet. The caller closes both.

    Raises `BadOption`, `RepositoryError`.
    """
    try:
        traces = trace_options(trace_flags(options))
        metrics = metrics_options(
            options.metrics_config,
            allow_cpu=options.allow_cpu_metrics,
            allow_gpu=options.allow_gpu_metrics,
            interval_ms=options.metrics_interval_ms,
        )
        limits = config_limits(options.model_config_limit)
    except (BadSetting, InvalidRequest) as error:
        raise BadOption(str(error)) from error
    runtime = _make_runtime(options, progress, metrics, limits)
    registry = runtime._models
    try:
        return Service(
            runtime,
            shared_memory=SystemSharedMemory(is_enabled=options.allow_client_shm),
            metadata=Metadata(runtime, server_id=options.id, strict_readiness=options.strict_readiness),
            repository=RepositoryControl(
                runtime, mode=options.model_control_mode, load_threads=options.model_load_thread_count
            ),
            traces=Traces(traces, lambda name: bool(registry.versions(name))),
            logs=LogControl(registry.stubs.change_log, log),
            capture=_capture(options),
        )
    except BaseException:
        runtime.close()
        raise
