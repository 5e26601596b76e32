"""The whole visit without a card: all stages on the fake driver, in an environment with the packages of such a machine.

`bash .ci/run card` makes the environment and runs this.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.card import prepared, results, stages
from tests.gpu import cards

ROOT = prepared.ROOT
# The folder of the environment.
VARIABLE = "MOONPOOL_TEST_CARD"
pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow]
# A fake driver has no speed, so its figures may miss their goals.
FIGURES = ("figures",)
Results = list[Mapping[str, Any]]


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of the environment."""
    place = os.environ.get(VARIABLE)
    if place is None:
        pytest.skip(f"{VARIABLE} names no environment: bash .ci/run card makes one")
    return str(Path(place, "bin", "python"))


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """A folder that contained models can read, as they can where the tree lies on a machine with a card."""
    with tempfile.TemporaryDirectory(prefix="moonpool-card-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def tree(room: Path) -> Path:
    """A copy of this tree as it travels: what git has and would have, without what it ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    copy = room / "tree"
    for file in map(os.fsdecode, filter(None, files)):
        if os.path.lexists(ROOT / file):
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, copy / file, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def brought(room: Path, python: str) -> Path:
    """The prepared folder, for the environment's version of Python."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    folder = room / "prepared"
    command = ["bash", ".ci/gpu", "prepare", str(folder), f"--python={version.stdout.strip()}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, check=True)
    return folder


class Visit:
    """One run of the script, with what it has left in its folder."""

    def __init__(self, room: Path, tree: Path, python: str, prepared_folder: Path, *wanted: str):
        library = room / "driver"
        library.mkdir(exist_ok=True)
        if not any(library.iterdir()):
            cards.build(library)
        self.folder = room / f"visit-{len([*room.glob('visit-*')])}"
        environment = {
            **os.environ,
            "PYTHON": python,
            "LD_LIBRARY_PATH": str(library),
            prepared.VARIABLE: str(prepared_folder),
            results.SHARE: "0.1",
        }
        # Nothing of this process's own environment may help.
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "MOONPOOL_PURE"):
            environment.pop(name, None)
        command = ["bash", ".ci/gpu", str(self.folder), *wanted]
        ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        self.said = ended.stdout + ended.stderr
        self.found: Results = results.read(self.folder)

    def ok(self, name: str) -> bool | None:
        """Return the result of this name."""
        (line,) = [line for line in self.found if line["name"] == name]
        return bool(line["ok"]) if line["ok"] is not None else None

    def failures(self) -> list[str]:
        """Return what failed, but for figures."""
        return [
            f"{line['stage']}: {line['name']}: {line['value']} {line['text']}"
            for line in self.found
            if line["ok"] is False and (line["stage"] not in FIGURES or line["name"].startswith("step "))
        ]

    def log(self) -> str:
        return (self.folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def bare(room: Path, tree: Path, python: str) -> Visit:
    """A visit with nothing but the tree. It comes first, since the other one puts compiled files into the tree."""
    return Visit(room, tree, python, room / "nothing", "facts", "tests/gpu/test_driver.py")


@pytest.fixture(scope="module")
def whole(bare: Visit, room: Path, tree: Path, python: str, brought: Path) -> Visit:
    """A visit with everything."""
    assert bare.found
    return Visit(room, tree, python, brought)


def test_the_prepared_folder_has_the_packages_and_all_that_is_compiled(brought: Path) -> None:
    files = [path for path in brought.rglob("*") if path.is_file()]
    built = {str(path.relative_to(brought / "built")) for path in (brought / "built").rglob("*.so*")}
    packages = {path.name for path in (brought / "packages").iterdir()}

    assert sum(path.stat().st_size for path in files) < 60 << 20
    assert built >= {
        "ipc/_copy.abi3.so",
        "runtime/schedule/_lane.abi3.so",
        "runtime/server/grpc/_http2.abi3.so",
        "stub/peers/_stub_port.abi3.so",
    }
    assert packages >= {"httptools", "orjson", "tritonclient"}
    assert any(name.startswith("rapidjson") for name in packages)
    assert any(name.startswith("posix_ipc") for name in packages)


def test_every_stage_runs_through(whole: Visit) -> None:
    steps = {step.name for stage in stages.STAGES for each in stage.rounds for step in each}

    assert {name: whole.ok(f"step {name}") for name in steps} == dict.fromkeys(steps, True)
    assert whole.failures() == [], whole.said
    assert not re.search(r"ImportError|ModuleNotFoundError", whole.log())


def test_compiled_forms_and_packages_are_in_use(whole: Visit) -> None:
    for name in ("ipc._copy", "runtime.schedule._lane", "runtime.server.grpc._http2", "stub.peers._stub_port"):
        assert whole.ok(f"compiled {name}") is True
    for process, form in (("runtime", "_lane"), ("stub", "_stub_port")):
        (line,) = [line for line in whole.found if line["name"] == f"compiled forms in use by a {process}"]
        assert form in line["value"].split()
    for package in prepared.PACKAGES:
        assert whole.ok(f"package {package}") is True


def test_without_the_folder_it_goes_on_in_pure_python(bare: Visit) -> None:
    assert bare.ok("prepared folder") is None
    assert bare.ok("compiled forms in use by a runtime") is None
    assert bare.ok("compiled forms in use by a stub") is None
    assert bare.ok("compiled runtime.schedule._lane") is None
    assert {bare.ok(f"package {package}") for package in prepared.PACKAGES} == {None}
    assert bare.ok("moonpool sandbox") is True
    assert bare.ok("step tests/gpu/test_driver.py") is True


def test_cases_that_ran_on_the_card_were_of_every_file(whole: Visit) -> None:
    (tests,) = [stage for stage in stages.STAGES if stage.name == "tests"]
    names = [line["name"] for line in whole.found if line["stage"] == "tests"]

    for step in (step for each in tests.rounds for step in each):
        assert whole.ok(f"{step.name}: cases") is True
        assert any(name.startswith(step.name) and "::" in name for name in names), step.name


def test_the_folder_has_few_files_and_the_summary_is_short(whole: Visit) -> None:
    files = [path for path in whole.folder.rglob("*") if path.is_file()]

    assert len(files) <= 8
    assert all(len(path.relative_to(whole.folder).parts) <= 2 for path in files)
    assert sum(path.stat().st_size for path in files) < 16 << 20
    assert len((whole.folder / "summary.md").read_text().splitlines()) <= 60
    assert re.search(
        r"Compiled forms in use: runtime: .*_lane.* _port.*; stub: _copy.* _stub_calls _stub_port\.",
        (whole.folder / "summary.md").read_text(),
    )
