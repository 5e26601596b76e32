"""Environments that uv and pip build from lists of packages, all of them from a folder of wheels."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.waiting import wait_until
from tests.wheels import variables, write_numpy, write_wheel

import moonpool
from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository import environment_builder
from moonpool.runtime.repository.environment import EnvironmentCache, resolve

TOOLS = ("uv", "pip")


# pip and uv start interpreters and unpack wheels, on a busy machine.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of wheels: numpy, and `greeting`, which has a script."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_numpy(folder)
    entry = "[console_scripts]\ngreet = greeting:main\n"
    code = "def main():\n    print('hello')\n"
    write_wheel(folder, "greeting", {"greeting/__init__.py": code, "greeting-1.dist-info/entry_points.txt": entry})
    return folder


@pytest.fixture(params=TOOLS)
def tool(request: pytest.FixtureRequest, wheels: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either tool, without an index."""
    if request.param == "pip":
        monkeypatch.setattr(environment_builder, "_uv", lambda: None)
    for name, value in variables(wheels).items():
        monkeypatch.setenv(name, value)
    return str(request.param)


@pytest.fixture
def cache(tmp_path: Path) -> EnvironmentCache:
    return EnvironmentCache(tmp_path / "cache")


def requirements(folder: Path, text: str) -> Path:
    path = folder / "requirements.txt"
    path.write_text(text)
    return path


@pytest.mark.usefixtures("tool")
@pytest.mark.promise(
    "Environments", "An environment is built once from its list, by uv or by pip, and its scripts run."
)
def test_an_environment_is_built_once(cache: EnvironmentCache, tmp_path: Path) -> None:
    path = requirements(tmp_path, "greeting==1\n")
    first = resolve(str(path), tmp_path, cache=cache)
    assert first.root is not None
    (first.root / "mark").touch()
    second = resolve(str(path), tmp_path, cache=cache)

    said = subprocess.run([first.root / "bin" / "greet"], capture_output=True, text=True, check=True, timeout=60)

    assert said.stdout == "hello\n"
    assert (second.root, (first.root / "mark").exists()) == (first.root, True)
    assert [(each.path, each.is_used) for each in cache.folders()] == [(first.root, True)]
    first.release()
    second.release()
    assert [each.is_used for each in cache.folders()] == [False]
    assert cache.remove_unused() == [first.root]
    assert cache.folders() == []


@pytest.mark.usefixtures("tool")
@pytest.mark.promise(
    "Environments",
    "An environment that cannot be built fails the load with the tool's last words, and nothing of it stays.",
)
@pytest.mark.parametrize("text", ["nowhere==1\n", "greeting==2\n", "greeting==1 --hash=sha256:{}\nnumpy==1 --hash=sha256:{}\n"])  # fmt: skip
def test_what_cannot_be_built_is_told(cache: EnvironmentCache, tmp_path: Path, text: str) -> None:
    path = requirements(tmp_path, text.replace("{}", "0" * 64))

    with pytest.raises(BadEnvironment, match=r"no environment can be built of .*ended with [12]: .") as caught:  # fmt: skip
        resolve(str(path), tmp_path, cache=cache)

    assert re.search("nowhere|greeting|hash", str(caught.value), re.IGNORECASE)
    assert cache.folders() == []
    assert [each.suffix for each in cache.root.iterdir() if each.is_dir()] == []


@pytest.mark.usefixtures("tool")
@pytest.mark.promise("Environments", "The hashes of a list are compared with what is installed.")
def test_hashes_are_compared(cache: EnvironmentCache, tmp_path: Path, wheels: Path) -> None:  # fmt: skip
    digests = {path.name.split("-")[0]: hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels.iterdir()}
    lines = [f"{name}==1 --hash=sha256:{digest}" for name, digest in digests.items()]

    resolve(str(requirements(tmp_path, "\n".join(lines))), tmp_path, cache=cache).release()

    write_wheel(wheels, "greeting", {"greeting/__init__.py": "another = 1\n"})
    cache.remove_unused()
    with pytest.raises(BadEnvironment, match=r"(?i)hash"):
        resolve(str(requirements(tmp_path, "\n".join(lines))), tmp_path, cache=cache)


@pytest.mark.usefixtures("tool")
@pytest.mark.promise(
    "Environments",
    "For a contained model nothing of a list is compiled, as that runs code of strangers outside its sandbox.",
)
def test_sources_are_not_built_for_contained_models(cache: EnvironmentCache, tmp_path: Path, wheels: Path) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "hostile-1"
    folder.mkdir()
    (folder / "setup.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: hostile\nVersion: 1\n")
    subprocess.run(["tar", "-czf", wheels / "hostile-1.tar.gz", "-C", tmp_path, "hostile-1"], check=True)

    with pytest.raises(BadEnvironment, match="hostile"):
        resolve(str(requirements(tmp_path, "hostile==1\n")), tmp_path, cache=cache, only_wheels=True)

    assert not ran.exists()


