"""Lists of packages: what may be in one, and which environment it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet

from moonpool.runtime.errors import BadEnvironment
from moonpool.runtime.repository.package_list import PackageList, fits, read_list

PROJECT = '[project]\nname = "x"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["a>=1"]\n'
SCRIPT = """import sys
# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "a>=1",
# ]
#
# [tool.uv]
# prerelease = "allow"
# ///
x = 1
"""
HASH = "--hash=sha256:" + "0" * 64


def read(folder: Path, name: str, text: str) -> PackageList:
    (folder / name).write_text(text)
    return read_list(folder / name)


@pytest.mark.promise(
    "Environments", "A list of packages gives an environment: a script's block, requirements, a project, a lock of uv."
)
@pytest.mark.parametrize(
    ("name", "text", "requirements", "python"),
    [
        ("model.py", SCRIPT, ("a>=1", "numpy"), ">=3.10"),
        ("pyproject.toml", PROJECT, ("a>=1", "numpy"), ">=3.10"),
        ("r.txt", "a>=1  # why\n\n# none\nNumPy == 2.0\n", ("a>=1", "NumPy == 2.0"), ""),
        ("r.txt", "a[x,y]~=1.2 ; python_version < '3.12'\n", ("a[x,y]~=1.2 ; python_version < '3.12'", "numpy"), ""),
        ("r.txt", f"numpy==1 \\\n  {HASH} \\\n  {HASH}\n", (f"numpy==1    {HASH}    {HASH}",), ""),
    ],
)  # fmt: skip
def test_a_list_has_requirements_and_numpy(
    tmp_path: Path, name: str, text: str, requirements: tuple[str, ...], python: str
) -> None:
    found = read(tmp_path, name, text)

    assert (found.requirements, found.python) == (requirements, python)
    assert found.has_hashes == ("hash" in text)


@pytest.mark.promise("Environments", "A list stands alone: no options, no other files, no folders, no addresses.")
@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("-r other.txt", "is an option"),
        ("--index-url https://elsewhere", "is an option"),
        ("-e .", "is an option"),
        ("./folder", "not the name of a package"),
        ("/etc/passwd", "not the name of a package"),
        ("git+https://elsewhere/x", "not the name of a package"),
        ("x @ https://elsewhere/x.whl", "not the name of a package"),
        ("x[/../srv/folder/]", "not the name of a package"),
        ("file:%2Fsrv%2Ffolder", "not the name of a package"),
        ("x==${HOME}", "not the name of a package"),
        ("x\u2028-e file:%2Fsrv", "is an option"),
        ("x\x0c./folder", "not the name of a package"),
        ("x.zip", "the name of a file"),
        ("x-1.0-py3-none-any.WHL[all]", "the name of a file"),
        ("x.tar.gz", "the name of a file"),
        ("x;./folder", "not the name of a package"),
        ("numpy>=1 -e .", "not the name of a package"),
        ("x>=1 -C a=b", "not the name of a package"),
        ("x>=1\t-r other.txt", "not the name of a package"),
        ("x[a, -e]", "not the name of a package"),
        ("x (>=1 -e .)", "not the name of a package"),
        ("x>=-e", "not the name of a package"),
        ("x; python_version > '3' -e .", "not the name of a package"),
        ("x; python_version > '3 -e .'", "not the name of a package"),
        ("x>=1 other", "not the name of a package"),
        ("x" * 1001, "longer than any requirement"),
        (f"x {HASH}" + f" {HASH}" * 1000, "longer than any requirement"),
        ("x --config-settings=a=b", "option other than --hash"),
        (f"x {HASH} -r other.txt", "option other than --hash"),
        (f"a==1 {HASH}", "has hashes but no numpy"),
    ],
)
def test_what_is_no_name_of_a_package_is_refused(tmp_path: Path, line: str, word: str) -> None:
    with pytest.raises(BadEnvironment, match=word) as caught:
        read(tmp_path, "requirements.txt", line)

    assert str(tmp_path / "requirements.txt") in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("model.py", "import sys\n", "no block"),
        ("model.py", SCRIPT + SCRIPT, "2 blocks"),
        ("model.py", "# /// script\n# dependencies = []\n", "has no end"),
        ("model.py", "# /// script\nx = 1\n# ///\n", "has no end"),
        ("model.py", "# /// script\n# dependencies = [\n# ///\n", "TOML"),
        ("model.py", "# /// script\n# dependencies = [1]\n# ///\n", "a list of texts"),
        ("model.py", "# /// script\n# requires-python = 'three'\n# ///\n", "requires-python"),
        ("model.py", "# /// script\n# dependencies = ['-r x']\n# ///\n", "is an option"),
        ("pyproject.toml", "[project]\ndependencies = ['x\\n-r other.txt']\n", "not the name of a package"),
        ("pyproject.toml", "[project]\ndependencies = ['x\\u2028-r y']\n", "not the name of a package"),
        # Characters at which pip ends a line, where a part of the line begins or ends.
        ("pyproject.toml", '[project]\ndependencies = ["x --\\nhash=sha256:00"]\n', "not the name of a package"),
        ("pyproject.toml", '[project]\ndependencies = ["x\\n --hash=sha256:00"]\n', "not the name of a package"),
        ("pyproject.toml", '[project]\ndependencies = ["x\\u0085 --hash=sha256:00"]\n', "not the name of a package"),
        ("pyproject.toml", '[project]\ndependencies = ["x --\\u0085hash=sha256:00"]\n', "not the name of a package"),
        ("pyproject.toml", f"[project]\nrequires-python = '>={'9' * 5000}'\n", "requires-python"),
        ("pyproject.toml", f"x = {'9' * 5000}\n", "TOML"),
        ("pyproject.toml", f"x = {'[' * 100_000}\n", "TOML"),
        ("pyproject.toml", "[tool.x]\n", r"no \[project\]"),
        ("uv.lock", "version = 1\n", "pyproject.toml cannot be read"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path, name: str, text: str, word: str) -> None:
    with pytest.raises(BadEnvironment, match=word):
        read(tmp_path, name, text)


def test_a_file_that_is_no_text_or_is_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(BadEnvironment, match="UTF-8"):
        read_list(tmp_path / "r.txt")
    with pytest.raises(BadEnvironment, match="No such file"):
        read_list(tmp_path / "none.txt")


@pytest.mark.promise("Environments", "An environment has the name of its list's content, wherever the list lies.")
def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one = read(tmp_path, "r.txt", "a>=1\n")
    same = read(tmp_path / "other", "s.txt", "# another comment\na>=1\n")
    another = read(tmp_path, "t.txt", "a>=2\n")

    digests = [each.digest(only_wheels=False) for each in (one, same, another)]

    assert digests[0] == digests[1] != digests[2]
    assert one.digest(only_wheels=True) != digests[0]


VERSIONS = st.tuples(st.integers(2, 4), st.integers(0, 15), st.integers(0, 4))
CLAUSES = st.builds(
    lambda sign, version, length, star: (
        sign + ".".join(map(str, version[:length])) + (".*" if star and sign in ("==", "!=") else "")
    ),
    st.sampled_from(["<", "<=", ">", ">=", "==", "!=", "~="]),
    VERSIONS,
    st.integers(2, 3),
    st.booleans(),
)


@given(VERSIONS, st.lists(CLAUSES, max_size=3))
def test_versions_of_python_are_compared_as_packaging_does(version: tuple[int, int, int], clauses: list[str]) -> None:
    wanted = ", ".join(clauses)

    assert fits(version, wanted) == (".".join(map(str, version)) in SpecifierSet(wanted))
