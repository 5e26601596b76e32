"""What has become of each model that somebody wanted loaded, also of those that are not."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moonpool.runtime.states import ModelState

if TYPE_CHECKING:
    from moonpool.ipc.errors import MoonpoolError
    from moonpool.runtime.hosted_model import HostedModel

# Names that are remembered.
_MOST = 10_000
_UNLOADED = "unloaded"
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


def with_code(error: MoonpoolError) -> str:
    """The text of an error behind its code, as Triton shows it."""
    return f"{_WORDS.get(error.code, 'Internal')}: {error}"


class VersionStatus:
    """The state of a version now; it follows the version through its life, and stays when that is over."""

    def __init__(self, hosted: HostedModel) -> None:
        self.version = hosted.model.version
        self.sandbox = hosted.model.options.sandbox
        self.failure: MoonpoolError | None = None
        self._machine = hosted.machine
        self._is_given_up = False

    def give_up(self) -> None:
        """It failed, and somebody unloaded it all the same."""
        self._is_given_up = True

    @property
    def state(self) -> ModelState:
        return self._machine.state

    @property
    def reason(self) -> str:
        """Why it is UNAVAILABLE; empty in all other states."""
        if self.state is not ModelState.UNAVAILABLE:
            return ""
        if self.is_unloaded:
            return _UNLOADED
        return self._machine.because if self.failure is None else with_code(self.failure)

    @property
    def is_unloaded(self) -> bool:
        """Whether it is UNAVAILABLE because somebody wanted that."""
        is_wanted_so = self._is_given_up or self._machine.because == _UNLOADED
        return is_wanted_so and self.state is ModelState.UNAVAILABLE


class ModelStatus:
    """The last load of a model: its versions as far as it came, and why it failed if it did.

    Appended to by the thread that loads; may be read by others at any time.
    """

    def __init__(self) -> None:
        self.versions: list[VersionStatus] = []
        self.failure: MoonpoolError | None = None
        # What failed, to know it again.
        self.stamp: object = None

    def add(self, hosted: HostedModel) -> VersionStatus:
        status = VersionStatus(hosted)
        self.versions.append(status)
        return status


class ModelStatuses:
    """The last load of every name that somebody wanted loaded. Thread-safe."""

    def __init__(self) -> None:
        self._by_name: dict[str, ModelStatus] = {}
        self._lock = threading.Lock()

    def note(self, name: str, status: ModelStatus) -> None:
        """A load that begins, or failed before it could."""
        with self._lock:
            # The newest is the last; models may ask for any number of names.
            self._by_name.pop(name, None)
            self._by_name[name] = status
            while len(self._by_name) > _MOST:
                del self._by_name[next(iter(self._by_name))]

    def give_up(self, name: str) -> None:
        """Somebody unloaded what is not loaded: that it failed does not count any more."""
        with self._lock:
            status = self._by_name.get(name)
            if status is not None and not status.versions:
                del self._by_name[name]
            elif status is not None:
                status.failure = None
                for version in status.versions:
                    version.give_up()

    def failed(self, name: str, stamp: object) -> bool:
        """Whether the last load of this name failed, and was of the same."""
        status = self._by_name.get(name)
        return status is not None and status.failure is not None and status.stamp == stamp

    def has_versions(self, name: str) -> bool:
        """Whether a version of this name was ever to be loaded."""
        status = self._by_name.get(name)
        return status is not None and bool(status.versions)

    def all(self) -> dict[str, ModelStatus]:
        """By name."""
        with self._lock:
            return dict(self._by_name)
