"""Several model repositories as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moonpool.runtime.repository import ModelRepository, RepositoryError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from moonpool.runtime.repository import ModelDirectory


class Listing(NamedTuple):
    """The names of the models in several repositories, the names in more than one, and errors of unreadable ones."""

    names: list[str]
    repeated: set[str]
    errors: list[RepositoryError]


class ModelRepositories:
    """What a `ModelRepository` is, for several of them. A name in two of them is found in neither, as in Triton."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Raises `RepositoryError` for a path that is no directory."""
        self._repositories = [ModelRepository(path) for path in paths]

    def models(self) -> list[str]:
        """The names of the directories of all repositories, each once, sorted. Raises `RepositoryError`."""
        listing = self.listing()
        for error in listing.errors:
            raise error
        return listing.names

    def listing(self) -> Listing:
        """List all repositories. If one cannot be read, the others are listed all the same."""
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

    def find(self, name: str) -> ModelDirectory:
        """The directory of a model. Raises `RepositoryError`, NOT_FOUND where there is none."""
        found = []
        missing = RepositoryError(f"no model '{name}': there is no repository", "NOT_FOUND")
        for each in self._repositories:
            try:
                found.append(each.find(name))
            except RepositoryError as error:
                if error.code != "NOT_FOUND":
                    raise
                missing = error
        if not found:
            if len(self._repositories) < 2:
                raise missing
            shown = ", ".join(str(each.path) for each in self._repositories)
            raise RepositoryError(
                f"no model '{name}' in any of the repositories {shown}", "NOT_FOUND"
            )
        if len(found) > 1:
            shown = " and ".join(str(directory.path) for directory in found)
            raise RepositoryError(f"model '{name}' is not unique across all repositories: {shown}")
        return found[0]
