"""Rules that hold for the whole tree: sizes, imports, the Python of the stub, the documents."""

from __future__ import annotations

import ast
import gc
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest

import moonpool
from moonpool.stub.native import hints

ROOT = Path(__file__).parent.parent
PACKAGE = Path(moonpool.__path__[0])
FOLDERS = ("ipc", "stub", "runtime", "testing", "ray", "benchmarks")
# Links are resolved, so a failure names the file as it is in the tree.
SOURCES = {
    path: path.read_text()
    for folder in FOLDERS
    for path in sorted((PACKAGE / folder).resolve().rglob("*.py"))
    # A suite is a program, and a model is as users write it.
    if not {"suites", "models"} & set(path.relative_to((PACKAGE / folder).resolve()).parts)
}
MODEL_SIDE = [path for path in SOURCES if path.is_relative_to((PACKAGE / "ipc").resolve())] + [
    path for path in SOURCES if path.is_relative_to((PACKAGE / "stub").resolve())
]
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Each takes longer to import than the rest of moonpool, and a program that only infers does not need it.
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
    "torch",
    "tritonclient",
    "unittest",
    "uvloop",
}


@cache
def trees() -> dict[Path, ast.Module]:
    """The parsed sources."""
    return {path: ast.parse(source) for path, source in SOURCES.items()}


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Every node of every source, with its file."""
    return [(path, node) for path, tree in trees().items() for node in ast.walk(tree)]


@pytest.fixture(scope="module", autouse=True)
def _keeps_the_trees_until_the_end() -> Iterator[None]:
    # The collector would look through all of their nodes again and again, which takes most of the time.
    gc.disable()
    yield
    nodes.cache_clear()
    trees.cache_clear()
    gc.enable()


def place(path: Path, node: ast.AST) -> str:
    return f"{path}:{getattr(node, 'lineno', 0)}"


def modules(*folders: str) -> list[str]:
    """The names of all modules in these folders that are made to be imported."""
    names = []
    for path in SOURCES:
        for folder in folders:
            base = (PACKAGE / folder).resolve()
            # Only a process of a model imports them: backends as the model's file, and what its children import under
            # their own names.
            if any(path.is_relative_to(base / name) for name in ("backends", "importable")):
                continue
            if path.is_relative_to(base) and path.name != "__main__.py":
                words = ["moonpool", folder, *path.relative_to(base).with_suffix("").parts]
                names.append(".".join(words).removesuffix(".__init__"))
    return names


def loaded_after_importing(names: list[str], prelude: str = "") -> set[str]:
    """Return the modules that a fresh interpreter has after these imports, without those that numpy loads."""
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


# What happens at the end of each batch, in one order. Parts of it would pass nearly all of its variables on.
LONG_FUNCTIONS = ["settle"]


def test_no_function_is_longer_than_60_lines() -> None:
    assert [
        node.name
        for _, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60
    ] == LONG_FUNCTIONS


def imports(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def package_of(path: Path) -> str:
    """The folder of a file, as it is named below the package."""
    for folder in FOLDERS:
        base = (PACKAGE / folder).resolve()
        if path.is_relative_to(base):
            return str(Path(folder) / path.relative_to(base).parent)
    raise ValueError(path)


def module_of(path: Path) -> str:
    """The name that the module in a file is imported by."""
    return f"moonpool.{package_of(path)}.{path.stem}".replace("/", ".")


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a file may mean by its imports, and names in them."""
    for node in ast.walk(tree):
        yield from imports(node)
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of names that lead to each other, of two or more."""
    reached: dict[str, set[str]] = {}
    for name in edges:
        found, todo = set[str](), [name]
        while todo:
            new = edges.get(todo.pop(), set()) - found
            found |= new
            todo += new
        reached[name] = found
    groups = {
        tuple(sorted(other for other in found if name in reached.get(other, ()))) for name, found in reached.items()
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


@cache
def imports_of_modules() -> dict[str, set[str]]:
    """The modules of moonpool that each of its modules imports, those for types included."""
    names = {module_of(path).removesuffix(".__init__"): path for path in SOURCES}
    edges = {}
    for name, path in names.items():
        edges[name] = found = set[str]()
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.ImportFrom):
                # Each of the names may be a module.
                full = (f"{node.module}.{alias.name}" for alias in node.names)
                meant = {each if each in names else str(node.module) for each in full}
            else:
                meant = set(imports(node))
            found |= meant & names.keys()
        found.discard(name)
    return edges


def test_no_more_than_two_modules_import_each_other() -> None:
    assert [group for group in circles(imports_of_modules()) if len(group) > 2] == []


@pytest.mark.parametrize("package", ["moonpool.runtime", "moonpool.stub"])
def test_no_packages_import_each_other(package: str) -> None:
    parts: dict[str, set[str]] = {}
    for name, others in imports_of_modules().items():
        for other in others:
            if name.startswith(f"{package}.") and other.startswith(f"{package}."):
                depth = package.count(".") + 2
                mine, theirs = (".".join(each.split(".")[:depth]) for each in (name, other))
                parts.setdefault(mine, set()).update({theirs} - {mine})

    assert circles(parts) == []


def test_no_packages_anywhere_import_each_other() -> None:
    edges: dict[str, set[str]] = {}
    packages = {module_of(path).removesuffix(".__init__") for path in SOURCES if path.name == "__init__.py"}
    for name, others in imports_of_modules().items():
        mine = name if name in packages else name.rpartition(".")[0]
        for other in others:
            theirs = other if other in packages else other.rpartition(".")[0]
            # A package and one inside of it are one: the modules of both are counted above.
            if not f"{mine}.".startswith(f"{theirs}.") and not f"{theirs}.".startswith(f"{mine}."):
                edges.setdefault(mine, set()).add(theirs)

    assert circles(edges) == []


def test_a_package_has_at_most_15_modules() -> None:
    count = Counter(package_of(path) for path in SOURCES if path.name != "__init__.py")

    assert {package: modules for package, modules in count.items() if modules > 15} == {}


# These set up the log of a program of moonpool's own.
SET_UP_LOGS = ("runtime/log.py", "runtime/server/log.py", "runtime/cli/shared.py")


def test_the_runtime_logs_on_no_thread_but_that_of_its_log() -> None:
    """A logger of Python's would run the program's handlers on the thread that logs."""
    assert [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("getLogger")
        and "/runtime/" in str(path)
        and not str(path).endswith(SET_UP_LOGS)
    ] == []


# Short modules with one importer that stay apart, with the reason.
APART = {
    "moonpool.ipc.port.calls": "its compiled form has the same name, with an underscore",
    "moonpool.runtime.cli.completion": "a command each has a file",
    "moonpool.runtime.cli.triton": "as above",
    "moonpool.runtime.process.sigterm": "`moonpool` itself offers it to programs",
    "moonpool.runtime.version": "setup.py reads it without importing the package",
    "moonpool.stub.peers.port": "it says what its compiled form is for",
    "moonpool.stub.spare": "`boot`, which starts every stub, imports it in spares alone",
}


def test_no_short_module_has_one_importer() -> None:
    users = Counter(name for tree in trees().values() for name in set(imported(tree)))
    short = {
        module_of(path) for path, source in SOURCES.items() if source.count("\n") < 100 and path.name != "__init__.py"
    }

    assert {name for name in short if users[name] == 1} - APART.keys() == set()


# These packages may be imported for type checkers alone, because importing them takes long or is not possible
# everywhere.
FOR_TYPES_ALONE = HEAVY | {
    "IPython",
    "_typeshed",
    "curses",  # one command redraws a terminal
    "moonpool.ipc.slots",  # compiled, or not there; and nothing of it is imported before the sandbox is on
    "moonpool.ipc.cuda",  # nothing of it is imported before there is memory of a device
    # A server of HTTP alone does not need gRPC's library.
    "moonpool.runtime.server.grpc",
    # A model's environment may have a numpy from before 1.21, which has no NDArray.
    "numpy.typing",
    "ssl",
    "typing_extensions",
    # Few stubs need these, and all would wait for them when they start.
    "logging",
    "moonpool.runtime.stubs.devices",  # imports moonpool.ipc.cuda
    "moonpool.stub.devices",
}


def test_imports_for_types_alone_are_of_heavy_packages() -> None:
    found = [
        f"{path}:{node.lineno}: {name}"
        for path, block in nodes()
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for node in block.body
        for name in imports(node)
        if not any(name == heavy or name.startswith(f"{heavy}.") for heavy in FOR_TYPES_ALONE)
    ]

    assert found == []


def test_a_module_with_a_lock_or_a_thread_begins_with_its_theory() -> None:
    makes = re.compile(r"\b(?:threading\.)?(?:Lock|RLock|Condition|Thread)\(")
    found = [
        str(path)
        for path, source in SOURCES.items()
        if makes.search(source) and "Theory of operation" not in (ast.get_docstring(trees()[path]) or "")
    ]

    assert found == []


def test_docstrings_begin_with_a_verb_or_a_name() -> None:
    begins = re.compile(r"(What|Who|Whose|Whether|Where|Which|Of|How|When|As|Those|All that)\b")
    # Either folder may be absent beside an installed package. The models of tests are as users write them.
    others = {
        path: path.read_text()
        for folder in ("tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "tests" / "models")
    }
    theirs = ((path, node) for path, source in others.items() for node in ast.walk(ast.parse(source)))
    found = [
        f"{path}: {text.splitlines()[0]}"
        for path, node in chain(nodes(), theirs)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for text in [ast.get_docstring(node) or ""]
        if begins.match(text)
    ]

    assert found == []


def lines_of_prose(path: Path) -> Iterator[int]:
    """Yield the numbers of the lines of comments and docstrings."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and not re.search("noqa|mypy|type:|fmt:", token.string):
                yield token.start[0]


