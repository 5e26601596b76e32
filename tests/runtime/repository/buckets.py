"""Stores of objects in memory, in the form in which fsspec has them. They can misbehave."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.repository import cloud_store
from moonpool.runtime.repository.cloud_address import CloudAddress


class Bucket:
    """Objects by their whole names. `reads` has the names of those that were read, one for each question."""

    async_impl = False

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.reads: list[str] = []
        self.lists = 0
        # Called before each answer to a question for content.
        self.before_read: Callable[[str], object] = lambda _: None
        # What each listed object says of itself, beside its name, type and size.
        self.facts: Callable[[bytes], dict[str, object]] = lambda content: {"ETag": hashlib.md5(content).hexdigest()}

    def put(self, base: str, files: dict[str, bytes]) -> None:
        self.objects |= {f"{base}/{path}": content for path, content in files.items()}

    # As in fsspec

    def invalidate_cache(self) -> None:
        pass

    def _infos(self) -> Iterator[dict[str, Any]]:
        for name, content in list(self.objects.items()):
            yield {"name": name, "type": "file", "size": len(content), **self.facts(content)}

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        assert detail
        self.lists += 1
        below = [each for each in self._infos() if each["name"].startswith(f"{path}/")]
        if not below:
            raise FileNotFoundError(path)
        rests = {each["name"].removeprefix(f"{path}/").split("/")[0]: each for each in below}
        return [
            each if each["name"] == f"{path}/{name}" else {"name": f"{path}/{name}", "type": "directory", "size": 0}
            for name, each in rests.items()
        ]

    def find(self, path: str, detail: bool = True, withdirs: bool = True) -> dict[str, dict[str, Any]]:
        assert detail
        assert withdirs
        self.lists += 1
        return {each["name"]: each for each in self._infos() if each["name"].startswith(f"{path}/")}

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        self.before_read(path)
        self.reads.append(path)
        try:
            return self.objects[path][start:end]
        except KeyError:
            raise FileNotFoundError(path) from None


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """Return the store behind all addresses. Copies of its models lie below `tmp_path`."""
    store = Bucket()

    def made(_: CloudAddress) -> Bucket:
        return store

    monkeypatch.setattr(cloud_store, "_file_system", made)
    monkeypatch.setattr(cloud_store, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return store


NEVER = threading.Event()
