"""Interpreters of models: real virtual environments, packed ones, the cache."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository import folder_cache
from moonpool.runtime.repository.archive import unpack
from moonpool.runtime.repository.environment import Environment, EnvironmentCache, resolve
from moonpool.runtime.repository.folder_cache import FolderLease

MODEL = Path("/models/m")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a real virtual environment with one module of its own."""
    root = tmp_path_factory.mktemp("made") / "env"
    venv.create(root, with_pip=False, symlinks=True)
    (next(root.glob("lib/python*/site-packages")) / "only_here.py").write_text("WHERE = __file__\n")
    return root


@pytest.fixture(scope="module")
def packed(made: Path) -> Path:
    path = made.parent / "env.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for entry in sorted(made.iterdir()):
            tar.add(entry, entry.name)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> EnvironmentCache:
    return EnvironmentCache(tmp_path / "cache")


class AllAtOnce(EnvironmentCache):
    """A cache in which all threads see that an environment is missing, and one is much the fastest.

    The others come to unpack it when the first has done so and is using it.
    """

    def __init__(self, root: Path, threads: int) -> None:
        super().__init__(root)
        self._barrier = threading.Barrier(threads, timeout=60)
        self._first = threading.Lock()
        self._in_use = threading.Event()

    def _lease(self, digest: str, turn: folder_cache._Turn) -> FolderLease | None:
        lease = super()._lease(digest, turn)
        if lease is None:
            self._barrier.wait()
        else:
            self._in_use.set()
        return lease

    def _make_once(self, digest: str, make: Callable[[Path], None], turn: folder_cache._Turn) -> None:
        if not self._first.acquire(blocking=False):
            self._in_use.wait(60)
        super()._make_once(digest, make, turn)


def facts(environment: Environment) -> dict[str, str]:
    """Return what the environment's interpreter says of itself."""
    code = (
        "import json, sys, os, only_here;"
        "print(json.dumps({'prefix': sys.prefix, 'where': only_here.WHERE, **os.environ}))"
    )
    done = subprocess.run(
        [environment.python, "-I", "-c", code], env=dict(environment.variables), capture_output=True, check=True
    )
    result: dict[str, str] = json.loads(done.stdout)
    return result


def tar_of(*names: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in names:
            tar.addfile(tarfile.TarInfo(name))
    return stream.getvalue()


class TestDirectories:
    def test_without_one_it_is_our_own_interpreter(self) -> None:
        environment = resolve(None, MODEL)

        assert environment == Environment(Path(sys.executable), {})
        environment.release()

    def test_a_virtual_environment_runs_with_its_own_modules(self, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/bin")
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        environment = resolve(str(made), MODEL)

        assert environment.python == made / "bin" / "python"
        assert environment.variables == {
            "PATH": f"{made}/bin:/bin",
            "LD_LIBRARY_PATH": f"{made}/lib",
            "VIRTUAL_ENV": str(made),
            "VIRTUAL_ENV_PROMPT": "env",
        }
        assert facts(environment)["prefix"] == str(made)
        environment.release()
        environment.release()
        assert made.is_dir()

    def test_the_model_directory_stands_for_itself(self, made: Path) -> None:
        environment = resolve("$$TRITON_MODEL_DIRECTORY/../env/", made.parent / "m")

        assert environment.python == made / "bin" / "python"

    def test_a_conda_environment_gets_condas_variables(
        self, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PATH")
        monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
        (tmp_path / "bin").mkdir()
        (tmp_path / "conda-meta").mkdir()
        (tmp_path / "bin" / "python3").symlink_to(made / "bin" / "python")

        environment = resolve(str(tmp_path), MODEL)

        assert environment.python == tmp_path / "bin" / "python3"
        assert environment.variables == {
            "PATH": f"{tmp_path}/bin:/usr/local/bin:/usr/bin:/bin",
            "LD_LIBRARY_PATH": f"{tmp_path}/lib:/opt/lib",
            "CONDA_PREFIX": str(tmp_path),
        }

    def test_a_path_to_nothing_is_named_with_what_to_do(self) -> None:
        with pytest.raises(BadEnvironment) as caught:
            resolve("$$TRITON_MODEL_DIRECTORY/none.tar.gz", MODEL)

        message = str(caught.value)
        assert message.startswith("Failed to get the canonical path for /models/m/none.tar.gz.")
        assert "EXECUTION_ENV_PATH must name" in message
        assert caught.value.code == "INVALID_ARG"
        with pytest.raises(BadEnvironment, match="Failed to get the canonical path"):
            resolve("a\0b", MODEL)

    def test_a_directory_without_an_interpreter_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadEnvironment, match=f"environment {tmp_path} has no bin/python"):
            resolve(str(tmp_path), MODEL)
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").write_text("not executable")
        with pytest.raises(BadEnvironment, match="bin/python is not a program"):
            resolve(str(tmp_path), MODEL)

    def test_an_interpreter_that_has_gone_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "python").symlink_to("/opt/gone/python3.9")

        with pytest.raises(BadEnvironment, match=r"leads to /opt/gone/python3.9, which is not there"):
            resolve(str(tmp_path), MODEL)

    def test_an_interpreter_that_does_not_know_its_path_needs_one_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "")

        with pytest.raises(BadEnvironment, match=r"sys.executable is empty"):
            resolve(None, MODEL)