def test_lines_of_the_product_have_at_most_120_characters() -> None:
    kinds = {".c", ".cpp", ".h", ".html", ".py", ".pyi", ".pxd", ".pyx", ".toml"}
    folders = ("benchmarks", "docs", "ipc", "runtime", "src", "stub", "tests/gpu")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    paths += (ROOT / ".ci").iterdir()
    made = ROOT / "ipc/native/wire.h"
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted([*paths, ROOT / "pyproject.toml", ROOT / "setup.py"])
        if path.is_file() and path != made
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if len(line) > 120 and "# noqa" not in line and 'rel="icon"' not in line
    ]

    assert long == []


def test_comments_and_docstrings_have_at_most_120_characters() -> None:
    folders = ("benchmarks", "docs", "examples", "ipc", "runtime", "src", "stub", "tests")
    models = ("tests/models", "tests/triton")  # some are Triton's
    long = []
    for path in (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))):
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(models):
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        if any(len(line) > 120 for line in lines):
            prose = set(lines_of_prose(path))
            long += [f"{name}:{n}" for n, line in enumerate(lines, 1) if len(line) > 120 and n in prose]

    assert long == []


def test_nothing_that_must_hold_is_left_to_assert() -> None:
    assert [place(*each) for each in nodes() if isinstance(each[1], ast.Assert)] == []


