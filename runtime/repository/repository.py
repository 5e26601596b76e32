"""Model repositories, read as Triton reads them. Nothing is started here. Those in the cloud are read from copies on
disk.

Names, links and files in a repository are not trusted to be what they seem: a model's name must be a plain name, a path
with a loop of links is refused before anything in it is read, and configurations are read with limits.

Theory of operation. A repository in the cloud is listed at most once in `_KEPT_S`, as clients and the page may ask for
the index at any rate. `_listing` is held meanwhile, so threads that come together ask the store once. Loads do not use
that listing.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from moonpool.runtime.log import RuntimeLog
from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.model.config.limits import ConfigLimits
from moonpool.runtime.model.config.model import (
    FILENAMES,
    FILENAMES_ELSEWHERE,
    MODEL_FILENAME,
    ConfigError,
    ModelConfig,
    Raw,
    Source,
    minimal,
    name_problem,
    normalise,
)
from moonpool.runtime.model.config.schema import suggestion
from moonpool.runtime.model.config.templates import Fill
from moonpool.runtime.model.source import split_name
from moonpool.runtime.process.files import RepositoryError, check_no_loop, directories
from moonpool.runtime.repository.cloud_address import is_address, is_hub_root, read_address
from moonpool.runtime.repository.cloud_copies import CloudCopies
from moonpool.runtime.repository.cloud_store import CloudStore
from moonpool.runtime.repository.folder_cache import FolderLease, cache_root
from moonpool.runtime.repository.hub_model import HubFiles, HubModel, as_text, described, is_model, read_grants
from moonpool.runtime.repository.hub_store import HubStore

__all__ = ["ModelDirectory", "ModelRepository", "NoVersion", "RepositoryError", "is_version"]

_log = RuntimeLog("moonpool")

CONFIG_FILENAME = "config.pbtxt"
# The folder of a model with configurations of other names.
_CONFIGS = "configs"
# The time for which the names of the models at an address are kept.
_KEPT_S = 2.0


class NoVersion(RepositoryError):
    """A model without a version that its policy picks."""


class ModelRepository:
    """A directory whose subdirectories are models.

    Nothing is kept: each call reads the disk, so a changed repository needs no new object.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        _check_directory(self.path, "model repository")

    def models(self) -> list[str]:
        """List the names of the directories, sorted, without hidden ones.

        A directory whose name no model can have is listed, too. `find` says what is wrong with it.
        """
        return [name for name in directories(self.path) if not name.startswith((".", "__"))]

    def find(self, name: str) -> ModelDirectory:
        """Return the directory of a model. Raises `RepositoryError`, with NOT_FOUND if there is none."""
        if problem := name_problem(name):
            raise RepositoryError(problem)
        path = self.path / name
        if not os.path.lexists(path):
            raise RepositoryError(f"no model '{name}' in the repository {self.path}", "NOT_FOUND")
        return ModelDirectory(path)


@contextlib.contextmanager
def suggesting(name: str, names: Callable[[], Iterable[str]]) -> Iterator[None]:
    """Add the name that was meant to an error that a model of this name is missing.

    Not for the requests of strangers.
    """
    try:
        yield
    except RepositoryError as error:
        if error.code == "NOT_FOUND":
            with contextlib.suppress(RepositoryError):
                error.hint = suggestion(name, names())
        raise


class CloudRepository:
    """A repository at an address, such as `s3://bucket/models`. Any thread may call any method, and waits for the
    network.
    """

    def __init__(self, url: str) -> None:
        """Raise `RepositoryError` for an address that cannot be read, or without the package for it."""
        self._store = CloudStore(read_address(url, os.environ))
        self._copies = CloudCopies(url, os.environ, store=self._store)
        self.path = self._copies.url
        # Patterns of the variables with credentials.
        self.secrets = self._copies.secrets
        self._listing = threading.Lock()
        # The names, and the error instead of them if there is one, and the time from which they are too old.
        self._names: list[str] = []
        self._error: RepositoryError | None = None
        self._old_from = 0.0
        self.models()

    def models(self) -> list[str]:
        """List the names of the folders, sorted, without hidden ones; as they were `_KEPT_S` ago at most."""
        with self._listing:
            if time.monotonic() >= self._old_from:
                self._error = None
                try:
                    names = self._store.models(self._copies.stop)
                    self._names = [name for name in names if not name.startswith((".", "__"))]
                except RepositoryError as error:
                    self._error = error
                self._old_from = time.monotonic() + _KEPT_S
            if self._error is not None:
                raise RepositoryError(str(self._error), self._error.code)
            return self._names.copy()

    def find(self, name: str) -> ModelDirectory:
        """Return a copy of a model as it is now. Raises `RepositoryError`, with NOT_FOUND if there is none."""
        return _copied(self._copies, name)

    def give_up(self) -> None:
        """Have the copies that are being made now fail soon."""
        self._copies.give_up()

    def close(self) -> None:
        """Close the connections. Copies in use stay."""
        self._copies.close()