class TestPacked:
    def test_a_packed_one_is_unpacked_and_runs(self, packed: Path, cache: EnvironmentCache) -> None:
        environment = resolve(str(packed), MODEL, cache=cache)

        said = facts(environment)

        root = environment.root
        assert root is not None
        assert root.parent == cache.root
        assert len(root.name) == 64
        assert said["prefix"] == str(root)
        assert said["where"].startswith(str(root))
        assert said["VIRTUAL_ENV_PROMPT"] == "env.tar.gz"
        environment.release()

    def test_a_second_model_finds_it_unpacked(
        self, packed: Path, cache: EnvironmentCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = resolve(str(packed), MODEL, cache=cache)
        monkeypatch.setattr("moonpool.runtime.repository.archive.unpack", None)

        second = resolve(str(packed), MODEL, cache=EnvironmentCache(cache.root))

        assert second.python == first.python
        first.release()
        second.release()

    def test_a_folder_around_it_is_seen_through(self, made: Path, tmp_path: Path, cache: EnvironmentCache) -> None:
        path = tmp_path / "env.tar"
        with tarfile.open(path, "w") as tar:
            tar.add(made, "my-env")

        environment = resolve(str(path), MODEL, cache=cache)

        assert environment.root is not None
        assert environment.root.name == "my-env"
        assert facts(environment)["prefix"] == str(environment.root)
        environment.release()

    def test_a_zip_keeps_links_and_permissions(self, tmp_path: Path, cache: EnvironmentCache) -> None:
        path = tmp_path / "env.zip"
        with zipfile.ZipFile(path, "w") as packed:
            link = zipfile.ZipInfo("bin/python")
            link.external_attr = 0o120777 << 16
            packed.writestr(link, "python3.9")
            program = zipfile.ZipInfo("bin/python3.9")
            program.external_attr = 0o104777 << 16
            packed.writestr(program, "#!/bin/sh\n")
            packed.writestr(zipfile.ZipInfo("lib/"), "")

        environment = resolve(str(path), MODEL, cache=cache)

        assert environment.python.is_symlink()
        assert environment.python.stat().st_mode & 0o7777 == 0o755
        environment.release()

    def test_one_without_an_interpreter_is_refused_and_not_kept_in_use(
        self, tmp_path: Path, cache: EnvironmentCache
    ) -> None:
        path = tmp_path / "env.tar"
        path.write_bytes(tar_of("bin/pip"))

        with pytest.raises(BadEnvironment, match=f"the environment {path} has no bin/python"):
            resolve(str(path), MODEL, cache=cache)

        assert len(cache.remove_unused()) == 1


class TestCache:
    def test_threads_that_come_at_once_unpack_once_and_none_waits_for_a_release(
        self, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        unpacked: list[Path] = []

        def counted(archive: io.BufferedReader, target: Path, *rest: Any) -> None:
            unpacked.append(target)
            unpack(archive, target, *rest)

        monkeypatch.setattr("moonpool.runtime.repository.environment.unpack", counted)
        cache = AllAtOnce(tmp_path / "cache", 4)
        found: list[Environment] = []
        threads = [
            threading.Thread(target=lambda: found.append(resolve(str(packed), MODEL, cache=cache)), daemon=True)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert len(found) == 4
        assert len(unpacked) == 1
        assert len({environment.python for environment in found}) == 1
        for environment in found:
            environment.release()

    def test_environments_in_use_are_not_removed(self, packed: Path, cache: EnvironmentCache) -> None:
        first = resolve(str(packed), MODEL, cache=cache)
        second = resolve(str(packed), MODEL, cache=cache)

        first.release()
        assert cache.remove_unused() == []
        assert second.python.exists()
        second.release()
        assert cache.remove_unused(older_than_s=3600) == []
        assert cache.remove_unused() == [second.root]
        assert list(cache.root.iterdir()) == []
        assert cache.remove_unused() == []

    def test_another_process_keeps_it_until_it_dies(self, packed: Path, cache: EnvironmentCache) -> None:
        code = (
            "import sys, pathlib, moonpool.runtime.repository.environment as c;"
            "lease = c.EnvironmentCache(pathlib.Path(sys.argv[1])).acquire(pathlib.Path(sys.argv[2]));"
            "print(lease.path, flush=True); sys.stdin.read()"
        )
        holder = subprocess.Popen(
            [sys.executable, "-c", code, str(cache.root), str(packed)],
            env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with holder:
            path = Path((holder.stdout or io.BytesIO()).readline().decode().strip())
            removed_while_held = cache.remove_unused()
            holder.kill()

        assert removed_while_held == []
        assert cache.remove_unused() == [path]

    def test_it_is_unpacked_again_after_it_was_removed(self, packed: Path, cache: EnvironmentCache) -> None:
        resolve(str(packed), MODEL, cache=cache).release()
        cache.remove_unused()

        again = resolve(str(packed), MODEL, cache=cache)

        assert again.python.exists()
        again.release()

    def test_a_changed_archive_is_another_environment(
        self, packed: Path, tmp_path: Path, cache: EnvironmentCache
    ) -> None:
        changed = tmp_path / "env.tar.gz"
        changed.write_bytes(packed.read_bytes() + b"\0")

        one = resolve(str(packed), MODEL, cache=cache)
        other = resolve(str(changed), MODEL, cache=cache)

        assert one.root != other.root
        one.release()
        other.release()

    def test_leftovers_of_a_killed_process_are_removed(self, packed: Path, cache: EnvironmentCache) -> None:
        first = resolve(str(packed), MODEL, cache=cache)
        first.release()
        assert first.root is not None
        cache.remove_unused()
        (cache.root / f".{first.root.name}.half" / "lib").mkdir(parents=True)

        again = resolve(str(packed), MODEL, cache=cache)

        assert {path.suffix for path in cache.root.iterdir()} == {"", ".lock", ".making"}
        again.release()

    def test_a_failure_leaves_nothing_half_done(self, tmp_path: Path, cache: EnvironmentCache) -> None:
        path = tmp_path / "env.tar"
        path.write_bytes(tar_of("bin/python", "../evil"))

        with pytest.raises(BadEnvironment, match=f"the packed environment {path}: Path contains '..'"):
            resolve(str(path), MODEL, cache=cache)

        assert {p.suffix for p in cache.root.iterdir()} == {".lock", ".making"}

    def test_a_cache_that_others_may_write_is_not_used(self, packed: Path, tmp_path: Path) -> None:
        root = tmp_path / "shared"
        root.mkdir()
        root.chmod(0o777)

        with pytest.raises(BadEnvironment, match="must belong to this user, and no other user may write to it"):
            resolve(str(packed), MODEL, cache=EnvironmentCache(root))

    def test_a_cache_that_cannot_be_made_says_how_to_choose_another(self, packed: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")

        with pytest.raises(BadEnvironment, match="XDG_CACHE_HOME names another place"):
            resolve(str(packed), MODEL, cache=EnvironmentCache(tmp_path / "file" / "cache"))

    def test_it_lies_where_caches_lie(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/someone")
        monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/them")
        assert EnvironmentCache().root == Path("/var/cache/them/moonpool/environments")
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert EnvironmentCache().root == Path("/home/someone/.cache/moonpool/environments")

    def test_the_time_of_the_last_use_counts(self, packed: Path, cache: EnvironmentCache) -> None:
        environment = resolve(str(packed), MODEL, cache=cache)
        lock = next(cache.root.glob("*.lock"))
        os.utime(lock, (0, 0))
        environment.release()

        assert time.time() - lock.stat().st_mtime < 50
        os.utime(lock, (time.time() - 100, time.time() - 100))
        assert cache.remove_unused(older_than_s=200) == []
        assert len(cache.remove_unused(older_than_s=50)) == 1
