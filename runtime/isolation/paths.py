"""Files that a contained model needs: its interpreter with its packages, moonpool's own, and the model's.

A contained instance cannot write bytecode, and would compile moonpool's own files again at each start. So the runtime
writes it.
"""

from __future__ import annotations

import compileall
import functools
import os
import site
import sys
from collections.abc import Iterable, Mapping
from importlib.util import cache_from_source
from pathlib import Path

import msgpack

from moonpool.runtime.errors import LoadFailed
from moonpool.runtime.model.source import ModelSource
from moonpool.runtime.repository.environment import Environment

# Code that comes with the system, and the files of the dynamic loader.
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
_PACKAGES = [Path(__file__).resolve().parents[2] / name for name in ("ipc", "stub")]


def needed_paths(
    source: ModelSource, environment: Environment, variables: Mapping[str, str], backend_folder: str
) -> list[str]:
    """Return the existing paths that the model needs, without links, none of them inside another one."""
    package = [*map(str, _PACKAGES), os.path.dirname(msgpack.__file__)]
    return outermost(
        [
            *_SYSTEM,
            *package,
            *_interpreter(environment),
            *_listed(variables, "PYTHONPATH"),
            *_libraries(environment, variables),
            *_model(source),
            *([backend_folder] if backend_folder else []),
        ]
    )


def check_granted(paths: Iterable[tuple[str, bool]]) -> None:
    """Raise `LoadFailed` for a path that does not exist, or that is reached by a link.

    The stub opens them without following links, whatever happens to them after this check.
    """
    for path, writes in paths:
        if path == "/" and writes:
            # The root of a process cannot be mounted again, and a model that writes everywhere has no sandbox.
            raise LoadFailed(
                "MOONPOOL_SANDBOX_PATHS names all of / to write to; name the folders that the model writes to",
                stage="sandbox",
            )
        try:
            os.stat(path)
        except PermissionError:
            continue  # the stub will name the folder that has to let it pass
        except OSError as error:
            # A misspelt path must not look like a grant that does nothing.
            failure = LoadFailed(
                f"MOONPOOL_SANDBOX_PATHS names {path}, which is not there; make it, or take it out", stage="sandbox"
            )
            failure.instead = {}
            raise failure from error
        real = os.path.realpath(path)
        if real != path:
            raise LoadFailed(
                f"MOONPOOL_SANDBOX_PATHS names {path}, which is a link or lies behind one; name the place itself, "
                f"{real}",
                stage="sandbox",
            )


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the existing paths without links, and without those inside others."""
    found: list[str] = []
    for path in sorted({os.path.realpath(path) for path in paths if os.path.exists(path)}):
        if not any(path == each or path.startswith(each.rstrip("/") + "/") for each in found):
            found.append(path)
    return found


def _interpreter(environment: Environment) -> list[str]:
    # Not the base interpreter that an environment names: its author could name any folder.
    own = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    if environment.root is not None:
        return [str(environment.root), sys.base_prefix, sys.base_exec_prefix]
    packages = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        packages.append(site.getusersitepackages())
    return [*own, *packages, *_named_in_pth(packages)]


def _named_in_pth(folders: Iterable[str]) -> list[str]:
    """Return the folders that `.pth` files add to the path, as those of editable installs do."""
    named = []
    for folder in folders:
        for file in Path(folder).glob("*.pth"):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            paths = [os.path.join(folder, line.strip()) for line in lines if line.strip()]
            named += [path for path in paths if os.path.isdir(path)]
    return named


def _listed(variables: Mapping[str, str], name: str) -> list[str]:
    return [path for path in variables.get(name, "").split(os.pathsep) if os.path.isabs(path)]


def _libraries(environment: Environment, variables: Mapping[str, str]) -> list[str]:
    """Return the folders of LD_LIBRARY_PATH without those of the model's own environment, which may be links to any
    folder.
    """
    paths = _listed(variables, "LD_LIBRARY_PATH")
    root = environment.root
    return [path for path in paths if root is None or not Path(path).is_relative_to(root)]


def _model(source: ModelSource) -> list[str]:
    """Return the model's own directory, or its one file, as the files beside that are not the model's.

    The file of a Python-based backend lies elsewhere, beside the other files of the backend.
    """
    if not source.is_directory:
        return [str(source.file)]
    return [str(source.model_directory), *map(str, _backend(source))]


def _backend(source: ModelSource) -> list[Path]:
    is_model_s = source.file.is_relative_to(source.model_directory)
    return [] if is_model_s else [source.file.parent]


@functools.cache
def keep_bytecode() -> None:
    """Write bytecode of moonpool's own files beside them, as most installers have done already; once in a process.

    Does nothing if Python must not write bytecode, or if the folders are not writable. Any thread may
    call it.
    """
    for folder in () if sys.dont_write_bytecode else _PACKAGES:
        # Otherwise all files would be compiled in vain.
        if _may_write(Path(cache_from_source(str(folder / "__init__.py"))).parent):
            compileall.compile_dir(folder, quiet=2)


def _may_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