class HubRepository:
    """A model on the Hugging Face Hub, as a repository with that one model. Any thread may call any method.

    Its revision is resolved to a commit once. So a poll does not follow a branch.
    """

    def __init__(self, url: str) -> None:
        """Raise `RepositoryError` for an address that cannot be read, or without the package for it."""
        address = read_address(url, os.environ)
        self.path = address.url
        repo = address.path.partition("@")[0]
        self.name = repo.rpartition("/")[2]
        self.secrets = address.secrets
        self.store = HubStore(address, cache_root() / "hub")
        self._copies = CloudCopies(f"hf://{repo}", os.environ, store=self.store)
        self._told: set[str] = set()

    @property
    def is_model(self) -> bool:
        """Return True if there is one model at the address, and no folder of models. Raises `RepositoryError`."""
        _, listing = self.store.find(self._copies.stop)
        return is_model(listing)

    def models(self) -> list[str]:
        """Return the name of the model."""
        return [self.name]

    def describe(self, said: Mapping[str, str]) -> HubModel:
        """Return what the repository is with these options of the operator. Raises `RepositoryError`."""
        return described(self.store, read_grants(said), self._copies.stop)

    def find(self, name: str, said: Mapping[str, str] | None = None) -> ModelDirectory:
        """Return a copy of the model. Raises `RepositoryError`, with NOT_FOUND for another name."""
        if name != self.name:
            raise RepositoryError(f"no model '{name}' at {self.path}, which is the model '{self.name}'", "NOT_FOUND")
        if problem := name_problem(name):
            raise RepositoryError(problem)
        model = self.describe(said or {})
        if model.config not in self._told:
            self._told.add(model.config)
            _log.info("%s", as_text(model))
            for remark in model.remarks:
                _log.warning("%s: %s", model.address, remark)
        return self.copy(model)

    def copy(self, model: HubModel) -> ModelDirectory:
        """Return a copy of a model as it was described. Raises `RepositoryError`."""
        lease = self._copies.of(HubFiles(self.store, model)).acquire(self.name)
        return ModelDirectory(lease.path / self.name, lease)

    def give_up(self) -> None:
        """Have the copies that are being made now fail soon."""
        self._copies.give_up()

    def close(self) -> None:
        """Give copies up that are being made. Those in use stay."""
        self._copies.give_up()


def _copied(copies: CloudCopies, name: str) -> ModelDirectory:
    if problem := name_problem(name):
        raise RepositoryError(problem)
    lease = copies.acquire(name)
    return ModelDirectory(lease.path / name, lease)


def repository_at(place: str | os.PathLike[str]) -> ModelRepository | CloudRepository | HubRepository:
    """Return the repository in a folder or at an address. Raises `RepositoryError`."""
    if isinstance(place, str) and is_address(place):
        if is_hub_root(place):
            hub = HubRepository(place)
            if hub.is_model:
                return hub
        return CloudRepository(place)
    return ModelRepository(place)


