"""The models and backends of one runtime, by name: load, replace, unload, find, close.

Theory of operation.

*One at a time for each name.* A thread that loads or unloads a model holds its model lock, for as long as that takes
(`model_locks`).

*Who finds what.* `_models` and `_latest` change under `_lock`, together. `find` reads them without it, as it is part of
every request and one look into a dict is atomic. A model is taken out of both before it is unloaded, so new requests do
not find it. Callers that found it just before may still submit: a model that was replaced takes requests for another
second, and one that is being unloaded refuses them in its scheduler.

*Replacing.* The new versions load while the old ones serve. When all are ready, the table changes, and a thread unloads
the old ones (`_retire`). If the new ones differ from the old ones in nothing that their processes depend on, the old
ones stay and are updated (`_update`): what comes is ready before anything goes. Without a thread, when the program is
on its way out, the thread that loads does so itself.

*Unloads that nobody waits for.* `begin_unload` takes the model out of the table and acquires its model lock in one hold
of `_lock`, and leaves the rest to a thread. If another thread holds the model lock, the new one waits for it, and
`_leaving` keeps a second thread from being started. If no thread can be started, the model goes back into the table.

*Order of closing.* From `_closed` on no load begins. Loads that are on their way are waited for. Those that models
asked for are given up, as the models that wait for them are to be unloaded, and so are builds of environments, which
may take an hour. Then all models are unloaded in parallel, replaced ones are waited for, the backends are finalized,
and at last the threads and the reactor end. A second `close` waits for the first. A finalizer must not wait and not
take a lock, so `close_soon` hands the work to the reactor, and that to a thread.

*Who waits for a load.* A caller on whose thread signal handlers run has another thread load (`load_patiently`). If a
handler raises, that load is broken off, again and again, since a start that has just begun has nothing yet to break off
(`LoadAttempt`). Loads of other callers go on.

*Who waits for a close or an unload.* The work has a thread of its own, where no signal handler runs, so nothing is left
half done. The caller waits for that thread (`_patiently`). If it waits for long, the log says for what. If a signal
handler raises in it, as after Ctrl-C, all models that are loading or unloading end at once, and the handler's exception
is raised after that.

*Fork.* In a fork of the process, locks may be held for ever, by threads that do not exist there. `disown` replaces
them, and forgets the models: their stubs belong to the parent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.errors import LoadFailed, ModelNotFound, ModelUnavailable, NotGranted, OutOfThreads, RuntimeClosed
from moonpool.runtime.hosting.backends import BackendDirectory, Backends
from moonpool.runtime.hosting.collect import cache_families, instance_families, model_families, start_families
from moonpool.runtime.hosting.ensembles import CheckName, EnsembleBook, HostedEnsemble
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.hosting.model_control import ModelControl
from moonpool.runtime.hosting.model_locks import LoadAttempt, ModelLocks
from moonpool.runtime.hosting.model_statuses import LoadedVersions, LoadFailure, ModelStatus, ModelStatuses
from moonpool.runtime.hosting.python_backend import PythonBackend
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.backend import Backend, Model
from moonpool.runtime.model.config.live import with_count
from moonpool.runtime.model.config.model import ModelConfig, name_problem
from moonpool.runtime.observe.exposition import ExposedFamily
from moonpool.runtime.observe.log_settings import LogSettings
from moonpool.runtime.observe.metrics_options import MetricsOptions
from moonpool.runtime.process.parallel import in_parallel
from moonpool.runtime.process.reactor import Reactor
from moonpool.runtime.process.threads import TaskPool, is_interruptible, start_thread
from moonpool.runtime.repository.loading import HostingRules, PreparedModel, Wanted, prepare
from moonpool.runtime.repository.repository import ModelRepositories, RepositoryError
from moonpool.runtime.residency.policy import Resident
from moonpool.runtime.residency.residents import Residency
from moonpool.runtime.schedule.callers import Deliveries
from moonpool.runtime.schedule.rate_limiter import RateLimiter
from moonpool.runtime.schedule.response_cache import ResponseCache
from moonpool.runtime.stubs.handle import Stubs

_log = RuntimeLog("moonpool")
# The time for which a model that was replaced still takes requests.
_GRACE_S = 1.0
# The time between two looks of a closing runtime for loads that have begun meanwhile.
_STILL_S = 0.2
_TAKES_LONG = "%s takes its time: %s. Ctrl-C ends it at once."


def _anything(_: str) -> None:
    """Let everything be loaded and unloaded."""


def _nothing(_: ModelRegistry) -> None:
    """Do nothing at the end of a close."""


class ModelRegistry:
    """Loads, finds and unloads models, one load or unload at a time for each name. Thread-safe."""

    def __init__(
        self,
        repositories: ModelRepositories,
        backends: Iterable[Backend],
        python_based: BackendDirectory,
        drain_timeout_s: float,
        verbose: bool,
        listener: Callable[[str, str, str], object] | None,
        metrics: MetricsOptions | None = None,
        resident: Resident | None = None,
    ) -> None:
        """With `resident`, models are loaded when requests come."""
        self.repositories = repositories
        # The time that a model which is to be unloaded has to finish its requests.
        self.drain_timeout_s = drain_timeout_s
        self._listener = listener
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._models: dict[str, LoadedVersions] = {}
        self._ensembles = EnsembleBook(self, self._models, self._lock)
        self._latest: dict[str, HostedModel] = {}
        self._statuses = ModelStatuses()
        self._locks = ModelLocks(self._changed)
        # Models that a thread will unload as soon as it gets their model locks.
        self._leaving: set[str] = set()
        # All that is alive, for a close.
        self._hosted: weakref.WeakSet[HostedModel] = weakref.WeakSet()
        # The number of replaced models that are not unloaded yet.
        self._retiring = 0
        # Versions that load now, each with the name of the model that asked for it, if one did.
        self._loading: list[tuple[HostedModel, str | None]] = []
        self._attempts: set[LoadAttempt] = set()
        # The error for models and clients of a server that load and unload; empty if they may.
        self.refuses_control = ""
        self.rules = HostingRules()
        # The options that the program gave in loads, by model, for all later loads of that name.
        self._said: dict[str, Mapping[str, str]] = {}
        # None if no responses are kept, and None if instances execute without limits.
        self.cache: ResponseCache | None = None
        self.limiter: RateLimiter | None = None
        self._closed = self._disowned = False
        self._closing, self._ended = threading.Event(), threading.Event()
        self.on_end: Callable[[ModelRegistry], object] = _nothing
        self.metrics_options = metrics or MetricsOptions()
        self._reactor = Reactor()
        self._executor = TaskPool(32, "moonpool-execute")
        self.deliveries = Deliveries(self._reactor)
        self.residency = Residency(self._reactor, self._locks, self._is_used, resident)
        log = LogSettings(log_verbose_level=int(verbose))
        stubs = self.stubs = Stubs(self._reactor, log, partial(ModelControl, self))
        self.errors = stubs.errors
        self.backends = Backends(backends, python_based, lambda name, folder: PythonBackend(stubs, name, folder))

    # Load

    def load(
        self,
        wanted: Wanted,
        asker: str | None = None,
        *,
        may: CheckName = _anything,
        again: bool = True,
        is_implied: bool = False,
        attempt: LoadAttempt | None = None,
    ) -> None:
        """Load a model, or replace a loaded one. Does nothing if what is wanted is loaded already.

        A model that is replaced serves until the new one is ready; then it finishes its requests in the background.
        `asker` is the model whose stub waits for this. `may` raises for each model that is not to be loaded with this
        one, or to follow it, though nobody has named it. Without `again`, a model that failed before is not tried a
        second time until it changes. `is_implied`: it is loaded for an ensemble alone. Raises what `prepare` raises,
        `LoadFailed` and other errors of the load, `ModelUnavailable` if this load would wait for itself,
        `RuntimeClosed`.
        """
        name = wanted.name
        # Before it is noted under that name.
        if problem := name_problem(name):
            raise RepositoryError(problem)
        with self._locks.hold(name, asker, attempt), self.errors.noting(name):
            self._check_open()
            status = ModelStatus()
            try:
                unload = self._replace(wanted, asker, status, may, again=again)
            except MoonpoolError as error:
                status.failure = LoadFailure.of(error)
                self._statuses.note(name, status)
                raise
            self._ensembles.note_load(name, is_implied=is_implied)
        if unload is not None:
            self._retire(name, unload)
        self._ensembles.follow(name, asker)

    def _replace(
        self, wanted: Wanted, asker: str | None, status: ModelStatus, may: CheckName, *, again: bool
    ) -> Callable[[float], None] | None:
        """Load what is wanted, unless it is loaded. Returns the unload of what it replaced, if anything."""
        name = wanted.name
        if wanted.said is not None:
            self._said[name] = wanted.said
        wanted = dataclasses.replace(wanted, said=self._said.get(name))
        prepared = prepare(wanted, self.repositories, self.backends.locate, self.rules)
        status.stamp = prepared.stamp
        before = self._models.get(name)
        if (before is not None and before.is_what(prepared, at_least_once=not again)) or (
            not again and self._statuses.failed(name, prepared.stamp)
        ):
            prepared.discard()
            return None
        try:
            # Ensembles follow what changes below them.
            for each in [] if before is None else self._ensembles.above([name]):
                may(each)
        except BaseException:
            prepared.discard()
            raise
        if before is not None and before.may_become(prepared):
            self._statuses.note(name, status)
            try:
                return self._update(before, wanted, prepared, asker, status)
            finally:
                prepared.discard()
        try:
            if prepared.models[0].config.ensemble is not None:
                self._ensembles.prepare(prepared.models, may)
            self._statuses.note(name, status)
            versions = self._load_versions(prepared.models, asker, status)
        except BaseException:
            prepared.discard()
            raise
        loaded = LoadedVersions(versions, wanted, prepared, status)
        try:
            with self._lock:
                self._put(name, loaded)
        except MoonpoolError:
            loaded.unload(0.0)
            raise
        return None if before is None else before.unload

    def _update(
        self, before: LoadedVersions, wanted: Wanted, prepared: PreparedModel, asker: str | None, status: ModelStatus
    ) -> Callable[[float], None] | None:
        """Make loaded versions what was prepared, while they serve. Returns the unload of versions that are to go.

        Versions and instances that come are ready before anything goes. If one of them fails, nothing has changed.
        """
        models = {model.version: model for model in prepared.models}
        staying = [hosted for version, hosted in before.versions.items() if version in models]
        coming = [model for model in prepared.models if model.version not in before.versions]
        versions = self._load_versions(coming, asker, status)
        undo: list[Callable[[], None]] = []
        try:
            for hosted in staying:
                undo.append(self._grow(hosted, models[hosted.model.version].config, asker))
                status.add(hosted)
        except BaseException:
            for step in undo:
                step()
            for hosted in versions:
                hosted.unload(0.0)
            raise
        status.versions.sort(key=lambda each: each.version)
        versions = sorted([*versions, *staying], key=lambda each: each.model.version)
        with self._lock:
            self._put(wanted.name, LoadedVersions(versions, wanted, prepared, status, before))
        for hosted in staying:
            hosted.shrink(models[hosted.model.version].options, self.drain_timeout_s)
        going = [hosted for version, hosted in before.versions.items() if version not in models]

        def unload(drain_timeout_s: float) -> None:
            for hosted in going:
                hosted.unload(drain_timeout_s)

        return unload if going else None

    def _grow(self, hosted: HostedModel, config: ModelConfig, asker: str | None = None) -> Callable[[], None]:
        loading = (hosted, asker)
        self._loading.append(loading)
        try:
            return hosted.grow(config)
        except LoadFailed as error:
            error.version = hosted.model.version
            raise
        finally:
            self._loading.remove(loading)

    def load_patiently(self, wanted: Wanted) -> None:
        """Do what `load` does for a caller in this process, on whose thread signal handlers may run. Raises as
        `load`.
        """
        self._attempt(wanted.name, lambda attempt: self.load(wanted, attempt=attempt))

    def scale_patiently(self, name: str, instances: int) -> None:
        """Do what `scale` does for a caller in this process, on whose thread signal handlers may run. Raises as
        `scale`.
        """
        self._attempt(name, lambda attempt: self.scale(name, instances, attempt))

    def _attempt(self, name: str, act: Callable[[LoadAttempt], None]) -> None:
        attempt = LoadAttempt(name)

        def run(_: None) -> None:
            try:
                act(attempt)
            finally:
                self._attempts.discard(attempt)
                attempt.ended.set()

        def give_up() -> None:
            attempt.is_given_up = True
            while not attempt.ended.wait(_STILL_S):
                self._break_off(attempt)

        if is_interruptible():
            self._attempts.add(attempt)
            in_parallel(run, [None], "moonpool-load", give_up)
        else:
            act(attempt)

    def _break_off(self, attempt: LoadAttempt) -> None:
        """Let an attempt fail soon, if it has something to break off by now."""
        with self._lock:
            self._changed.notify_all()
        if not attempt.has_lock:
            return
        for hosted, asker in list(self._loading):
            if attempt.name in (hosted.name, asker):
                hosted.break_off_loading()

    def scale(self, name: str, instances: int, attempt: LoadAttempt | None = None) -> None:
        """Change the number of instances of a loaded model, in each version. Returns when all are ready, and those too
        many gone.

        Raises `ModelNotFound`, `InvalidRequest` for a model with several groups of instances, `ConfigError` for more
        than the limits allow, and errors of a load; then nothing has changed.
        """
        with self._locks.hold(name, attempt=attempt), self.errors.noting(name):
            self._check_open()
            loaded = self._models.get(name)
            if loaded is None:
                raise ModelNotFound(f"model '{name}' is not loaded")
            limits, versions = self.rules.limits, list(loaded.versions.values())
            configs = [with_count(hosted.model.config, instances) for hosted in versions]
            for config in configs:
                limits.check_instances(config.instance_groups, len(versions), config.source)
            undo: list[Callable[[], None]] = []
            try:
                for hosted, config in zip(versions, configs, strict=True):
                    undo.append(self._grow(hosted, config))
            except BaseException:
                for step in undo:
                    step()
                raise
            # It is not what any repository has now, so the next load has something to do.
            loaded.stamp = None
            for hosted in versions:
                hosted.shrink(hosted.model.options, self.drain_timeout_s)

    def _retire(self, name: str, unload: Callable[[float], None]) -> None:
        """Unload versions that were replaced, in the background."""

        def act() -> None:
            # Callers that found the model a moment ago may have yet to send their requests.
            self._closing.wait(_GRACE_S)
            try:
                unload(self.drain_timeout_s)
            finally:
                with self._lock:
                    self._retiring -= 1
                    self._changed.notify_all()

        with self._lock:
            self._retiring += 1
        _apart(act, f"moonpool-retire-{name}")

    def _load_versions(self, models: Sequence[Model], asker: str | None, status: ModelStatus) -> list[HostedModel]:
        loaded: list[HostedModel] = []
        try:
            for model in models:
                self.stubs.join_accounts(model)
                backend = self.backends.of(model.config)
                self.backends.initialize(backend)
                kind = HostedModel if model.config.ensemble is None else HostedEnsemble
                hosted = kind(
                    backend,
                    model,
                    self.stubs,
                    self._executor,
                    self._tell,
                    self.metrics_options,
                    goes_on=self._is_beyond_control,
                    cache=self.cache,
                    limiter=self.limiter,
                    residency=self.residency,
                )
                with self._lock:
                    self._hosted.add(hosted)
                if isinstance(hosted, HostedEnsemble):
                    hosted.find = self.find
                loading = (hosted, asker)
                self._loading.append(loading)
                version = status.add(hosted)
                try:
                    for attempt in list(self._attempts):
                        if attempt.has_lock and attempt.name in (model.name, asker):
                            attempt.check()
                    hosted.load()
                except MoonpoolError as error:
                    version.failure = LoadFailure.of(error)
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

    def give_up_loading(self, name: str | None = None) -> None:
        """Let the loads that are on their way fail soon, or those of one model. For a thread that waits for them and
        was interrupted.
        """
        if name is None:
            self.repositories.give_up()
        for hosted, _ in list(self._loading):
            if name in (None, hosted.name):
                hosted.give_up_loading()

    def _wait_until_still(self) -> None:
        """Wait until nothing is loaded or unloaded any more. Loads that models asked for are given up, and builds of
        environments.
        """
        is_still = False
        while not is_still:
            for hosted, asker in list(self._loading):
                hosted.model.given_up.set()
                if asker is not None:
                    hosted.give_up_loading()
            self.residency.give_up_starts()
            with self._lock:
                is_still = self._changed.wait_for(lambda: not self._locks.names, _STILL_S)

    def _tell(self, subject: str, state: str, because: str) -> None:
        _log.debug("%s is %s: %s", subject, state, because)
        if self._listener is not None:
            try:
                self._listener(subject, state, because)
            except Exception:
                _log.exception("the listener failed")

    # Unload

    def unload_patiently(self, name: str) -> None:
        """Do what `unload` does for a caller in this process, on whose thread signal handlers may run. Raises as
        `unload`.
        """
        self._patiently(f"unload of '{name}'", name, lambda: self.unload(name))

    def unload(
        self, name: str, asker: str | None = None, *, may: CheckName = _anything, with_members: bool = False
    ) -> None:
        """Drain and finalize all versions, and the ensembles that have the model in a step.

        `asker` is that of `load`. `with_members`: if it is an ensemble, models go with it that were loaded for it
        alone. Raises `ModelNotFound`, and what `may` raises for a model that must not go with it; then nothing has
        changed.
        """
        with self._locks.hold(name, asker):
            with self._lock:
                members = self._ensembles.check_unload(name, may, with_members=with_members)
                taken = self._take_all(name)
            if not taken:
                raise ModelNotFound(f"model '{name}' is not loaded")
            self._finish(taken, name)
        for member in members:
            with contextlib.suppress(ModelNotFound):  # another thread unloads it
                self.unload(member, with_members=True)

    def begin_unload(self, name: str, *, may: CheckName = _anything, with_members: bool = False) -> None:
        """Unload a model in the background, and with it the ensembles that have it in a step. From now on nobody finds
        them.

        `with_members` is that of `unload`. A model that is just being loaded is unloaded after that. Nothing happens if
        there is no such model. `may` raises for each other model that must not go with it; then nothing has changed.
        Raises `OutOfThreads`; then the model goes on.
        """
        with self._lock:
            if name in self._leaving:
                return
            members = self._ensembles.check_unload(name, may, with_members=with_members)
            if name in self._locks.names:
                self._unload_apart(name, lambda: self._unload_if_there(name, may))
                self._leaving.add(name)
                return
            taken = self._take_all(name)
            if not taken:
                return
            self._locks.acquire(name)
            try:
                self._unload_apart(name, lambda: self._finish(taken))
            except OutOfThreads:
                for each, loaded in taken:
                    self._put(each, loaded)
                    self._locks.release(each)
                raise
        for member in members:
            self.begin_unload(member, with_members=True)

    def _put(self, name: str, loaded: LoadedVersions) -> None:
        """Put a model into the table, so that requests find it.

        Needs the lock. Raises `Unfit` if a request would become too many.
        """
        self._ensembles.weigh(name, loaded)
        self._models[name] = loaded
        self._latest[name] = loaded.latest

    def _take(self, name: str) -> LoadedVersions | None:
        """Take a model out of the table, to unload it, and forget that a load of it failed. Needs the lock."""
        self._leaving.discard(name)
        self._latest.pop(name, None)
        loaded = self._models.pop(name, None)
        if loaded is None:
            self._statuses.give_up(name)
        else:
            self._statuses.note(name, loaded.status)
        return loaded

    def _take_all(self, name: str) -> list[tuple[str, LoadedVersions]]:
        """Take a model out of the table, and before it the ensembles that depend on it, with their model locks.

        Those that another thread loads or unloads just now stay. Needs the lock.
        """
        taken: list[tuple[str, LoadedVersions]] = []
        self._ensembles.note_unload(name)
        for dependent in self._ensembles.dependents(name):
            if dependent in self._locks.names:
                continue
            ensemble = self._models[dependent]
            taken += self._take_all(dependent)
            self._locks.acquire(dependent)
            self._ensembles.load_again(dependent, ensemble)
        loaded = self._take(name)
        return taken if loaded is None else [*taken, (name, loaded)]

    def _finish(self, taken: Sequence[tuple[str, LoadedVersions]], held: str = "") -> None:
        """Unload what was taken, in its order, and release the model locks, without the one that the caller holds."""
        with contextlib.ExitStack() as stack:
            for name, loaded in reversed(taken):
                if name != held:
                    stack.callback(self._release, name)
                stack.callback(loaded.unload, self.drain_timeout_s)

    def _release(self, name: str) -> None:
        with self._lock:
            self._locks.release(name)

    @staticmethod
    def _unload_apart(name: str, unload: Callable[[], None]) -> None:
        """Unload a model on a new thread. Raises `OutOfThreads`."""
        start_thread(threading.Thread(target=unload, name=f"moonpool-unload-{name}"))

    # Look

    def names(self) -> dict[str, list[int]]:
        """Return the names of the loaded models, each with its versions."""
        with self._lock:
            return {name: sorted(loaded.versions) for name, loaded in self._models.items()}

    def versions(self, name: str) -> dict[int, HostedModel]:
        """Return the versions of a model, ascending; none if it is not loaded."""
        loaded = self._models.get(name)
        return {} if loaded is None else dict(sorted(loaded.versions.items()))

    def check_controllable(self) -> None:
        """Raise `ModelUnavailable` if neither models nor clients may load and unload."""
        if self.refuses_control:
            raise ModelUnavailable(self.refuses_control)

    def _is_beyond_control(self) -> bool:
        """Return True if nobody would load a model again that was given up: neither clients nor models may, or requests
        do.
        """
        return bool(self.refuses_control) or self.residency.is_on_demand

    def _is_used(self, name: str) -> bool:
        """Return True if a request is inside a model, or an ensemble. Requests that wait for a model that sleeps are in
        nothing yet.
        """
        loaded = self._models.get(name)
        return loaded is not None and any(
            hosted.is_used and (hosted.residence is None or not hosted.residence.is_asleep)
            for hosted in loaded.versions.values()
        )

    def statuses(self) -> dict[str, ModelStatus]:
        """Return the status of every model that was to be loaded, by name."""
        with self._lock:
            loaded = {name: loaded.status for name, loaded in self._models.items()}
            return {**self._statuses.all(), **loaded}

    def find(self, name: str, version: int | None = None) -> HostedModel:
        """Return a model version, the latest by default. Raises `ModelNotFound`, `ModelUnavailable`."""
        hosted = self._latest.get(name)
        if hosted is not None and (version is None or hosted.model.version == version):
            return hosted
        loaded = self._models.get(name)
        if loaded is not None and version in loaded.versions:
            return loaded.versions[version]
        self._check_open()
        if loaded is not None:
            raise ModelNotFound(f"Request for unknown model: '{name}' version {version} is not found")
        if name in self._locks.names:
            raise ModelUnavailable(f"Request for model '{name}' which is loading or unloading")
        why = "has no available versions" if self._statuses.has_versions(name) else "is not found"
        raise ModelNotFound(f"Request for unknown model: '{name}' {why}")

    def served(self) -> list[HostedModel]:
        """Return all versions of all loaded models."""
        with self._lock:
            return [h for loaded in self._models.values() for h in loaded.versions.values()]

    def metric_families(self) -> list[ExposedFamily]:
        """Return the metrics of all models, and those that the models made."""
        self._check_open()
        self.stubs.catch_up()
        served, own = self.served(), self.stubs.metrics.families()
        return [
            *model_families(served, self.metrics_options),
            *instance_families(served),
            *cache_families(self.cache),
            *start_families(self.stubs.starts, self.stubs.spares.waiting),
            *own,
        ]

    # End

    def close(self, drain_timeout_s: float | None = None) -> None:
        """Unload all models, also those that are being loaded, and finalize the backends.

        Requests have `drain_timeout_s` at most, in place of a longer time that they would have had. A second call
        returns when the first one is done.
        """
        if not self._disowned:
            self._patiently("close", None, lambda: self._close(drain_timeout_s))

    def _close(self, drain_timeout_s: float | None) -> None:
        if drain_timeout_s is not None and drain_timeout_s < self.drain_timeout_s:
            self.drain_timeout_s = drain_timeout_s
            # Unloads that began before have the time that they were given.
            self._reactor.call_later(drain_timeout_s, self._stop_draining)
        with self._lock:
            is_first = not self._closed
            self._closed = True
        if not is_first:
            self._ended.wait()
            return
        self._closing.set()
        self.residency.stop()
        try:
            self._wait_until_still()
            names = list(self._models)
            try:
                in_parallel(self._unload_if_there, names, "moonpool-unload")
            finally:
                self._finalize_all()
        finally:
            self.on_end(self)
            self._ended.set()

    def _patiently(self, doing: str, name: str | None, act: Callable[[], None]) -> None:
        """Act on another thread and wait for it, and log for what, if it takes long. `name` is the model's if it is
        about one.

        If a signal handler raises here, the models that it is about end at once, without another wait.
        """

        def say() -> None:
            waits = [(str(hosted), hosted.waits_for) for hosted in self._concerned(name)]
            named = sorted(f"{each} {why}" for each, why in waits if why)
            if named:
                _log.warning(_TAKES_LONG, doing, "; ".join(named))

        give_up = partial(self.end_at_once, name)
        in_parallel(lambda _: act(), [None], "moonpool-end", give_up, takes_long=say)

    def end_at_once(self, name: str | None = None) -> None:
        """Let all loads and unloads end without another wait, or those of one model."""
        if name is None:
            self.repositories.give_up()
        for hosted in self._concerned(name):
            hosted.end_at_once()

    def _concerned(self, name: str | None) -> list[HostedModel]:
        with self._lock:
            return [hosted for hosted in self._hosted if name in (None, hosted.name)]

    def _stop_draining(self) -> None:
        for hosted in self._concerned(None):
            hosted.stop_draining()

    def close_soon(self) -> None:
        """Close on a new thread. For a finalizer, which must not wait and not take a lock."""
        if not self._closed:
            self._reactor.call_soon(self._close_apart)

    def _close_apart(self) -> None:
        with contextlib.suppress(OutOfThreads):  # the program closes all at its end
            start_thread(threading.Thread(target=self.close, name="moonpool-close"))

    def _finalize_all(self) -> None:
        with self._lock:
            self._changed.wait_for(lambda: not self._locks.names and not self._retiring)
        # All of these, in this order, whatever one of them raises.
        with contextlib.ExitStack() as stack:
            stack.callback(self._reactor.close)
            stack.callback(self.deliveries.close)
            stack.callback(self._executor.shutdown)
            stack.callback(self.stubs.blank_templates.close)
            stack.callback(self.stubs.spares.close)
            stack.callback(self.repositories.close)
            stack.callback(self.backends.finalize_all)
            stack.callback(self.residency.join)

    def _unload_if_there(self, name: str, may: CheckName = _anything) -> None:
        try:
            self.unload(name, may=may)
        except ModelNotFound:  # another thread unloads it
            pass
        except NotGranted as error:  # an ensemble was loaded meanwhile; who asked does not wait for this
            _log.error("model '%s' could not be unloaded: %s", name, error)

    def disown(self) -> None:
        """Forget the models, in a fork of the process that they belong to."""
        # The locks may have been held at the moment of the fork, by threads that do not exist here.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = True
        self._models, self._latest, self._locks = {}, {}, ModelLocks(self._changed)
        self._disowned = True

    @property
    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            if self._disowned:
                raise RuntimeClosed("the runtime belongs to the process that made it, not its forks")
            raise RuntimeClosed("the runtime was closed; make another")


def _apart(act: Callable[[], None], name: str) -> None:
    """Act on a new thread, or on this one if none can be started: the replaced versions must not stay."""
    try:
        start_thread(threading.Thread(target=act, name=name))
    except OutOfThreads:
        act()
