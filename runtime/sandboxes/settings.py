"""Checks what a caller says about a run: the process that it needs, its limits, its files."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from moonpool.ipc.policy import BEST_EFFORT, STRICT
from moonpool.ipc.source.folders import MOST_FILES, OUT
from moonpool.runtime.arguments import OF_RUNTIME
from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.model.config.options import default_memory_bytes, parse_size
from moonpool.runtime.repository.folder_cache import cache_root

Size = int | str
Content = bytes | str | os.PathLike[str]
# Of a path of a file that goes in or comes out, as a person may type it anywhere.
LONGEST_NAME = 512
_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


class RunOptions(TypedDict, total=False):
    """The options of a run and of a sandbox, as `moonpool.run` describes them."""

    timeout_s: float
    memory: Size | None
    tasks: int
    open_files: int
    files_bytes: Size
    calls: int
    imports: Sequence[str]
    environment: str | os.PathLike[str] | Sequence[str] | None
    paths: Sequence[str]
    sandbox: str
    options: Mapping[str, str | float] | None


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one process that runs source."""

    memory: int
    tasks: int
    open_files: int
    files_bytes: int
    # Of functions of the caller, in one run.
    calls: int

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("memory", "tasks", "open_files", "files_bytes")}


@dataclass(frozen=True, slots=True)
class Settings:
    """Describes a worker, from which runs are forked. Runs with other settings have other workers."""

    sandbox: str = STRICT
    imports: tuple[str, ...] = ()
    # The options of a model for the sandbox, by key.
    options: tuple[tuple[str, str], ...] = ()


def read_options(options: RunOptions) -> tuple[Settings, Limits, float]:
    """Check the options. Returns the settings, the limits and the time. Raises ValueError, `BadEnvironment`."""
    unknown = set(options) - RunOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"there is no option {min(unknown)!r}; there are {', '.join(RunOptions.__annotations__)}")
    timeout_s = OF_RUNTIME.seconds("timeout_s", options.get("timeout_s", 30.0))
    memory = options.get("memory")
    files_bytes = _size("files_bytes", options.get("files_bytes", 64 << 20))
    limits = Limits(
        default_memory_bytes() if memory is None else _size("memory", memory),
        OF_RUNTIME.whole("tasks", options.get("tasks", 64), 1, 4096),
        OF_RUNTIME.whole("open_files", options.get("open_files", 256), 16, 65536),
        files_bytes,
        OF_RUNTIME.whole("calls", options.get("calls", 10_000), 0),
    )
    level = options.get("sandbox", STRICT)
    if level not in (STRICT, BEST_EFFORT):
        OF_RUNTIME.refuse("sandbox", f"{STRICT} or {BEST_EFFORT}", level)
    imports = OF_RUNTIME.texts("imports", options.get("imports", ()))
    for name in imports:
        if not _MODULE.fullmatch(name):
            OF_RUNTIME.refuse("imports", "names of modules", name)
    given = {"MOONPOOL_SCRATCH_BYTES": str(files_bytes)}
    paths = OF_RUNTIME.texts("paths", options.get("paths", ()))
    if paths:
        given["MOONPOOL_SANDBOX_PATHS"] = ",".join(paths)
    if environment := _environment(options.get("environment")):
        given["EXECUTION_ENV_PATH"] = environment
    more = options.get("options") or {}
    given |= {key: str(value) for key, value in OF_RUNTIME.map("options", more, "a map of options of a model").items()}
    return Settings(level, tuple(imports), tuple(sorted(given.items()))), limits, timeout_s


def _size(name: str, given: Size) -> int:
    try:
        size_bytes = parse_size(given) if isinstance(given, str) else given
    except ValueError:
        OF_RUNTIME.refuse(name, "a size such as 512M", given)
    return OF_RUNTIME.whole(name, size_bytes, 1 << 20, 1 << 46)


def _environment(given: str | os.PathLike[str] | Sequence[str] | None) -> str:
    """Return what `EXECUTION_ENV_PATH` names. A list of packages becomes a file, which its content names."""
    if given is None:
        return ""
    if isinstance(given, str | os.PathLike):
        return os.path.abspath(given)
    packages = OF_RUNTIME.texts("environment", given, "a path, or a list of packages")
    if any("\n" in each for each in packages):
        OF_RUNTIME.refuse("environment", "a list of packages", packages)
    text = "".join(f"{each}\n" for each in packages)
    folder = cache_root() / "lists"
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.txt"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.is_file():
            made = folder / f"{os.getpid()}-{file.name}"
            made.write_text(text, encoding="utf-8")
            made.replace(file)
    except OSError as error:
        raise BadEnvironment(f"the list of packages cannot be kept in {folder}: {error.strerror}") from error
    return str(file)


def read_files(files: Mapping[str, Content] | None) -> dict[str, bytes]:
    """Check the names of files for a run, and return their contents. Raises ValueError, OSError."""
    found = {}
    for name, content in OF_RUNTIME.map("files", files or {}, "a map of names to bytes, texts or paths").items():
        if not is_safe_name(name):
            OF_RUNTIME.refuse("files", "a map of relative names without '..' or control characters", name)
        if isinstance(content, str):
            content = content.encode()
        elif isinstance(content, os.PathLike):
            content = Path(content).read_bytes()
        elif not isinstance(content, bytes | bytearray | memoryview):
            OF_RUNTIME.refuse(f"files[{name}]", "bytes, a text, or a Path", content)
        found[name] = bytes(content)
    if len(found) > MOST_FILES:
        OF_RUNTIME.refuse("files", f"{MOST_FILES} files at most", len(found))
    for name in found:
        if name == OUT:
            OF_RUNTIME.refuse("files", f"a map without {OUT!r}, the folder for files that the source writes", name)
        parts = name.split("/")
        for count in range(1, len(parts)):
            if (parent := "/".join(parts[:count])) in found:
                OF_RUNTIME.refuse("files", f"a map in which no file is also a folder, as {parent!r:.200} is", name)
    return found


def is_safe_name(name: Any) -> bool:
    """Return True for a relative path that stays below the folder to which it is added, and may be shown anywhere."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        return False
    parts = name.split("/")
    return all(part not in ("", ".", "..") for part in parts) and len(parts) <= 32
