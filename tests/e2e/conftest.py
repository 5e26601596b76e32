"""Fixtures for tests of whole runtimes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.e2e.hosting import ECHO, MODELS, hosted
from tests.inside import registry_of

import moonpool
from moonpool.runtime.repository.loading import HostingRules


@pytest.fixture(scope="module")
def completes() -> bool:
    """Return True if models of `runtime` complete their configuration, which costs every load another process.

    Modules in which it matters override this fixture.
    """
    return False


@pytest.fixture(scope="module")
def runtime(completes: bool) -> Iterator[moonpool.Runtime]:
    """Make a runtime for the whole module; its tests load and unload their models."""
    with moonpool.Runtime(drain_timeout_s=10.0) as runtime:
        registry_of(runtime).rules = HostingRules(completes=completes)
        yield runtime


class Sibling:
    """Ask another model of the same runtime all the time. It must not notice anything."""

    def __init__(self, runtime: moonpool.Runtime) -> None:
        self._runtime = runtime
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers = 0
        self.errors: list[BaseException] = []

    def _ask(self) -> None:
        x = np.arange(4, dtype=np.float32)
        while True:
            try:
                y = self._runtime.infer("sibling", {"X": x}, timeout_s=60.0)["OUT_X"]
                if not np.array_equal(x, y):
                    raise ValueError(f"{x} came back as {y}")
                self.answers += 1
            except BaseException as error:
                self.errors.append(error)
            if self._stop.wait(0.01):
                return

    def __enter__(self) -> Sibling:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def sibling_model(runtime: moonpool.Runtime) -> Iterator[None]:
    with hosted(runtime, "sibling", MODELS / "echo.py", ECHO):
        yield


@pytest.fixture
def undisturbed(
    runtime: moonpool.Runtime,
    sibling_model: None,  # noqa: ARG001 - to be loaded
) -> Iterator[Sibling]:
    """Fail the test if another model of the runtime was disturbed while it ran."""
    before = runtime.instances("sibling")
    with Sibling(runtime) as sibling:
        yield sibling
    assert sibling.errors == []
    assert sibling.answers >= 1
    assert runtime.instances("sibling") == before


@pytest.fixture
def model_file(tmp_path: Path) -> Callable[[str], Path]:
    """Write the text of a model to a file."""

    def write(text: str) -> Path:
        file = tmp_path / "model.py"
        file.write_text(text)
        return file

    return write


def furnish(root: Path) -> None:
    """Let an environment's interpreter import numpy, and one module that nobody else has."""
    site_packages = next(root.glob("lib/python*/site-packages"))
    elsewhere = str(Path(np.__file__).parents[1])
    # venv-pack refuses a .pth line that is a folder outside of the environment, so this one is code.
    (site_packages / "elsewhere.pth").write_text(f"import sys; sys.path.append({elsewhere!r})\n")
    (site_packages / "only_here.py").write_text("WHERE = __file__\n")


@pytest.fixture(scope="module")
def virtual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("virtual") / "env"
    venv.create(root, with_pip=False, symlinks=True)
    furnish(root)
    return root


@pytest.fixture(scope="module")
def conda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory as conda does: a whole Python with its own prefix, and hard links to a package that conda
    knows.
    """
    folder = tmp_path_factory.mktemp("conda")
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    package = folder / "pkgs" / "python"
    _make_python(package, version)
    names = [str(path.relative_to(package)) for path in package.rglob("*") if not path.is_dir()]
    root = folder / "env"
    shutil.copytree(package, root, symlinks=True, copy_function=os.link)
    site_packages = root / "lib" / version / "site-packages"
    site_packages.mkdir()
    (root / "lib" / version / "dist-packages").symlink_to("site-packages")  # the folder that Debian's Python searches
    (package / "info").mkdir()
    (package / "info" / "files").write_text("\n".join(names))
    record = {"name": "python", "version": version.removeprefix("python"), "url": "", "files": names}
    (root / "conda-meta").mkdir()
    (root / "conda-meta" / "history").touch()
    (root / "conda-meta" / f"{version}.json").write_text(
        json.dumps(record | {"link": {"source": str(package), "type": 1}})
    )
    furnish(root)
    return root


def _make_python(root: Path, version: str) -> None:
    """Make a Python that can be moved: program, library and standard library."""
    unneeded = shutil.ignore_patterns(
        "site-packages",
        "dist-packages",
        "test",
        "idlelib",
        "lib2to3",
        "ensurepip",
        "config-*",
        "pydoc_data",
        "tkinter",
        "turtledemo",
        "__pycache__",
    )
    shutil.copytree(sysconfig.get_path("stdlib"), root / "lib" / version, ignore=unneeded)
    (root / "bin").mkdir()
    shutil.copy(os.path.realpath(sys.executable), root / "bin" / version)
    (root / "bin" / "python").symlink_to(version)
    for library in Path(sysconfig.get_config_var("LIBDIR")).glob(f"lib{version}*.so*"):
        shutil.copy(library, root / "lib", follow_symlinks=False)
    # Without its symbols for debuggers it is half as large, and packed in half the time.
    if strip := shutil.which("strip"):
        files = [path for path in root.rglob("*.so*") if not path.is_symlink()]
        subprocess.run([strip, "--strip-debug", *files], check=False)
