"""Rules that hold for the whole tree: sizes, imports, the Python of the stub, the documents."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import moonpool

ROOT = Path(__file__).parent.parent
PACKAGE = Path(moonpool.__path__[0])
FOLDERS = ("ipc", "stub", "runtime", "testing")
# The links are followed, so that an offender is named as it is found in the tree.
SOURCES = {
    path: path.read_text()
    for folder in FOLDERS
    for path in sorted((PACKAGE / folder).resolve().rglob("*.py"))
}
MODEL_SIDE = [path for path in SOURCES if path.is_relative_to((PACKAGE / "ipc").resolve())] + [
    path for path in SOURCES if path.is_relative_to((PACKAGE / "stub").resolve())
]
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Each takes longer to import than the rest of moonpool, and no one who only infers needs it.
HEAVY = {
    "asyncio",
    "concurrent.futures.process",
    "cupy",
    "google.protobuf",
    "grpc",
    "httptools",
    "matplotlib",
    "ml_dtypes",
    "multiprocessing",
    "opentelemetry",
    "orjson",
    "prometheus_client",
    "starlette",
    "torch",
    "tritonclient",
    "unittest",
    "uvloop",
}


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Every node of every source, with the place it stands at."""
    for path, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            yield f"{path}:{getattr(node, 'lineno', 0)}", node


def modules(*folders: str) -> list[str]:
    """The names of all modules in these folders that are made to be imported."""
    names = []
    for path in SOURCES:
        for folder in folders:
            base = (PACKAGE / folder).resolve()
            if path.is_relative_to(base / "backends"):
                continue  # a model's file, which nobody imports but its own process
            if path.is_relative_to(base) and path.name != "__main__.py":
                words = ["moonpool", folder, *path.relative_to(base).with_suffix("").parts]
                names.append(".".join(words).removesuffix(".__init__"))
    return names


def loaded_after_importing(names: list[str], prelude: str = "") -> set[str]:
    """What a fresh interpreter has loaded after these imports, beyond what numpy loads."""
    program = (
        "import importlib, json, sys\n"
        f"sys.path[:] = {sys.path!r}\n"
        "import numpy\n"
        f"{prelude}\n"
        "before = set(sys.modules)\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    command = [sys.executable, "-I", "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.fail(f"importing all of {names} failed:\n{ended.stderr}", pytrace=False)
    return set(json.loads(ended.stdout))


def test_no_file_is_longer_than_1000_lines() -> None:
    long = {str(path): source.count("\n") for path, source in SOURCES.items()}

    assert {path: lines for path, lines in long.items() if lines > 1000} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    assert [
        f"{place} {node.name}"
        for place, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > 60
    ] == []


def test_nothing_that_must_hold_is_left_to_assert() -> None:
    assert [place for place, node in nodes() if isinstance(node, ast.Assert)] == []


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def test_nothing_can_unpickle() -> None:
    importing = [p for p, node in nodes() if PICKLES & {i.split(".")[0] for i in imports(node)}]
    allowing = [
        place
        for place, node in nodes()
        if isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]

    assert importing + allowing == []


@pytest.mark.parametrize("path", MODEL_SIDE, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_runs_beside_a_model_is_python_3_9(path: Path) -> None:
    tree = ast.parse(SOURCES[path], feature_version=(3, 9))
    keywords = {
        keyword.arg
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", getattr(call.func, "attr", "")) in ("zip", "dataclass")
        for keyword in call.keywords
    }

    assert keywords & {"strict", "slots", "kw_only"} == set()
    # Annotations such as `int | None` are not evaluated then.
    if any(isinstance(node, ast.FunctionDef | ast.AnnAssign) for node in ast.walk(tree)):
        assert "from __future__ import annotations" in SOURCES[path]


def test_importing_moonpool_loads_nothing_heavy() -> None:
    assert loaded_after_importing(["moonpool"]) & HEAVY == set()


def test_what_runs_beside_a_model_loads_nothing_heavy() -> None:
    # As `stub/boot.py` does it: the package is there without what its __init__ imports.
    folder = next(iter(moonpool.__path__))
    prelude = (
        "import types\n"
        "package = sys.modules['moonpool'] = types.ModuleType('moonpool')\n"
        f"package.__path__ = [{folder!r}]"
    )
    loaded = loaded_after_importing(modules("ipc", "stub"), prelude)

    assert loaded & (HEAVY | {"dataclasses", "moonpool.runtime"}) == set()


def test_no_module_goes_by_its_bare_name() -> None:
    loaded = loaded_after_importing(modules(*FOLDERS))

    assert "moonpool.ipc" in loaded
    assert {name.split(".")[0] for name in loaded | set(sys.modules)} & set(FOLDERS) == set()


def test_an_installation_puts_nothing_but_moonpool_on_the_path() -> None:
    # A tree that was built once has its list of sources beside it, which is no installation.
    installed = [
        found for found in metadata.distributions(name="moonpool") if found.read_text("RECORD")
    ]
    if not installed:
        pytest.skip("moonpool is not installed here")
    files = [file for found in installed for file in found.files or []]
    top = {file.parts[0] for file in files if file.suffix != ".pth"}

    # Type checkers look for type information there; no program can import those names.
    typed = {"triton_python_backend_utils-stubs", "c_python_backend_utils-stubs"}
    # Of the module beside the package.
    cached = {"__pycache__"}
    assert {
        name
        for name in top - typed - cached
        if not name.startswith(("moonpool", "..", "__editable__"))
    } == set()


DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
BANNED = {
    "an unfinished place": r"\b(TODO|FIXME|XXX|TBD)\b",
    "a path of somebody's machine": r"(?<![\w./])/(work|home|root|Users)/",
    "a number that means nothing outside a tracker": r"(?i)\b(issue|task|session|ticket) #?\d+",
    "praise instead of a figure": (
        r"(?i)\b(blazing|seamless|effortless|cutting.edge|state.of.the.art|world.class|"
        r"game.chang|supercharge|leverag|unleash)"
    ),
}


def test_there_are_documents_to_check() -> None:
    if not (ROOT / "docs").is_dir():
        pytest.skip("only the tests are here, without the documents")

    assert DOCUMENTS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_has_no_banned_words(path: Path) -> None:
    found = [
        f"line {number}: {why}: {line.strip()}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for why, pattern in BANNED.items()
        if re.search(pattern, line)
    ]

    assert found == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_of_a_document_lead_somewhere_in_the_tree(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", path.read_text())
    local = [link for link in links if not re.match(r"[a-z]+:", link)]
    targets = {link: (path.parent / link).resolve() for link in local}

    assert [
        link for link, to in targets.items() if not to.exists() or not to.is_relative_to(ROOT)
    ] == []


def test_no_source_has_an_unfinished_place_or_a_path_of_somebody_s_machine() -> None:
    patterns = [BANNED["an unfinished place"], BANNED["a path of somebody's machine"]]

    assert [
        f"{path}: {match.group()}"
        for path, source in SOURCES.items()
        for pattern in patterns
        for match in re.finditer(pattern, source)
    ] == []