class ModelDirectory:
    """One model of a repository: `config.pbtxt` and the version directories.

    `lease` keeps a copy of a model in the cloud on disk for as long as this object, or until it is released.
    """

    def __init__(self, path: str | os.PathLike[str], lease: FolderLease | None = None) -> None:
        self.path = Path(os.path.abspath(path))
        self.lease = lease
        # The name of the configuration that replaces `config.pbtxt`; "" for none.
        self.config_name = ""
        # Values for the places of a template.
        self.fill: Fill | None = None
        self.name = self.path.name
        _check_directory(self.path, f"model '{self.name}'")
        check_no_loop(self.path, f"model '{self.name}'")

    @property
    def config_file(self) -> Path:
        """The file of the configuration, which need not exist: as in Triton, `configs/<name>.pbtxt` if the model has
        it.
        """
        named = self.path / _CONFIGS / f"{self.config_name}.pbtxt"
        if self.config_name and os.path.lexists(named):
            return named
        return self.path / CONFIG_FILENAME

    @property
    def has_config(self) -> bool:
        """True if there is a file of the configuration, whatever it is."""
        return os.path.lexists(self.config_file)

    def read_config(self, limits: ConfigLimits | None = None) -> tuple[Raw, Source]:
        """Return the raw configuration of the file, or without a file the minimal one, and its source.

        As in Triton, a missing name is the directory's, and a missing backend follows from the file of the model:
        `model.py`, `model.onnx`, `model.pt`. `limits` are the usual ones by default. Raises `ConfigError`.
        """
        file = self.config_file
        if not self.has_config:
            return minimal(self.name, self.implied_backend() or self._nothing_there(file)), Source()
        raw, source = pbtxt.read_with_source(file, self.path, limits, self.fill)
        raw["name"] = raw["name"] or self.name
        if raw["name"] != self.name:
            what = f"unexpected directory name '{self.name}' for model '{raw['name']}'"
            source.mistake("name", f"{what}, directory name must equal model name")
            raw["name"] = self.name
        unsaid = not (raw["backend"] or raw["platform"] or raw["default_model_filename"])
        if unsaid and (backend := self.implied_backend()):
            raw = normalise({**raw, "backend": backend}, source)
        return raw, source

    def config(self, *, partial: bool = False) -> ModelConfig:
        """Return the checked configuration. `partial` is that of `ModelConfig.from_dict`."""
        raw, source = self.read_config()
        return ModelConfig.from_dict(raw, source=source, partial=partial)

    def versions(self) -> list[int]:
        """List the versions, ascending: directories whose name is a number, 0 included.

        Other names are ignored, also numbers with leading zeros, which `ignored` lists.
        """
        return sorted(int(name) for name in directories(self.path) if is_version(name))

    def ignored(self) -> list[str]:
        """List directories that look like versions but are not, for a warning."""
        names = (name for name in directories(self.path) if not is_version(name))
        return [name for name in names if name.isdigit()]

    def chosen_versions(self, config: ModelConfig) -> list[int]:
        """Return the versions that the policy of the configuration picks, ascending. Raises `NoVersion`."""
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
        """Return the absolute path of a version's Python file, which may name a model in it (`two.py:A`).

        Raises `RepositoryError` unless the file can be read.
        """
        path = self.version_directory(version) / filename
        file, _ = split_name(path)
        if not os.path.isfile(file):
            raise RepositoryError(f"Python model file not found in '{file}'", "NOT_FOUND")
        if not os.access(file, os.R_OK):
            raise RepositoryError(f"the model file '{file}' cannot be read: check its permissions")
        return path

    def implied_backend(self) -> str:
        """Return the backend that the files of the versions imply; "" for none."""
        folders = [self.version_directory(version) for version in self.versions()]
        for backend, filename in FILENAMES.items():
            # A program that PyTorch exported is `model.pt2`.
            for name in (filename, f"{filename}2") if backend == "pytorch" else (filename,):
                if any(os.path.exists(folder / name) for folder in folders):
                    return backend
        for backend, filename in FILENAMES_ELSEWHERE.items():
            if any(os.path.exists(folder / filename) for folder in folders):
                return backend
        return ""

    def _nothing_there(self, file: Path) -> NoReturn:
        versions = self.versions()
        if versions:
            missing = self.version_directory(versions[-1]) / MODEL_FILENAME
            raise RepositoryError(f"Python model file not found in '{missing}' (and there is no {file})", "NOT_FOUND")
        what = f"there is neither this file nor a version directory such as {self.path / '1'}"
        if (self.path / MODEL_FILENAME).exists():
            what += f"; move {MODEL_FILENAME} there"
            if self.path.name.isdecimal():
                what += f", or name {self.path.absolute().parent.parent} as the repository if this is a model's version"
        raise ConfigError(what, file=str(file))


def configurations(folder: Path) -> list[str]:
    """List the files in a model's folder that have its configurations, as paths in the folder."""
    try:
        names = os.listdir(folder / _CONFIGS)
    except OSError:
        names = []
    return [CONFIG_FILENAME, *(f"{_CONFIGS}/{name}" for name in names if name.endswith(".pbtxt"))]


def is_version(name: str) -> bool:
    """Tell if a folder of this name is a version of its model."""
    # Eighteen digits fit the 64-bit number that a version is.
    return re.fullmatch(r"0|[1-9][0-9]{0,17}", name) is not None


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


class Listing(NamedTuple):
    """The models of several repositories, those that are in more than one, and the errors of unreadable
    repositories.
    """

    names: list[str]
    repeated: set[str]
    errors: list[RepositoryError]


