"""The metadata of the package, and the files of a source distribution."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.process.extras import EXTRAS, how_to_install

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.promise("The package", "The package names its license and brings it along.")
def test_the_license_is_told_and_is_there() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    if (ROOT / "docs").is_dir():
        text = (ROOT / PROJECT["license-files"][0]).read_text()
        assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]


@pytest.mark.promise("The package", "The package names its license and …")
def test_an_installed_package_brings_its_license() -> None:
    # An editable installation has the metadata of the time when it was installed.
    installed = [
        found
        for found in metadata.distributions(name="moonpool")
        if (record := found.read_text("RECORD")) and "moonpool/__init__.py" in record
    ]
    if not installed:
        pytest.skip("moonpool is not installed here")
    for found in installed:
        # A released wheel names those of what is inside, too.
        assert found.metadata["License-Expression"].partition(" AND ")[0] == "Apache-2.0"
        assert "Apache License" in (found.read_text("licenses/LICENSE") or "")
        assert set(found.metadata.get_all("Classifier") or []) == set(PROJECT["classifiers"])


def test_an_installed_package_has_the_commands_and_no_suites() -> None:
    records = [found.read_text("RECORD") or "" for found in metadata.distributions(name="moonpool")]
    installed = [each for each in records if "moonpool/__init__.py" in each]
    if not installed:
        pytest.skip("moonpool is not installed here")
    for record in installed:
        assert "moonpool/benchmarks/commands/bench.py" in record
        assert not re.search(r"moonpool/benchmarks/(models|results|suites)/", record)


def test_classifiers_are_for_the_pythons_that_are_required() -> None:
    versions = [
        classifier.rsplit(" :: ", 1)[1]
        for classifier in PROJECT["classifiers"]
        if classifier.startswith("Programming Language :: Python :: 3.")
    ]

    assert f">={versions[0]}" == PROJECT["requires-python"]
    # The index reads `license`, and refuses a package with both.
    assert not [each for each in PROJECT["classifiers"] if each.startswith("License ::")]


@pytest.mark.promise(
    "The package",
    "If an error advises to install something, the command works as pasted: it names the "
    "packages and the interpreter to install them into.",
)
def test_advice_names_the_packages_of_the_extras() -> None:
    declared = PROJECT["optional-dependencies"]

    assert {name: tuple(declared[name]) for name in EXTRAS} == EXTRAS
    command = shlex.split(how_to_install("serve"))
    assert command == [sys.executable, "-m", "pip", "install", *declared["serve"]]


@pytest.mark.promise("The package", "If an error advises to …")
def test_nobody_is_told_to_install_moonpool_from_the_index() -> None:
    if not (ROOT / "docs").is_dir():
        pytest.skip("only the tests are here, without the documents")
    files = [
        path
        for pattern in ("*.md", "docs/**/*.md", "examples/**/*", "benchmarks/*.md", "src/**/*.py")
        for path in ROOT.glob(pattern)
        if path.suffix in (".md", ".pbtxt", ".py")
    ]
    files += [path for folder in ("ipc", "stub", "runtime", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    # A path, an extra of a path, or a package whose name begins with moonpool is allowed.
    advice = re.compile(r"pip install[^\n]*[ '\"]moonpool(?![\w/-])")

    assert [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in files
        if (found := advice.search(path.read_text(encoding="utf-8")))
    ] == []


@pytest.mark.promise(
    "The package",
    "A source distribution is the repository, links included, without what builds and tests "
    "leave. Wheels are built from it, and its tests are run.",
)
@pytest.mark.slow
def test_a_source_distribution_is_the_repository(tmp_path: Path) -> None:
    if not (ROOT / "setup.py").exists():
        pytest.skip("only the tests are here, without the sources")
    if int(metadata.version("setuptools").partition(".")[0]) < 80:
        pytest.skip("setuptools is older than 80: install the group `test`")
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=_left_behind)
    expected = _files(tree)
    # Builds, tests and fuzzing leave such files in a tree.
    for litter in (
        "ipc/__pycache__/x.pyc",
        "runtime/triton/native/build/x.o",
        "build/temp/x.o",
        "stub/peers/_x.abi3.so",
        "tests/crash-x",
    ):
        (tree / litter).parent.mkdir(parents=True, exist_ok=True)
        (tree / litter).write_text("")

    subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta; build_meta.build_sdist('..')"],
        cwd=tree,
        check=True,
        capture_output=True,
    )
    (archive,) = tmp_path.glob("moonpool-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    made = {Path("PKG-INFO"), Path("setup.cfg"), Path("src/moonpool.egg-info/SOURCES.txt")}

    assert _files(unpacked) - made == expected - made
    assert (unpacked / "src/moonpool/ipc").readlink() == Path("../../ipc")


def _left_behind(folder: str, names: list[str]) -> set[str]:
    """Name files that git ignores, or does not know."""
    left = shutil.ignore_patterns(
        ".git", ".venv*", ".*_cache", ".hypothesis", ".coverage*", "*.egg-info", "__pycache__", "*.so", "crash-*"
    )(folder, names)
    return left | ({"build", "dist"} & set(names))


def _files(folder: Path) -> set[Path]:
    """Files and links by their places below a folder; links are not followed."""
    found = set()
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if Path(where, name).is_symlink()]
        found |= {Path(where, name).relative_to(folder) for name in (*files, *links)}
    return found
