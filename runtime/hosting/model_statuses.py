"""The versions of each loaded model, and the status of each that somebody wanted to load, loaded or not.

Theory of operation. A lock guards the table of `ModelStatuses`. A `ModelStatus` is appended to by the one thread that
loads, and read by others without a lock. A version's state is not copied: it is read from the version's own state
machine.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from moonpool.ipc.errors import MoonpoolError
from moonpool.ipc.messages import beginning
from moonpool.runtime.hosting.hosted_model import HostedModel
from moonpool.runtime.isolation.public_text import public_text, scrubbed
from moonpool.runtime.model.backend import Model
from moonpool.runtime.model.config.live import fixed_part
from moonpool.runtime.model.config.model import ModelConfig
from moonpool.runtime.model.states import ModelState
from moonpool.runtime.repository.loading import PreparedModel, Wanted

# The number of names that are remembered.
_MOST = 10_000
# What is kept of the text of an error: its writer may be a model or a client.
_MOST_TEXT_BYTES = 8192
_UNLOADED = "unloaded"
_GIVEN_UP = "every instance gave up; see the server's log"
_ASLEEP = "asleep: the next request loads it"
_DORMANT = "asleep with its processes: the next request wakes it"
_WORDS = {
    "UNKNOWN": "Unknown",
    "INTERNAL": "Internal",
    "NOT_FOUND": "Not found",
    "INVALID_ARG": "Invalid argument",
    "UNAVAILABLE": "Unavailable",
    "UNSUPPORTED": "Unsupported",
    "ALREADY_EXISTS": "Already exists",
    "CANCELLED": "Cancelled",
}


def with_code(error: MoonpoolError | LoadFailure, text: str | None = None) -> str:
    """Return the text of an error, or another one for it, behind its code, as Triton shows it."""
    return f"{_WORDS.get(error.code, 'Internal')}: {error if text is None else text}"


class LoadFailure(NamedTuple):
    """Keeps the texts of the error of a load.

    The error itself refers to all that the load had in its hands, such as a client's files.
    """

    code: str
    text: str
    public_text: str
    """The text for clients."""

    @classmethod
    def of(cls, error: MoonpoolError) -> LoadFailure:
        """Keep the beginnings of the texts of an error."""
        texts = str(error), public_text(error)
        return cls(error.code, *(beginning(text, _MOST_TEXT_BYTES) for text in texts))


class VersionStatus:
    """The state of a model version, through its life and after it."""

    def __init__(self, hosted: HostedModel) -> None:
        self.version = hosted.model.version
        self.sandbox = hosted.model.options.sandbox
        self.failure: LoadFailure | None = None
        self._machine = hosted.machine
        # A model that was unloaded must go with all that it has.
        self._hosted = weakref.ref(hosted)
        self._is_given_up = False

    def give_up(self) -> None:
        """Show a version that failed as unloaded, since somebody unloaded it."""
        self._is_given_up = True

    @property
    def state(self) -> ModelState:
        return self._machine.state

    @property
    def reason(self) -> str:
        """The reason why it is UNAVAILABLE, or that it is asleep, for clients; empty in all other states."""
        hosted = self._hosted()
        if self.state is ModelState.READY and hosted is not None and hosted.model.is_asleep:
            return _DORMANT if hosted.is_dormant else _ASLEEP
        if self.state is not ModelState.UNAVAILABLE:
            return ""
        if self.is_unloaded:
            return _UNLOADED
        if self.failure is not None:
            return with_code(self.failure, self.failure.public_text)
        # What the process said last is for the log.
        has_given_up = hosted is not None and hosted.has_given_up
        return _GIVEN_UP if has_given_up else scrubbed(self._machine.because)

    @property
    def is_unloaded(self) -> bool:
        """True if it is UNAVAILABLE because somebody unloaded it."""
        is_wanted_so = self._is_given_up or self._machine.because == _UNLOADED
        return is_wanted_so and self.state is ModelState.UNAVAILABLE


class ModelStatus:
    """The last load of a model: its versions as far as it came, and the error if it failed.

    The thread that loads appends to it. Others may read it at any time.
    """

    def __init__(self) -> None:
        self.versions: list[VersionStatus] = []
        self.failure: LoadFailure | None = None
        # Identifies what was loaded, to tell if it has changed.
        self.stamp: bytes | None = None

    def add(self, hosted: HostedModel) -> VersionStatus:
        status = VersionStatus(hosted)
        self.versions.append(status)
        return status


class ModelStatuses:
    """The last load of every name that somebody wanted to load. Thread-safe."""

    def __init__(self) -> None:
        self._by_name: dict[str, ModelStatus] = {}
        self._lock = threading.Lock()

    def note(self, name: str, status: ModelStatus) -> None:
        """Keep the status of a load that begins, or that failed before it could begin."""
        with self._lock:
            # The newest is the last. The number is limited, as models may ask for any number of names.
            self._by_name.pop(name, None)
            self._by_name[name] = status
            while len(self._by_name) > _MOST:
                del self._by_name[next(iter(self._by_name))]

    def give_up(self, name: str) -> None:
        """Forget that a load failed, as somebody unloaded the model."""
        with self._lock:
            status = self._by_name.get(name)
            if status is not None and not status.versions:
                del self._by_name[name]
            elif status is not None:
                status.failure = None
                for version in status.versions:
                    version.give_up()

    def failed(self, name: str, stamp: bytes | None) -> bool:
        """Return True if the last load of this name failed, and was of the same model files and options."""
        status = self._by_name.get(name)
        return status is not None and status.failure is not None and status.stamp == stamp

    def has_versions(self, name: str) -> bool:
        """Return True if the last load of this name got as far as a version."""
        status = self._by_name.get(name)
        return status is not None and bool(status.versions)

    def all(self) -> dict[str, ModelStatus]:
        """Return all statuses by name."""
        with self._lock:
            return dict(self._by_name)


class LoadedVersions:
    """The versions of a loaded model, by number, and the status of their load. Nothing but `stamp` ever changes."""

    def __init__(
        self,
        versions: Sequence[HostedModel],
        wanted: Wanted,
        prepared: PreparedModel,
        status: ModelStatus,
        before: LoadedVersions | None = None,
    ) -> None:
        """`before` are the versions that were updated to these. Their files are in use still."""
        self.versions = {hosted.model.version: hosted for hosted in versions}
        self.latest = versions[-1]
        # Only ensembles are loaded again as they were wanted. The files of others, which a client brought, lie on the
        # disk by now.
        is_ensemble = self.config.ensemble is not None
        self.wanted = wanted if is_ensemble else replace(wanted, config=None, files=None)
        self.status = status
        self.stamp = prepared.stamp
        self._fixed = dict(prepared.fixed)
        self._discard = prepared.discard
        if before is not None:
            self._fixed |= {k: v for k, v in before._fixed.items() if k in self._fixed}
            self._discard = before._discard

    @property
    def config(self) -> ModelConfig:
        """The configuration of the latest version."""
        return self.latest.model.config

    def is_what(self, prepared: PreparedModel, *, at_least_once: bool) -> bool:
        """Return True if these versions are what was prepared, and serve now, or did `at_least_once`."""
        return self.stamp == prepared.stamp and (at_least_once or self._serve())

    def _serve(self) -> bool:
        return all(hosted.why_not_serving() is None for hosted in self.versions.values())

    def may_become(self, prepared: PreparedModel) -> bool:
        """Return True if an update makes these versions what was prepared, with the processes that there are."""
        staying = [each for each in prepared.models if each.version in self.versions]
        # Files that a client brought again lie elsewhere. Versions that stay have the first ones.
        is_complete = len(staying) == len(prepared.models) or not prepared.is_made
        return (
            is_complete
            and bool(staying)
            # An ensemble has no instances, and is checked against its members when it is loaded.
            and self.config.ensemble is None
            and self._serve()
            and all(self._goes_on(each, prepared) for each in staying)
        )

    def _goes_on(self, wanted: Model, prepared: PreparedModel) -> bool:
        model, fixed = self.versions[wanted.version].model, self._fixed[wanted.version]
        # A client may bring back the configuration that it has from the server: the one that the model completed.
        completed = fixed._replace(config=fixed_part(model.config.raw))
        return prepared.fixed[wanted.version] in (fixed, completed)

    def unload(self, drain_timeout_s: float) -> None:
        """Drain and finalize all versions, and delete what was prepared for them."""
        for hosted in self.versions.values():
            hosted.unload(drain_timeout_s)
        self._discard()