class ModelRepositories:
    """Several repositories as one. As in Triton, a name that is in two of them is found in neither.

    It also finds models at addresses of their own, which are in none of them. Thread-safe.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Raise `RepositoryError` for a path that is no directory, and for an address that cannot be listed."""
        self._repositories = [repository_at(path) for path in paths]
        clouds = [each for each in self._repositories if not isinstance(each, ModelRepository)]
        self._clouds = clouds
        # Folders of models at addresses of their own, and models of the Hub, by address, and the lock for them.
        self._apart: dict[str, CloudCopies] = {}
        self._hub: dict[str, HubRepository] = {}
        self._lock = threading.Lock()
        # The name of the configuration that replaces `config.pbtxt` of each model; "" for none.
        self.config_name = ""
        # Values for the places of templates, for a check of the models.
        self.fill: Fill | None = None

    def __len__(self) -> int:
        return len(self._repositories)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Patterns of the variables with credentials that were used until now, which no model may see."""
        return tuple({pattern for each in self._places() for pattern in each.secrets})

    def _places(self) -> list[CloudRepository | CloudCopies | HubRepository]:
        with self._lock:
            return [*self._clouds, *self._apart.values(), *self._hub.values()]

    def give_up(self) -> None:
        """Have the copies of models that are being made now fail soon."""
        for each in self._places():
            each.give_up()

    def close(self) -> None:
        """Close the connections to the cloud. Copies in use stay."""
        for each in self._places():
            each.close()

    def find_at(self, address: str, said: Mapping[str, str] | None = None) -> ModelDirectory:
        """Return a copy of the model at an address, such as `s3://bucket/models/m`, as it is now. Waits for the
        network.

        `said` are the operator's options for it. Raises `RepositoryError`, with NOT_FOUND if there is nothing.
        """
        if is_hub_root(address):
            hub = HubRepository(address)
            with self._lock:
                # The last one has the commit that the revision is now.
                self._hub[address] = hub
            return hub.find(hub.name, said)
        folder, _, name = address.rstrip("/").rpartition("/")
        if folder.endswith((":/", "://")):
            # Not the address itself, which may hold a password.
            raise RepositoryError("a model's address ends in its folder, as s3://bucket/models/m")
        with self._lock:
            copies = self._apart.get(folder)
        if copies is None:
            made = CloudCopies(folder, os.environ)
            with self._lock:
                # Two threads may have come here. The copies of the second one were not used, and have no connection
                # yet.
                copies = self._apart.setdefault(folder, made)
        return _copied(copies, name)

    def models(self) -> list[str]:
        """List the names of the directories of all repositories, each once, sorted. Raises `RepositoryError`."""
        listing = self.listing()
        for error in listing.errors:
            raise error
        return listing.names

    def listing(self) -> Listing:
        """List all repositories. If one cannot be read, the others are still listed."""
        seen: set[str] = set()
        repeated: set[str] = set()
        errors = []
        for each in self._repositories:
            try:
                names = set(each.models())
            except RepositoryError as error:
                errors.append(error)
                continue
            repeated |= seen & names
            seen |= names
        return Listing(sorted(seen), repeated, errors)

    def describe(self, name: str, said: Mapping[str, str]) -> HubModel | None:
        """Return what a model of the Hub is, before it is copied; None for a model of another repository. Raises
        `RepositoryError`.
        """
        for each in self._repositories:
            if isinstance(each, HubRepository) and each.name == name:
                return each.describe(said)
        return None

    def find(self, name: str, said: Mapping[str, str] | None = None) -> ModelDirectory:
        """Return the directory of a model. Raises `RepositoryError`, with NOT_FOUND if there is none.

        `said` are the operator's options for it.
        """
        found = []
        missing = RepositoryError(f"no model '{name}': there is no repository", "NOT_FOUND")
        for each in self._repositories:
            try:
                found.append(each.find(name, said) if isinstance(each, HubRepository) else each.find(name))
            except RepositoryError as error:
                if error.code != "NOT_FOUND":
                    raise
                missing = error
        if not found:
            if len(self._repositories) < 2:
                raise missing
            shown = ", ".join(str(each.path) for each in self._repositories)
            raise RepositoryError(f"no model '{name}' in any of the repositories {shown}", "NOT_FOUND")
        if len(found) > 1:
            shown = " and ".join(str(directory.path) for directory in found)
            raise RepositoryError(f"model '{name}' is not unique across all repositories: {shown}")
        found[0].config_name, found[0].fill = self.config_name, self.fill
        return found[0]
