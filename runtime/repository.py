"""A model repository on disk, read the way Triton reads one; starts nothing and writes nothing."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import NoReturn

from moonpool.runtime import pbtxt
from moonpool.runtime.config import ConfigError, ModelConfig, Raw, Source, minimal
from moonpool.runtime.config_checks import name_problem
from moonpool.runtime.config_defaults import FILENAMES, MODEL_FILENAME, normalise
from moonpool.runtime.config_limits import ConfigLimits
from moonpool.runtime.repository_files import RepositoryError, check_no_loop, directories

__all__ = ["ModelDirectory", "ModelRepository", "NoVersion", "RepositoryError", "is_version"]

CONFIG_FILENAME = "config.pbtxt"


class NoVersion(RepositoryError):
    """A model of which there is no version that its policy picks."""


class ModelRepository:
    """A directory whose subdirectories are models.

    Nothing is kept: each call reads the disk, so a changed repository needs no new object.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        _check_directory(self.path, "model repository")

    def models(self) -> list[str]:
        """The names of the directories, sorted; hidden ones are left out.

        A directory that no model can have as its name is there too: `find` says what is wrong.
        """
        return [name for name in directories(self.path) if not name.startswith((".", "__"))]

    def find(self, name: str) -> ModelDirectory:
        """The directory of a model; RepositoryError NOT_FOUND where there is none."""
        if problem := name_problem(name):
            raise RepositoryError(problem)
        path = self.path / name
        if not os.path.lexists(path):
            raise RepositoryError(f"no model '{name}' in the repository {self.path}", "NOT_FOUND")
        return ModelDirectory(path)


class ModelDirectory:
    """One model of a repository: `config.pbtxt` and the version directories."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.name = self.path.name
        _check_directory(self.path, f"model '{self.name}'")
        check_no_loop(self.path, f"model '{self.name}'")

    def read_config(self, limits: ConfigLimits | None = None) -> tuple[Raw, Source]:
        """The raw configuration as it stands in the file, named, or the minimal one.

        As in Triton, a file that leaves out name and backend gets the directory's name, and the
        backend whose kind of file there is: `model.py`, `model.onnx`, `model.pt`.  `limits` are the usual ones if
        not given.  Raises ConfigError.
        """
        file = self.path / CONFIG_FILENAME
        if not os.path.lexists(file):
            return minimal(self.name, self.implied_backend() or self._nothing_there(file)), Source()
        raw, source = pbtxt.read_with_source(file, self.path, limits)
        raw["name"] = raw["name"] or self.name
        if raw["name"] != self.name:
            what = f"unexpected directory name '{self.name}' for model '{raw['name']}'"
            raise source.error("name", f"{what}, directory name must equal model name")
        unsaid = not (raw["backend"] or raw["platform"] or raw["default_model_filename"])
        if unsaid and (backend := self.implied_backend()):
            raw = normalise({**raw, "backend": backend}, source)
        return raw, source

    def config(self, *, partial: bool = False) -> ModelConfig:
        """The checked configuration; `partial` as in `ModelConfig.from_dict`."""
        raw, source = self.read_config()
        return ModelConfig.from_dict(raw, source=source, partial=partial)

    def versions(self) -> list[int]:
        """The versions that are there, ascending: directories named by a number above 0.

        Others, and numbers with leading zeros, are ignored; `ignored` lists them.
        """
        return sorted(int(name) for name in directories(self.path) if is_version(name))

    def ignored(self) -> list[str]:
        """The directories that look like versions and are none, for a warning."""
        names = (name for name in directories(self.path) if not is_version(name))
        return [name for name in names if name.isdigit()]

    def chosen_versions(self, config: ModelConfig) -> list[int]:
        """The versions that the policy of the configuration picks, ascending; at least one."""
        available = self.versions()
        chosen = config.version_policy.choose(available)
        if not chosen:
            shown = ", ".join(map(str, available)) or "none"
            what = f"at least one version must be available under the version policy of model '{self.name}'"
            raise NoVersion(f"{what} (in {self.path} there are: {shown})")
        for version in chosen:
            check_no_loop(self.version_directory(version), f"model '{self.name}'")
        return chosen

    def version_directory(self, version: int) -> Path:
        return self.path / str(version)

    def model_file(self, version: int, filename: str = MODEL_FILENAME) -> Path:
        """The absolute path of a version's Python file, which can be read."""
        path = self.version_directory(version) / filename
        if not os.path.isfile(path):
            raise RepositoryError(f"Python model file not found in '{path}'", "NOT_FOUND")
        if not os.access(path, os.R_OK):
            raise RepositoryError(f"the model file '{path}' cannot be read: check its permissions")
        return path

    def implied_backend(self) -> str:
        """The backend for the files that the versions have; "" for none."""
        folders = [self.version_directory(version) for version in self.versions()]
        for backend, filename in FILENAMES.items():
            # A program that PyTorch exported is `model.pt2`.
            for name in (filename, f"{filename}2") if backend == "pytorch" else (filename,):
                if any(os.path.exists(folder / name) for folder in folders):
                    return backend
        return ""

    def _nothing_there(self, file: Path) -> NoReturn:
        versions = self.versions()
        if versions:
            missing = self.version_directory(versions[-1]) / MODEL_FILENAME
            raise RepositoryError(
                f"Python model file not found in '{missing}' (and there is no {file})", "NOT_FOUND"
            )
        raise ConfigError(
            f"there is neither this file nor a version directory such as {self.path / '1'}",
            file=str(file),
        )


def is_version(name: str) -> bool:
    """Tell if a folder of this name is a version of its model."""
    # Eighteen digits fit the 64-bit number that a version is.
    return re.fullmatch(r"[1-9][0-9]{0,17}", name) is not None


def _check_directory(path: Path, title: str) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        what = f"there is no directory {path}"
        if path.is_symlink():
            what = f"{path} links to {os.readlink(path)}, which is not there"
        raise RepositoryError(f"{title}: {what}", "NOT_FOUND") from None
    except OSError as error:
        raise RepositoryError(f"{title}: cannot read {path}: {error.strerror}") from error
    if not stat.S_ISDIR(mode):
        raise RepositoryError(f"{title}: {path} is not a directory")