@pytest.mark.usefixtures("tool")
@pytest.mark.promise("Environments", "For a contained model …")
def test_no_code_of_wheels_runs_for_contained_models(cache: EnvironmentCache, tmp_path: Path, wheels: Path) -> None:
    ran = tmp_path / "ran"
    starts = f"import os; open({str(ran)!r}, 'w').close()\n"
    write_wheel(wheels, "hostile", {"hostile.pth": starts, "hostile.py": "", "sitecustomize.py": starts})

    environment = resolve(str(requirements(tmp_path, "hostile==1\n")), tmp_path, cache=cache, only_wheels=True)

    assert not ran.exists()
    subprocess.run([environment.python, "-c", ""], check=True)
    assert ran.exists()
    environment.release()


def test_many_that_need_it_at_once_build_it_once(
    tool: str, cache: EnvironmentCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "moonpool")
    path = requirements(tmp_path, "greeting\n")
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(str(path), tmp_path, cache=cache).root)) for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert len(set(found)) == 1
    assert len(found) == 4
    assert caplog.text.count(f"builds the environment of {path} with {tool}") == 1


@pytest.mark.promise("Environments", "Without uv, a list for another Python and a lock say that they need it.")  # fmt: skip
def test_what_only_uv_can_do_says_so(cache: EnvironmentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_builder, "_uv", lambda: None)
    script = tmp_path / "model.py"
    script.write_text("# /// script\n# requires-python = '<3'\n# ///\n")
    with pytest.raises(BadEnvironment, match=r"is for Python <3, and this is .* another Python needs uv: .*pip install"):  # fmt: skip
        resolve(str(script), tmp_path, cache=cache)
    (tmp_path / "uv.lock").write_text("version = 1\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\n')
    with pytest.raises(BadEnvironment, match=r"uv\.lock needs uv: "):
        resolve(str(tmp_path / "uv.lock"), tmp_path, cache=cache)


@pytest.mark.parametrize("only_wheels", [False, True])
def test_a_lock_is_installed_with_its_hashes(
    cache: EnvironmentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_wheels: bool
) -> None:
    """A lock of the packages of a folder, which uv makes itself. Of a contained model, uv gets no settings."""
    # The user's cache of uv has nothing of this.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    write_numpy(wheels)
    write_wheel(wheels, "greeting", {"greeting/__init__.py": "word = 'locked'\n"})
    project = tmp_path / "pyproject.toml"
    version = ".".join(map(str, sys.version_info[:2]))
    project.write_text(
        f'[project]\nname = "x"\nversion = "1"\nrequires-python = "=={version}.*"\n'
        f'dependencies = ["greeting", "numpy"]\n[tool.uv]\nno-index = true\nfind-links = ["{wheels}"]\n'
    )
    uv = Path(sys.executable).with_name("uv")
    lock = [uv if uv.exists() else "uv", "lock", "--offline", "--python", sys.executable, "--project", str(tmp_path)]
    subprocess.run(lock, check=True, capture_output=True)

    chosen = tmp_path / "chosen"
    with project.open("a") as file:
        file.write(f'cache-dir = "{chosen}"\n')

    environment = resolve(str(tmp_path / "uv.lock"), tmp_path, cache=cache, only_wheels=only_wheels)

    assert chosen.exists() == (not only_wheels)
    said = subprocess.run(
        [environment.python, "-c", "import greeting; print(greeting.word)"], capture_output=True, text=True, check=True
    )
    assert said.stdout == "locked\n"
    environment.release()


@pytest.mark.promise("Environments", "A runtime that is closed ends the builds of its environments.")
def test_the_end_of_a_runtime_ends_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tool, begun = tmp_path / "uv", tmp_path / "begun"
    tool.write_text(f"#!/bin/sh\ntouch {begun}\nexec sleep 100000\n")
    tool.chmod(0o755)
    monkeypatch.setattr(environment_builder, "_uv", lambda: str(tool))
    (tmp_path / "model.py").write_text("class M:\n    def __call__(self, X):\n        return {}\n")
    path = requirements(tmp_path, "numpy\n")
    failures: list[moonpool.MoonpoolError] = []

    def load() -> None:
        try:
            runtime.load("m", tmp_path / "model.py", options={"EXECUTION_ENV_PATH": str(path)})
        except moonpool.MoonpoolError as error:
            failures.append(error)

    with moonpool.Runtime() as runtime:
        loading = threading.Thread(target=load)
        loading.start()
        wait_until(begun.exists, 60.0)
    loading.join(60.0)

    assert not loading.is_alive()
    assert "no result, as the load was given up" in str(failures[0])