def test_nothing_can_unpickle() -> None:
    importing = [
        place(path, node) for path, node in nodes() if PICKLES & {name.split(".")[0] for name in imports(node)}
    ]
    allowing = [
        place(path, node)
        for path, node in nodes()
        if isinstance(node, ast.keyword)
        and node.arg == "allow_pickle"
        and not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]

    assert importing + allowing == []


def test_code_that_runs_beside_a_model_is_python_3_9() -> None:
    for path in MODEL_SIDE:
        tree = ast.parse(SOURCES[path], str(path), feature_version=(3, 9))
        keywords = {
            keyword.arg
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and getattr(call.func, "id", getattr(call.func, "attr", "")) in ("zip", "dataclass")
            for keyword in call.keywords
        }

        assert keywords & {"strict", "slots", "kw_only"} == set(), path
        # With this import, annotations such as `int | None` are not evaluated.
        if any(isinstance(node, ast.FunctionDef | ast.AnnAssign) for node in ast.walk(tree)):
            assert "from __future__ import annotations" in SOURCES[path], path


def test_importing_moonpool_imports_what_a_program_uses_only_when_it_is_used() -> None:
    loaded = loaded_after_importing(["moonpool"])

    assert {name for name in loaded if name.split(".")[0] == "moonpool"} == {
        "moonpool",
        "moonpool.runtime",
        "moonpool.runtime.version",
    }
    assert {name.split(".")[0] for name in loaded} - {"moonpool", "importlib"} == set()


def test_hosting_models_loads_nothing_heavy() -> None:
    used = [f"moonpool.{module}" for module in moonpool._NAMES if "cuda" not in module]  # type: ignore[attr-defined]

    assert loaded_after_importing(used) & HEAVY == set()


