"""Several model repositories as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.runtime.repository import ModelRepository, RepositoryError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from moonpool.runtime.repository import ModelDirectory


class ModelRepositories:
    """What a `ModelRepository` is, for several of them. A name in two of them is found in neither, as in Triton."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Raises `RepositoryError` for a path that is no directory."""
        self._repositories = [ModelRepository(path) for path in paths]

    def models(self) -> list[str]:
        """The names of the directories of all repositories, each once, sorted."""
        return sorted({name for each in self._repositories for name in each.models()})

    def repeated(self) -> set[str]:
        """The names that are in more than one repository."""
        seen: set[str] = set()
        repeated: set[str] = set()
        for each in self._repositories:
            names = set(each.models())
            repeated |= seen & names
            seen |= names
        return repeated

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
