"""Triton's model repository extension, and the loads of a server: at its start, at each poll, and on a client's
request.

Theory of operation. Loads at the start and at a poll share one way: worker threads take names from one iterator, a
model at a time. A load may take for ever, so a poll waits `patience_s` for its loads and then ends, while they go on.
The next poll finds their names in `_busy` and leaves these models to them: two loads of one model would only wait for
each other. `_taking` guards the iterator and `_busy` together. `_polling` is never waited for: a poll that finds
another one under way does nothing.

What a poll remembers is written by its own thread, and by the workers for the one model that each of them has: `_said`
by name, so that a failure is logged once, and again when its reason changes. Clients' requests take none of these
locks. The registry lets one thread at a time load or unload a model of a name.

`give_up` sets `_has_given_up` before it has loads in flight fail. A worker that is just about to take a name sees the
one or the other. A load that begins in between is caught by the next call: the server repeats it until everything has
ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

from moonpool.ipc.errors import MoonpoolError
from moonpool.runtime.hosting.model_control import POLLED, loading, wanted_of
from moonpool.runtime.hosting.model_statuses import ModelStatus
from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.states import ModelState
from moonpool.runtime.process.parallel import in_parallel
from moonpool.runtime.process.threads import start_thread
from moonpool.runtime.repository.loading import Wanted
from moonpool.runtime.repository.repository import Listing
from moonpool.runtime.runtime import Runtime
from moonpool.runtime.schedule.failures import missing_file_line

_log = RuntimeLog("moonpool.server")
# The time that a poll waits for its loads. A model may load for ever, and new models must not wait for it.
_PATIENCE_S = 60.0
# The errors for clients and models that load and unload, by the mode. Triton has the same words for both modes.
_REFUSALS = {
    "poll": POLLED,
    "none": f"{POLLED}; --model-control-mode is none: restart the server with explicit, demand or poll to change "
    "its models",
}
_REPEATED = "model appears in two or more repositories"


class RepositoryControl:
    """Loads and unloads the models of a server. Thread-safe. Loads block, all else does not.

    Errors have Triton's texts and codes.
    """

    def __init__(
        self, runtime: Runtime, *, mode: str = "explicit", load_threads: int = 4, patience_s: float = _PATIENCE_S
    ) -> None:
        """`mode` is `none`, `poll`, `explicit` or `demand`. Only with the last two may clients and models load and
        unload.

        A poll waits for `patience_s` for the models that it loads. Then it ends, and they go on loading.
        """
        self._registry = runtime._models
        self._registry.refuses_control = _REFUSALS.get(mode, "")
        self._repositories = self._registry.repositories
        self._load_threads = load_threads
        self._patience_s = patience_s
        self._polling = threading.Lock()
        self._has_given_up = False
        # The models that are being loaded for a start or a poll, and the lock for this set.
        self._busy: set[str] = set()
        self._taking = threading.Lock()
        # The reason for the last failure of each model, so that it is logged once.
        self._said: dict[str, str] = {}
        # The errors of repositories that could not be read, so that they are logged once.
        self._unread: list[str] = []
        # Models that are in no repository any more and whose unloading has begun.
        self._gone: set[str] = set()

    def index(self, *, ready_only: bool = False) -> list[dict[str, str]]:
        """List every version of every model with its state and, if it is UNAVAILABLE, the reason.

        A model that nobody has loaded yet has one entry, with its name alone.
        """
        names, repeated, _ = self._repositories.listing()
        statuses = self._registry.statuses()
        entries: list[dict[str, str]] = []
        begun = {name for name, status in statuses.items() if status.versions}
        for name in sorted(begun.union(names)):
            if name in repeated:
                entries.append({"name": name, "state": "UNAVAILABLE", "reason": _REPEATED})
            else:
                entries += _entries(name, statuses.get(name), ready_only=ready_only)
        return [{key: _as_text(text) for key, text in entry.items()} for entry in entries]

    def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        """Load or reload a model, and return when it is ready.

        `config` is a whole configuration in JSON. `files` are contents by `file:<path>`; they are the model's
        directory, in place of the repository's. Raises `LoadFailed`, `ModelUnavailable`.
        """
        self._registry.check_controllable()
        self._load(name, config or "", files)

    def _load(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        try:
            with loading(name):
                limits = self._registry.rules.limits
                self._registry.load(wanted_of(name, config, files, limits=limits))
        except MoonpoolError as error:
            _log_failure(error)
            raise
        _log.info("successfully loaded '%s'", name)

    def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Begin to unload a model, and return at once. New requests do not find it, and those in flight are finished.

        A model that is not loaded is no error. `unload_dependents`: if it is an ensemble, models go with it that were
        loaded for it alone. Raises `ModelUnavailable`.
        """
        self._registry.check_controllable()
        self._registry.begin_unload(name, with_members=unload_dependents)

    def unload_patiently(self, name: str) -> None:
        """Unload a model, and return when its requests are finished and it has ended.

        Raises `ModelNotFound`, `ModelUnavailable`.
        """
        self._registry.check_controllable()
        self._registry.unload(name)

    # For the server itself

    def load_all(self, names: Iterable[str] | None = None, *, again: bool = True, tries: int = 1) -> bool:
        """Load these models, or all of the repositories, some at a time, and return whether all of them could be
        loaded.

        A failure is logged once as long as its reason stays the same. `again` is that of `ModelRegistry.load`.
        """
        found = self._repositories.listing()
        self._say_unread(found)
        repeated = found.repeated
        wanted = found.names if names is None else list(names)
        pending = iter([name for name in wanted if name not in repeated])
        failed = [name for name in wanted if name in repeated]
        for name in failed:
            self._fails(name, f"failed to poll model '{name}': not unique across all repositories")

        def work(_: int) -> None:
            while (name := self._take(pending)) is not None:
                try:
                    if not any(self._try(name, again=again) for _ in range(tries)):
                        failed.append(name)
                finally:
                    with self._taking:
                        self._busy.discard(name)

        workers = range(min(self._load_threads, len(wanted)))
        in_parallel(work, workers, "moonpool-load", self._registry.give_up_loading)
        return not failed and not found.errors

    def _take(self, pending: Iterator[str]) -> str | None:
        """Take the next model, without those that an earlier poll is still loading."""
        with self._taking:
            for name in pending:
                if self._has_given_up:
                    break
                if name not in self._busy:
                    self._busy.add(name)
                    return name
        return None

    def _try(self, name: str, *, again: bool) -> bool:
        before = self._registry.versions(name)
        try:
            with loading(name):
                self._registry.load(Wanted(name), again=again)
        except MoonpoolError as error:
            self._fails(name, str(error), error)
            return False
        except Exception as error:  # the other models must still be loaded
            self._fails(name, f"failed to load '{name}': {error!r}", error)
            return False
        self._said.pop(name, None)
        if self._registry.versions(name) != before:
            _log.info("successfully loaded '%s'", name)
        return True

    def give_up(self) -> None:
        """Load nothing more, and have loads in flight fail soon: the server ends. May be called many times."""
        self._has_given_up = True
        self._registry.give_up_loading()

    def _fails(self, name: str, why: str, error: Exception | None = None) -> None:
        if self._has_given_up or self._said.get(name) == why:
            return
        self._said[name] = why
        if isinstance(error, MoonpoolError):
            _log_failure(error)
        else:
            _log.error("%s", why, exc_info=error)

    def _say_unread(self, found: Listing) -> None:
        """Log which repositories cannot be read, again only when they change."""
        why = [str(error) for error in found.errors]
        if why != self._unread:
            self._unread = why
            for text in why:
                _log.error("cannot read a repository; its models are unchanged: %s", text)

    def poll(self, *, again: bool = False) -> None:
        """Load models that are new or have changed, and unload those that are gone.

        A model whose new files cannot be loaded goes on with the old ones. The load is tried again when the files
        change, or with `again`. Does nothing while another poll is under way. Returns when everything is done, or after
        `patience_s`.
        """
        if not self._polling.acquire(blocking=False):
            return
        try:
            found = self._repositories.listing()
            # If a repository cannot be read, its models are not gone.
            gone = self._gone if found.errors else set(self._registry.statuses()).difference(found.names)
            for name in sorted(gone - self._gone):
                self._said.pop(name, None)
                self._registry.begin_unload(name)
                _log.info("'%s' was removed from the repository: unloading", name)
            self._gone = gone
            self._load_patiently(again=again)
        except Exception:  # the models go on serving, and the next poll may succeed
            _log.exception("the repositories cannot be polled")
        finally:
            self._polling.release()

    def _load_patiently(self, *, again: bool) -> None:
        """Load all models of the repositories. Loads that take longer than `patience_s` go on in the background."""
        raised: list[Exception] = []

        def act() -> None:
            try:
                self.load_all(again=again)
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=act, name="moonpool-poll")
        start_thread(thread)
        thread.join(self._patience_s)
        for error in raised:
            raise error


def _as_text(text: str) -> str:
    """Escape bytes that are no UTF-8: names of directories may have them, and no protocol carries them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _entries(name: str, status: ModelStatus | None, *, ready_only: bool) -> list[dict[str, str]]:
    versions = () if status is None else tuple(status.versions)
    entries = []
    for version in versions:
        state = version.state
        if ready_only and state is not ModelState.READY:
            continue
        entry = {"name": name, "version": str(version.version), "state": str(state)}
        if reason := version.reason:
            entry["reason"] = reason
        entries.append(entry)
    if versions or ready_only:
        return entries
    if status is None or status.failure is None:
        return [{"name": name}]
    return [{"name": name, "state": "UNAVAILABLE", "reason": status.failure.public_text}]


def _log_failure(error: MoonpoolError) -> None:
    line = missing_file_line(error.__cause__ or error)
    if line is not None:
        _log.info("%s", line)
    _log.error("%s", error)
