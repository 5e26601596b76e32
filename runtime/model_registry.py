"""The models and backends of one runtime, by name."""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.backends import Backends
from moonpool.runtime.errors import LoadFailed, ModelNotFound, ModelUnavailable, RuntimeClosed
from moonpool.runtime.hosted_model import HostedModel
from moonpool.runtime.instance_metrics import instance_families
from moonpool.runtime.loaded_model import LoadedModel
from moonpool.runtime.loading import HostingRules, prepare
from moonpool.runtime.log_settings import LogSettings
from moonpool.runtime.metrics_options import MetricsOptions
from moonpool.runtime.model_metrics import model_families
from moonpool.runtime.model_statuses import ModelStatus, ModelStatuses
from moonpool.runtime.moves import Moves
from moonpool.runtime.parallel import in_parallel
from moonpool.runtime.python_backend import PythonBackend
from moonpool.runtime.reactor import Reactor
from moonpool.runtime.recent_errors import RecentErrors
from moonpool.runtime.stubs import Stubs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from moonpool.runtime.audience import Audience
    from moonpool.runtime.backend import Backend, Model
    from moonpool.runtime.exposition import Family
    from moonpool.runtime.loading import Wanted
    from moonpool.runtime.python_based import BackendDirectory
    from moonpool.runtime.repositories import ModelRepositories

_log = logging.getLogger("moonpool")
# How long a model that was replaced takes requests still.
_GRACE_S = 1.0
# How often a closing runtime looks for loads that have begun meanwhile.
_STILL_S = 0.2


