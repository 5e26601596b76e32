"""Print the tests of what has changed, one a line: of the working tree against a commit.

    python .ci/changed.py [COMMIT]      by default where this branch left main

A file of a package stands for the tests of that package, `tests/` mirroring the code, and for those that import the
file itself. Tests of whole servers and models are left to `make test`, unless they were changed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
# Folders whose tests are mirrored, and the names that their modules have.
PACKAGES = {
    "ipc": "moonpool.ipc",
    "stub": "moonpool.stub",
    "runtime": "moonpool.runtime",
    "benchmarks": "moonpool.benchmarks",
    "src/moonpool/testing": "moonpool.testing",
    "src/moonpool/ray": "moonpool.ray",
}
# Beginnings of the paths of other files, with the tests of these.
OTHERS = {
    "docs/": ["tests/test_docs.py"],
    "README.md": ["tests/test_docs.py"],
    "examples/": ["tests/runtime/cli/test_examples.py"],
    "benchmarks/suites/": ["tests/benchmarks/test_suites.py"],
    "deploy/": ["tests/deploy"],
    "src/": ["tests/test_package.py"],
    "pyproject.toml": ["tests/test_package.py"],
    "setup.py": ["tests/test_package.py"],
}
# Rules for the whole tree.
ALWAYS = "tests/test_layout.py"


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints. If git fails, it says why, and this program ends."""
    ended = subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    return ended.stdout.decode().splitlines()


def changed(since: str) -> list[str]:
    """Files that differ from the commit, and new ones that git does not ignore."""
    return [*git("diff", "--name-only", since, "--"), *git("ls-files", "--others", "--exclude-standard")]


def where_main_was_left() -> str:
    """The last commit that this branch has in common with main."""
    return git("merge-base", "HEAD", "main")[0]


def imported(source: str) -> set[str]:
    """The modules that a file imports; of `from a import b`, both `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


class Suite:
    """All files below `tests/`, and what they import."""

    def __init__(self) -> None:
        self._imported = {
            path.relative_to(ROOT).as_posix(): imported(path.read_text(encoding="utf-8"))
            for path in TESTS.rglob("*.py")
            if "models" not in path.parts
        }

    def importers(self, module: str) -> Iterator[str]:
        """Tests that import a module, themselves or by a helper of tests."""
        for path, names in self._imported.items():
            if module in names:
                if is_test(path):
                    yield path
                else:
                    yield from self.importers(path.removesuffix(".py").replace("/", "."))

    def of(self, path: str) -> Iterator[str]:
        """The tests of one file, which may be gone."""
        if path.startswith("tests/"):
            yield from self._of_test(path)
        for folder, package in PACKAGES.items():
            if path.startswith(f"{folder}/"):
                yield from self._of_package(path.removeprefix(f"{folder}/"), package)
        for begin, tests in OTHERS.items():
            if path.startswith(begin):
                yield from tests

    def _of_test(self, path: str) -> Iterator[str]:
        if is_test(path):
            if (ROOT / path).exists():
                yield path
        elif path.endswith("/conftest.py"):
            yield path.rpartition("/")[0]
        elif path.endswith(".py"):
            yield from self.importers(path.removesuffix(".py").replace("/", "."))

    def _of_package(self, path: str, package: str) -> Iterator[str]:
        folder = TESTS / package.removeprefix("moonpool.") / Path(path).parent
        # Not of packages below it, which have tests of their own.
        yield from (test.relative_to(ROOT).as_posix() for test in folder.glob("test_*.py"))
        module = ".".join([package, *Path(path).with_suffix("").parts]).removesuffix(".__init__")
        mirrored = tuple(f"tests/{name.removeprefix('moonpool.')}/" for name in PACKAGES.values())
        yield from (test for test in self.importers(module) if test.startswith(mirrored))


def is_test(path: str) -> bool:
    """Tell if pytest collects the file."""
    return path.rpartition("/")[2].startswith("test_")


def main() -> None:
    """Read the arguments and print the tests."""
    suite = Suite()
    since = sys.argv[1] if len(sys.argv) > 1 else where_main_was_left()
    found = {test for path in changed(since) for test in suite.of(path)}
    for test in sorted({*found, ALWAYS} if found else found):
        sys.stdout.write(f"{test}\n")


if __name__ == "__main__":
    main()