def test_type_checkers_find_the_names_that_are_imported_when_they_are_used() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    given = {
        (alias.asname or alias.name, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("moonpool.")
        for alias in node.names
    }
    own = {(name, module) for name, module in given if module != "moonpool.stub.native.hints"}
    lazy = {
        (name, f"moonpool.{module}")
        for module, names in moonpool._NAMES.items()  # type: ignore[attr-defined]
        for name in names
        if module != "stub.native.hints"
    }

    assert own == lazy
    # These are other types for a type checker.
    assert set(moonpool._NAMES["stub.native.hints"]) == set(hints.__all__)  # type: ignore[attr-defined]


@pytest.mark.promise(
    "Models",
    "A stub imports nothing but the standard library, numpy and msgpack before the model, and "
    "is readable by Python 3.9.",
)
def test_code_that_runs_beside_a_model_loads_nothing_heavy() -> None:
    # Like `stub/boot.py`: the package exists, but its __init__ was not run.
    folder = next(iter(moonpool.__path__))
    prelude = (
        "import types\n"
        "package = sys.modules['moonpool'] = types.ModuleType('moonpool')\n"
        f"package.__path__ = [{folder!r}]"
    )
    loaded = loaded_after_importing(modules("ipc", "stub"), prelude)

    assert loaded & (HEAVY | {"dataclasses", "moonpool.runtime"}) == set()


def test_no_module_goes_by_its_bare_name() -> None:
    # Most of the modules in `ray` need Ray, whose own name this is.
    folders = [folder for folder in FOLDERS if folder != "ray"]
    loaded = loaded_after_importing(modules(*folders))

    assert "moonpool.ipc" in loaded
    assert {name.split(".")[0] for name in loaded | set(sys.modules)} & set(folders) == set()


def test_an_installation_puts_nothing_but_moonpool_on_the_path() -> None:
    # A tree that was built once has a list of its sources, which is not an installation.
    installed = [found for found in metadata.distributions(name="moonpool") if found.read_text("RECORD")]
    if not installed:
        pytest.skip("moonpool is not installed here")
    files = [file for found in installed for file in found.files or []]
    top = {file.parts[0] for file in files if file.suffix != ".pth"}

    # Type checkers look for type information there; no program can import those names.
    typed = {"triton_python_backend_utils-stubs", "c_python_backend_utils-stubs"}
    # This folder belongs to the module beside the package.
    cached = {"__pycache__"}
    assert {name for name in top - typed - cached if not name.startswith(("moonpool", "..", "__editable__"))} == set()


DOCUMENTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "deploy/*.md", "examples/**/*.md")
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


def test_a_document_has_no_banned_words() -> None:
    found = [
        f"{path}:{number}: {why}: {line.strip()}"
        for path in DOCUMENTS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for why, pattern in BANNED.items()
        if re.search(pattern, line)
    ]

    assert found == []


def test_the_links_of_a_document_lead_somewhere_in_the_tree() -> None:
    targets = {
        (path, link): (path.parent / link).resolve()
        for path in DOCUMENTS
        for link in re.findall(r"\]\(([^)#\s]+)", path.read_text())
        if not re.match(r"[a-z]+:", link)
    }

    assert [each for each, to in targets.items() if not to.exists() or not to.is_relative_to(ROOT)] == []


def test_no_source_has_an_unfinished_place_or_a_path_of_somebody_s_machine() -> None:
    patterns = [BANNED["an unfinished place"], BANNED["a path of somebody's machine"]]

    assert [
        f"{path}: {match.group()}"
        for path, source in SOURCES.items()
        for pattern in patterns
        for match in re.finditer(pattern, source)
    ] == []


# `docs/site/GLOSSARY.md` has another word for each of these parts of names.
OLD_WORDS = {
    "audience": "sharing",
    "crew": "workers",
    "desk": "dispatcher or client",
    "fleet": "pool",
    "guest": "attached",
    "loan": "borrowed",
    "loans": "borrowed",
    "outbox": "send queue",
    "seat": "record",
    "seats": "records",
}


@cache
def words_of(name: str) -> set[str]:
    """The words of a name, in lower case: `call_desk` and `CallDesk` have the same ones."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def names_of(node: ast.AST) -> list[str]:
    """The names that a node gives or uses."""
    found = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")]
    return [name for name in found if isinstance(name, str)]


def test_names_have_the_words_of_the_glossary() -> None:
    files = {str(path): words_of(path.stem) & OLD_WORDS.keys() for path in SOURCES}
    assert {path: words for path, words in files.items() if words} == {}

    assert [
        f"{place(path, node)}: {name} (say {OLD_WORDS[word]})"
        for path, node in nodes()
        for name in names_of(node)
        for word in words_of(name) & OLD_WORDS.keys()
    ] == []


# Several public classes may have one of these names, for the reason given.
SAME_NAMES = {
    "InferenceRequest": "Triton's name in the stub, and the runtime's side of the same thing",
    "Metric": "as above",
    "Model": "the runtime's side of a model, and the stub's",
    "ModelConfig": "Triton's name in the stub, and the runtime's side of the same thing",
    "Options": "of a deployment in Ray Serve, and of a run of `moonpool bench`",
    "Response": "a client's answer, and the answer of a model under test",
    "Signature": "a model's signature as its configuration says it, and as its hints do",
    "Template": "the runtime's side of a template, and the stub's",
}


def test_no_two_public_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for path, tree in trees().items():
        if "backends" in path.parts:
            continue  # models, which all have the class that Triton looks for
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(path.name)

    assert len(SAME_NAMES) <= 10
    assert {name for name, files in found.items() if len(files) > 1} == set(SAME_NAMES)