class ModelRegistry:
    """Loads and unloads, one at a time for each name. Thread-safe."""

    def __init__(
        self,
        repositories: ModelRepositories | None,
        backends: Iterable[Backend],
        python_based: BackendDirectory,
        drain_timeout_s: float,
        verbose: bool,
        listener: Callable[[str, str, str], object] | None,
        metrics: MetricsOptions | None = None,
        audience: Audience | None = None,
    ) -> None:
        self.repositories = repositories
        # How long a model that is to be unloaded may take for the requests that it has.
        self.drain_timeout_s = drain_timeout_s
        self._listener = listener
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._models: dict[str, LoadedModel] = {}
        self._latest: dict[str, HostedModel] = {}
        self._statuses = ModelStatuses()
        self._moves = Moves(self._changed)
        # To be unloaded as soon as they do not move any more.
        self._leaving: set[str] = set()
        # Replaced, and not unloaded yet.
        self._retiring = 0
        # Each with the model that asked for it, if one did.
        self._loading: list[tuple[HostedModel, str | None]] = []
        # Whether models, and clients of a server, may load and unload.
        self.is_controllable = True
        self.rules = HostingRules()
        self._closed = False
        self._closing, self._ended = threading.Event(), threading.Event()
        self._disowned = False
        self.errors = RecentErrors()
        self.metrics_options = metrics or MetricsOptions()
        self._reactor = Reactor()
        self._executor = ThreadPoolExecutor(32, "moonpool-execute")
        log = LogSettings(log_verbose_level=int(verbose))
        stubs = self.stubs = Stubs(self._reactor, self, log, audience)
        self.backends = Backends(
            backends, python_based, lambda name, folder: PythonBackend(stubs, name, folder)
        )

    # Load

    def load(self, wanted: Wanted, asker: str | None = None, *, again: bool = True) -> None:
        """Load a model, or replace a loaded one; does nothing where what is wanted is loaded already.

        What is replaced serves until the new one is ready; then it finishes its requests in the background.
        `asker` is the model whose stub waits for this. Without `again`, what failed before is not tried a
        second time as long as it is the same. Raises what `prepare` raises, `LoadFailed` and its like,
        `ModelUnavailable` where this load would wait for itself, `RuntimeClosed`.
        """
        name = wanted.name
        with self._moves.of(name, asker), self.errors.noting(name):
            self._check_open()
            status = ModelStatus()
            try:
                replaced = self._replace(wanted, asker, status, again=again)
            except MoonpoolError as error:
                status.failure = error
                self._statuses.note(name, status)
                raise
        if replaced is not None:
            self._retire(name, replaced)

    def _replace(
        self, wanted: Wanted, asker: str | None, status: ModelStatus, *, again: bool
    ) -> LoadedModel | None:
        """Load what is wanted, unless it is there; what it replaced, if anything."""
        name = wanted.name
        prepared = prepare(wanted, self.repositories, self.backends.locate, self.rules)
        status.stamp = prepared.stamp
        before = self._models.get(name)
        if (before is not None and before.is_what(prepared, at_least_once=not again)) or (
            not again and self._statuses.failed(name, prepared.stamp)
        ):
            prepared.discard()
            return None
        self._statuses.note(name, status)
        try:
            versions = self._load_versions(prepared.models, asker, status)
        except BaseException:
            prepared.discard()
            raise
        loaded = LoadedModel(versions, prepared, status)
        with self._lock:
            self._models[name] = loaded
            self._latest[name] = loaded.latest
            self.stubs.audience.serve(name, [hosted.model for hosted in versions])
        return before

    def _retire(self, name: str, replaced: LoadedModel) -> None:
        """Unload what nobody finds any more."""

        def act() -> None:
            # Callers that found it a moment ago may have yet to send their requests.
            self._closing.wait(_GRACE_S)
            try:
                replaced.unload(self.drain_timeout_s)
            finally:
                with self._lock:
                    self._retiring -= 1
                    self._changed.notify_all()

        with self._lock:
            self._retiring += 1
        _apart(act, f"moonpool-retire-{name}")

    def _load_versions(
        self, models: Sequence[Model], asker: str | None, status: ModelStatus
    ) -> list[HostedModel]:
        loaded: list[HostedModel] = []
        try:
            for model in models:
                backend = self.backends.of(model.config)
                self.backends.initialize(backend)
                hosted = HostedModel(backend, model, self.stubs, self._executor, self._tell)
                loading = (hosted, asker)
                self._loading.append(loading)
                version = status.add(hosted)
                try:
                    hosted.load()
                except MoonpoolError as error:
                    version.failure = error
                    raise
                finally:
                    self._loading.remove(loading)
                loaded.append(hosted)
        except BaseException as error:
            if isinstance(error, LoadFailed):
                error.version = model.version
            for hosted in loaded:
                hosted.unload(0.0)
            raise
        return loaded

    def give_up_loading(self) -> None:
        """Somebody who waits for loads on other threads has had enough: let them fail soon."""
        for hosted, _ in list(self._loading):
            hosted.give_up_loading()

    def _wait_until_still(self) -> None:
        """Until nothing is loaded or unloaded any more. What models asked for is not waited for."""
        is_still = False
        while not is_still:
            for hosted, asker in list(self._loading):
                if asker is not None:
                    hosted.give_up_loading()
            with self._lock:
                is_still = self._changed.wait_for(lambda: not self._moves.names, _STILL_S)

    def _tell(self, subject: str, state: str, because: str) -> None:
        _log.debug("%s is %s: %s", subject, state, because)
        if self._listener is not None:
            try:
                self._listener(subject, state, because)
            except Exception:
                _log.exception("the listener failed")

    # Unload

    def unload(self, name: str) -> None:
        """Drain and finalize all versions. Raises `ModelNotFound`."""
        with self._moves.of(name):
            with self._lock:
                loaded = self._take(name)
            if loaded is None:
                raise ModelNotFound(f"model '{name}' is not loaded")
            loaded.unload(self.drain_timeout_s)

    def begin_unload(self, name: str) -> None:
        """Unload in the background; from now on nobody finds the model.

        One that is just being loaded is unloaded after that. Nothing happens where there is no such model.
        """
        with self._lock:
            if name in self._leaving:
                return
            if name in self._moves.names:
                if self._start(name, lambda: self._unload_if_there(name)):
                    self._leaving.add(name)
                return
            loaded = self._take(name)
            if loaded is None:
                return
            taken = loaded
            self._moves.begin(name)
            if not self._start(name, lambda: self._finish(name, taken)):
                self._models[name], self._latest[name] = taken, taken.latest
                self._moves.end(name)

    def _take(self, name: str) -> LoadedModel | None:
        """The lock is held. What is to be unloaded now; a load that failed does not count any more."""
        self._leaving.discard(name)
        self._latest.pop(name, None)
        loaded = self._models.pop(name, None)
        self.stubs.audience.serve(name, ())
        if loaded is None:
            self._statuses.give_up(name)
        else:
            self._statuses.note(name, loaded.status)
        return loaded

    def _finish(self, name: str, loaded: LoadedModel) -> None:
        try:
            loaded.unload(self.drain_timeout_s)
        finally:
            with self._lock:
                self._moves.end(name)

    @staticmethod
    def _start(name: str, act: Callable[[], None]) -> bool:
        """On a thread of its own, if there can be any more: else the program ends, and unloads all."""
        try:
            threading.Thread(target=act, name=f"moonpool-{name}").start()
        except RuntimeError:
            return False
        return True

    # Look

    def names(self) -> dict[str, list[int]]:
        """The names of the loaded models, each with its versions."""
        with self._lock:
            return {name: sorted(loaded.versions) for name, loaded in self._models.items()}

    def versions(self, name: str) -> dict[int, HostedModel]:
        """The versions of a loaded model, ascending; none of one that is not."""
        loaded = self._models.get(name)
        return {} if loaded is None else dict(sorted(loaded.versions.items()))

    def check_controllable(self) -> None:
        """Raises `ModelUnavailable` where neither models nor clients may load and unload."""
        if not self.is_controllable:
            raise ModelUnavailable(
                "explicit model load / unload is not allowed if polling is enabled"
            )

    def statuses(self) -> dict[str, ModelStatus]:
        """What has become of every model that was to be loaded, by name."""
        with self._lock:
            loaded = {name: loaded.status for name, loaded in self._models.items()}
            return {**self._statuses.all(), **loaded}

    def find(self, name: str, version: int | None = None) -> HostedModel:
        """A model version, the latest by default. Raises `ModelNotFound`, `ModelUnavailable`."""
        hosted = self._latest.get(name)
        if hosted is not None and (version is None or hosted.model.version == version):
            return hosted
        loaded = self._models.get(name)
        if loaded is not None and version in loaded.versions:
            return loaded.versions[version]
        self._check_open()
        if loaded is not None:
            raise ModelNotFound(
                f"Request for unknown model: '{name}' version {version} is not found"
            )
        if name in self._moves.names:
            raise ModelUnavailable(f"Request for model '{name}' which is loading or unloading")
        why = "has no available versions" if self._statuses.has_versions(name) else "is not found"
        raise ModelNotFound(f"Request for unknown model: '{name}' {why}")

    def served(self) -> list[HostedModel]:
        """All versions of all loaded models."""
        with self._lock:
            return [h for loaded in self._models.values() for h in loaded.versions.values()]

    def metric_families(self) -> list[Family]:
        """The metrics of all models and those that the models made."""
        self._check_open()
        self.stubs.catch_up()
        served, own = self.served(), self.stubs.metrics.families()
        return [*model_families(served, self.metrics_options), *instance_families(served), *own]

    # End

    def close(self) -> None:
        """Unload everything, also what is being loaded, and finalize the backends.

        A second call returns when the first has done so.
        """
        if self._disowned:
            return
        with self._lock:
            first = not self._closed
            self._closed = True
        if not first:
            self._ended.wait()
            return
        self._closing.set()
        try:
            self._wait_until_still()
            names = list(self._models)
            try:
                in_parallel(self._unload_if_there, names, "moonpool-unload")
            finally:
                self._finalize_all()
        finally:
            # Also where a signal handler raised: those who wait are not to wait for ever.
            self._ended.set()

    def close_soon(self) -> None:
        """Close on a thread of its own. For a finalizer, which must not wait and not take a lock."""
        if not self._closed:
            self._reactor.call_soon(self._close_apart)

    def _close_apart(self) -> None:
        with contextlib.suppress(RuntimeError):  # no more threads: the program ends, and closes all
            threading.Thread(target=self.close, name="moonpool-close").start()

    def _finalize_all(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: not self._moves.names and not self._retiring)
        self.backends.finalize_all()
        self._executor.shutdown()
        self._reactor.close()

    def _unload_if_there(self, name: str) -> None:
        with contextlib.suppress(ModelNotFound):  # somebody else unloads it
            self.unload(name)

    def disown(self) -> None:
        """This is a fork of the process that the models belong to: forget them."""
        # They may have been held in the moment of the fork, by threads that are not here.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = True
        self._models, self._latest, self._moves = {}, {}, Moves(self._changed)
        self._disowned = True

    @property
    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            if self._disowned:
                raise RuntimeClosed(
                    "the runtime belongs to the process that made it, not its forks"
                )
            raise RuntimeClosed("the runtime was closed; make another")


def _apart(act: Callable[[], None], name: str) -> None:
    """On a thread of its own; on this one where the program is on its way out and starts no more."""
    try:
        threading.Thread(target=act, name=name).start()
    except RuntimeError:
        act()
