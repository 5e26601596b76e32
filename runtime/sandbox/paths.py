"""Which files a contained model needs: its interpreter with its packages, moonpool's own, and the model's."""

from __future__ import annotations

import os
import site
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgpack

from moonpool.runtime.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moonpool.runtime.environment import Environment
    from moonpool.runtime.source import ModelSource

# Code that comes with the system, and what a dynamic loader looks for.
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
_PACKAGES = [Path(__file__).resolve().parents[2] / name for name in ("ipc", "stub")]


def needed_paths(
    source: ModelSource,
    environment: Environment,
    variables: Mapping[str, str],
    backend_folder: str,
    granted: Sequence[tuple[str, bool]],
) -> list[str]:
    """Existing paths without links, none of them inside another one. Raises `LoadFailed` for a granted one that is not."""
    for path, _ in granted:
        # Who misspells one is not to wonder why nothing was granted.
        if not os.path.exists(path):
            raise LoadFailed(
                f"MOONPOOL_SANDBOX_PATHS names {path}, which is not there; make it, or take it out",
                stage="sandbox",
            )
    package = [*map(str, _PACKAGES), os.path.dirname(msgpack.__file__)]
    return outermost(
        [
            *_SYSTEM,
            *package,
            *_interpreter(environment),
            *_listed(variables, "PYTHONPATH"),
            *_listed(variables, "LD_LIBRARY_PATH"),
            *_model(source),
            *([backend_folder] if backend_folder else []),
            *(path for path, _ in granted),
        ]
    )


def outermost(paths: Iterable[str]) -> list[str]:
    """Those that are there, without links, and without those inside others of them."""
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in paths if os.path.exists(path)}):
        if not any(path == each or path.startswith(each.rstrip("/") + "/") for each in found):
            found.append(path)
    return found


def _interpreter(environment: Environment) -> list[str]:
    # Whoever made an environment could name any folder as the place of its base interpreter.
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    if environment.root is not None:
        return [str(environment.root), sys.base_prefix, sys.base_exec_prefix]
    packages = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        packages.append(site.getusersitepackages())
    return [*own, *packages, *_named_in_pth(packages)]


def _named_in_pth(folders: Iterable[str]) -> list[str]:
    """Folders that `.pth` files add to the path, as those of editable installs do."""
    named = []
    for folder in folders:
        for file in Path(folder).glob("*.pth"):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            paths = [os.path.join(folder, line.strip()) for line in lines if line.strip()]
            named += [path for path in paths if os.path.isdir(path)]
    return named


def _listed(variables: Mapping[str, str], name: str) -> list[str]:
    return [path for path in variables.get(name, "").split(os.pathsep) if os.path.isabs(path)]


def _model(source: ModelSource) -> list[str]:
    """A directory that the model has to itself, or its one file: what lies beside that is not the model's.

    The file of a Python-based backend is elsewhere, beside what else the backend is made of.
    """
    if not source.is_directory:
        return [str(source.file)]
    return [str(source.model_directory), *map(str, _backend(source))]


def _backend(source: ModelSource) -> list[Path]:
    is_model_s = source.file.is_relative_to(source.model_directory)
    return [] if is_model_s else [source.file.parent]
