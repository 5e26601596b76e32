"""Checks that the files of a model have the digests that its configuration demands, as Triton's repository agent
`checksum`.

moonpool has no other agent. A model that names one is refused: nobody would have checked it, and it would be served as
if somebody had. Error texts are those of Triton's agent where it has some.

Theory of operation. The files are checked when the model is loaded, and again before each later process of the model,
as that reads them again: a file that is exchanged while the model serves is noticed at the next restart. A file is not
read again as long as the kernel says that nobody has changed it. Its change time says that, unless the change came so
soon after the last one that both have the same time (`_SETTLED_NS`). Instances start on threads of their own, and each
may check: `_lock` is held while a file is read, so that one of them reads it and the others find it checked.

Between the check and the moment at which a process imports a file, somebody who may write to the repository can still
exchange it. A checksum protects from files that were damaged or forged on their way, not from a writer who waits.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.model.config.schema import Raw
from moonpool.runtime.model.config.source import Source, part
from moonpool.runtime.process.files import LeadsOut, open_file

_AGENT = "checksum"
_LENGTHS = {"md5": 32, "sha256": 64}
_CHUNK_BYTES = 1 << 20
# File systems count time in steps of some milliseconds, and network file systems in steps of up to two seconds.
_SETTLED_NS = 3_000_000_000


@dataclass(frozen=True, slots=True)
class Checksum:
    """The digest that a file of a model must have. `algorithm` is md5 or sha256, `path` is within the model's
    folder.
    """

    algorithm: str
    path: str
    digest: str


def checksums(raw: Raw, source: Source) -> tuple[Checksum, ...]:
    """Read the checksums that a configuration demands. Raises ConfigError, also for agents that moonpool does not
    have.
    """
    found: list[Checksum] = []
    for index, agent in enumerate(raw.get("model_repository_agents", {}).get("agents", ())):
        path = f"model_repository_agents.agents[{index}]"
        if agent["name"] != _AGENT:
            what = (
                f"moonpool has no repository agent {agent['name'][:80]!r}, only {_AGENT!r}, and must not serve "
                f"'{raw['name']}' unchecked; to serve it without what the agent does, take the agent out of its "
                "configuration"
            )
            source.mistake(f"{path}.name", what)
            continue
        for key, value in agent["parameters"].items():
            with part():
                found.append(_checksum(key, value, f"{path}.parameters[{key}]", source))
    return tuple(found)


def _checksum(key: str, value: str, where: str, source: Source) -> Checksum:
    algorithm, colon, file = key.partition(":")
    if not colon:
        raise source.error(where, f"failed to parse key: {key}")
    length = _LENGTHS.get(algorithm.lower())
    if length is None:
        what = f"Unsupported checksum algorithm: {algorithm}; there are MD5 and SHA256"
        raise source.error(where, what)
    parts = PurePosixPath(file).parts
    if not parts or file.startswith("/") or ".." in parts or "\0" in file:
        what = f"the file of a checksum must lie in the folder of the model, not at {file!r}"
        raise source.error(where, what)
    digest = value.lower()
    if len(digest) != length or not set(digest) <= set("0123456789abcdef"):
        what = f"a digest of {algorithm.upper()} has {length} hexadecimal digits, not {value[:80]!r}"
        raise source.error(where, what)
    return Checksum(algorithm.lower(), file, digest)


class Checksums:
    """The checksums of one model version. Any thread may call any method."""

    def __init__(self, demanded: tuple[Checksum, ...], folder: Path) -> None:
        self._demanded = demanded
        self._folder = folder
        self._lock = threading.Lock()
        # What identified the files when their digests were right.
        self._right: dict[Checksum, object] = {}

    def check(self, *, stays_inside: bool) -> None:
        """Read all files that may have changed. Raises `LoadFailed` for a file that is missing or has another digest.

        With `stays_inside`, no link may lead out of the model's folder.
        """
        with self._lock:
            for each in self._demanded:
                self._check(each, [self._folder] if stays_inside else [])

    def _check(self, demanded: Checksum, within: list[Path]) -> None:
        try:
            with open_file(self._folder / demanded.path, within) as file:
                before = os.fstat(file.fileno())
                identity = (*(before.st_dev, before.st_ino, before.st_size), *(before.st_mtime_ns, before.st_ctime_ns))
                if self._right.get(demanded) == identity:
                    return
                # A digest of any kind is compared, so MD5 is allowed where a standard forbids it as a safeguard.
                digest = hashlib.new(demanded.algorithm, usedforsecurity=False)
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except OSError as error:
            why = str(error) if isinstance(error, LeadsOut) else error.strerror or str(error)
            raise _refusal(f"failed to open text file for read {demanded.path}: {why}") from error
        found = digest.hexdigest()
        if found != demanded.digest:
            raise _refusal(
                f"Mismatched {demanded.algorithm.upper()} hash for file {demanded.path}, expect: {demanded.digest}, "
                f"got: {found}"
            )
        if time.time_ns() - before.st_ctime_ns > _SETTLED_NS:
            self._right[demanded] = identity


def _refusal(what: str) -> LoadFailed:
    failure = LoadFailed(what, stage="checksum")
    failure.code = "INVALID_ARG"
    return failure
