"""The documents say what the code says."""

from __future__ import annotations

import ast
import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tests.forks import Forks
from tests.pages import SHELL, Reader, blocks, lines_of
from tests.programs import load_program
from tests.runtime.cli.shell import MODELS, PACKAGE
from tests.triton.differences import TESTS

import moonpool
import moonpool.errors
import moonpool.testing
from moonpool import MoonpoolError
from moonpool.ipc import messages
from moonpool.runtime.cli.main import make_parser
from moonpool.runtime.model.config import pbtxt
from moonpool.runtime.repository.cloud_address import CREDENTIAL_FILE, read_address
from moonpool.runtime.server.options.sources import read_options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="the documents are not in the wheel")


def tool(name: str) -> ModuleType:
    """A program of the folder docs/, as a module."""
    return load_program(DOCS / f"{name}.py")


def diagrams() -> ModuleType:
    return tool("diagrams")


def test_every_table_is_drawn() -> None:
    pages = [path.read_text(encoding="utf-8") for path in diagrams().PAGES.values()]
    drawn = {name for page in pages for name in re.findall(r"<!-- drawn: (\w+) -->", page)}

    assert drawn == set(diagrams().drawings())


def test_the_wire_page_has_the_tables_of_the_code() -> None:
    page = diagrams().drawn(diagrams().PAGES["wire"].read_text(encoding="utf-8"))

    assert f"| {messages.PROTOCOL_VERSION} | PROTOCOL_VERSION" in page
    assert not re.search(r"<!-- drawn: \w+ -->\n<!-- end -->", page)


def test_the_specification_has_every_promise() -> None:
    specification = tool("specification")

    page = specification.page()

    whole = [mark for mark in specification.marks() if not mark.text.endswith(specification.REST)]
    assert [mark.place for mark in whole if f"- {mark.text} ([test](" not in page] == []
    assert specification.PLACE not in page


def test_the_reference_is_current() -> None:
    reference = tool("reference")
    page = reference.PAGE.read_text(encoding="utf-8")

    assert reference.written(page) == page, "run python docs/reference.py"


def test_each_example_is_listed_and_tested() -> None:
    examples = ROOT / "examples"
    models = {model.parents[1] for model in examples.glob("*/*/1/model.py")}
    programs = {
        path for path in (*examples.glob("*.py"), *examples.glob("agents/*.py")) if path.name != "test_models.py"
    }
    page = (examples / "README.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in [*ROOT.glob("tests/**/test_*.py")])
    tests += (examples / "test_models.py").read_text(encoding="utf-8")

    assert len(models | programs) >= 12
    for example in sorted(models | programs):
        assert f"]({example.relative_to(examples)}" in page, example
        assert example.stem in tests, example


def test_the_history_has_all_runs_of_each_benchmark() -> None:
    history = tool("history")
    page = history.page()

    assert history.PLACE not in page
    for file in history.RESULTS.glob("*.jsonl"):
        found = history.runs(file)
        assert found[-1].machine == json.loads(file.read_text().splitlines()[0])["machine"]
        assert [run.head for run in found if run.head not in page] == []


# What a site is made by, in the place of Sphinx: it lies where a tree's own modules are looked for first.
WRITER = """
import os, sys
site = sys.argv[-1]
os.makedirs(site)
with open(os.path.join(site, "index.html"), "w") as page:
    page.write(f"{open('page').read()} beside {os.environ['MOONPOOL_VERSIONS']}")
"""


@pytest.mark.parametrize("tags", [(), ("v0.9", "v0.10.1", "v1-wrong")], ids=["none", "two"])
def test_the_sites_of_releases_lie_beside_each_other(tags: tuple[str, ...], tmp_path: Path) -> None:
    tree, sites = tmp_path / "tree", tmp_path / "sites"
    (tree / "src").mkdir(parents=True)
    (tree / "src" / "sphinx.py").write_text(WRITER)
    git = partial(subprocess.run, cwd=tree, check=True, capture_output=True)
    git(["git", "init", "--quiet"])
    for text in (*tags, "as it is"):
        (tree / "page").write_text(text)
        git(["git", "add", "."])
        if text in tags:
            git(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", text])
            git(["git", "tag", text])

    tool("versions").build_all(tree, sites)

    pages = {page.parent.name: page.read_text() for page in sites.glob("*/index.html")}
    names = "next 0.10.1 0.9" if tags else "next"
    assert pages["next"] == f"as it is beside {names}"
    assert set(pages) == set(names.split())
    assert all(pages[tag.removeprefix("v")] == f"{tag} beside {names}" for tag in tags[:2])
    assert f"url={'0.10.1' if tags else 'next'}/index.html" in (sites / "index.html").read_text()
    assert len(git(["git", "worktree", "list"]).stdout.splitlines()) == 1


@pytest.mark.parametrize("module", [moonpool, moonpool.errors, moonpool.testing], ids=lambda module: module.__name__)
@pytest.mark.promise(
    "The package", "The page API lists what is stable: the names of `__all__`, and there are no others."
)
def test_the_reference_has_all_public_names(module: ModuleType) -> None:
    page = tool("reference").PAGE.read_text(encoding="utf-8")
    section = page.partition(f"## {module.__name__}\n")[2].partition("\n## ")[0]
    listed = {
        name
        for line in section.splitlines()
        if line.startswith("- ")
        for name in re.findall(r"`(\w+)`", line.split(":")[0])
    }
    given = {name for name in dir(module) if not name.startswith("_")}
    imported = {name for name in given if isinstance(getattr(module, name), ModuleType)} | {"TYPE_CHECKING", "VERSION"}

    assert listed == set(module.__all__) <= set(dir(module)) | {"DeviceArray"}
    assert given - imported - set(moonpool.errors.__all__) <= set(module.__all__)
    assert [name for name in module.__all__ if not (getattr(module, name).__doc__ or "").strip()] == []


def test_make_docs_writes_every_page_that_a_module_prints() -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    makers = {
        f"{made[1]} > docs/{path.name}"
        for path, page in pages.items()
        if (made := re.search(r"<!-- Made by `(python -m [\w.]+)`. -->", page))
    }
    shown = subprocess.run(["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True)

    assert makers
    assert {maker for maker in makers if f"/{maker}\n" not in shown.stdout} == set()


MARKED = """
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.promise("A", "The file keeps it.")]

@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.promise("B", "One is odd, " "and two is even.")
@pytest.mark.promise("A", "The file …")
def test_one(number): ...
"""
HEADINGS = "".join(f"## {name}\n\n<!-- promises -->\n" for name in "AB")


def specified(folder: Path, source: str, page: str = HEADINGS) -> str:
    """The page that is made of the marks in one file of tests."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(source, encoding="utf-8")
    specification = tool("specification")
    written: str = specification.written(page, specification.marks(folder / "tests"))
    return written


def test_promises_stand_below_their_sections_with_links_to_the_tests(tmp_path: Path) -> None:
    one, file = ('[test](../../tests/test_it.py "test_one")', '[test](../../tests/test_it.py "tests/test_it.py")')

    assert specified(tmp_path, MARKED) == (
        f"## A\n\n- The file keeps it. ({file}, {one})\n## B\n\n- One is odd, and two is even. ({one})\n"
    )


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (MARKED.replace("The file …", "The box …"), "no sentence of 'A' begin with 'The box'"),
        (MARKED.replace("The file …", "The file keeps it."), "stands at tests/test_it.py:4 already"),
        (MARKED.replace('"B"', '"C"'), "has a heading without marks, or marks have none: B, C"),
        (MARKED.replace("test_one", "one"), "one is no test"),
        (MARKED.replace('"B", ', ""), "a section and a sentence"),
        (MARKED.replace('"B"', "NAME"), "a section and a sentence, as literals"),
    ],
    ids=["unknown", "twice", "section", "helper", "one text", "no literal"],
)
def test_a_mark_that_cannot_be_in_the_page_is_told(tmp_path: Path, source: str, why: str) -> None:
    with pytest.raises(Exception, match=re.escape(why)):
        specified(tmp_path, source)


@pytest.mark.parametrize(
    ("heading", "section"),
    [
        ("What `standard` promises", "The sandbox: `standard`"),
        ("What `strict` adds", "The sandbox: `strict`"),
        ("What a grant covers", "The sandbox: grants"),
    ],
)
def test_the_sandbox_page_promises_what_tests_are_marked_with(heading: str, section: str) -> None:
    specification = tool("specification")
    page = (DOCS / "SANDBOX.md").read_text(encoding="utf-8")
    below = re.split(r"^#+ .+\n", page.partition(f"### {heading}\n")[2], flags=re.MULTILINE)[0]
    shown = [" ".join(item.split()) for item in re.findall(r"^- (.+(?:\n  .+)*)", below, re.MULTILINE)]

    promised = specification.sections(specification.marks())[section]
    assert shown
    assert set(shown) <= set(promised)
    # Of the promises about grants, the page has those that a reader would not guess.
    assert section.endswith("grants") or len(shown) == len(promised)


def test_every_difference_from_triton_has_its_test() -> None:
    pages = (DOCS / "FIDELITY.md", DOCS / "site" / "PROTOCOL_DIFFERENCES.md")
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    rows = re.findall(r"^\| (?!---|\|)(.+?) \| .*\|$", text, flags=re.MULTILINE)

    assert sorted(rows) == sorted(TESTS)
    for row, where in TESTS.items():
        path, _, name = where.partition("::")
        file = ROOT / path if "/" in path else ROOT / "tests" / "triton" / path
        assert file.exists(), f"{row}: there is no {path}"
        assert f"def {name}(" in file.read_text(encoding="utf-8") or not name, f"{row}: no {name}"


PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "deploy/*.md", "examples/*.md")
    for path in sorted(ROOT.glob(pattern))
]


@cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as hosts of code make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    words = [re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in words}


def test_a_link_to_a_heading_leads_to_one() -> None:
    links = [
        (path, page, anchor)
        for path in PAGES
        for page, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", path.read_text(encoding="utf-8"))
        if "://" not in page
    ]

    assert [
        f"{path}: {page}#{anchor}"
        for path, page, anchor in links
        if anchor not in anchors((path.parent / page).resolve() if page else path)
    ] == []


# Made by programs.
NOT_WRAPPED = ("API", "OPTIONS", "SERVE_OPTIONS", "RESULTS")


def test_lines_of_prose_have_at_most_120_characters() -> None:
    """Tables and lines with a link are excepted: neither can be wrapped everywhere."""
    pages = [path for path in PAGES if path.stem not in NOT_WRAPPED]
    texts = {path: re.sub(r"(?ms)^```.*?^```$", "", path.read_text(encoding="utf-8")) for path in pages}

    assert [
        f"{path}: {line}"
        for path, text in texts.items()
        for line in text.splitlines()
        if len(line) > 120 and not line.startswith("|") and "](" not in line
    ] == []


def python_complaint(block: str) -> str:
    ast.parse(block)
    return ""


def pbtxt_complaint(block: str) -> str:
    """Read it as a model's configuration, or as a part of one."""
    pbtxt.parse(block, "the block")
    return ""


def toml_complaint(block: str) -> str:
    """Read it as the file of `moonpool serve --config`."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(block)
        file.flush()
        read_options({"config": [file.name]}, {})
    return ""


def json_complaint(block: str) -> str:
    """Read it; if it has credentials of stores, take those of an address from it."""
    stores = json.loads(block)
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(block)
        file.flush()
        for scheme in stores:
            read_address(f"{scheme}://account/container", {CREDENTIAL_FILE: file.name})
    return ""


def yaml_complaint(block: str) -> str:
    yaml.safe_load(block)
    return ""


def shell_complaint(block: str) -> str:
    checked = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
    return checked.stderr


def ini_complaint(block: str) -> str:
    """Read the sections; if it is a unit of systemd's and systemd is installed, have it checked."""
    parser = configparser.RawConfigParser()
    parser.read_string(block)
    analyze = shutil.which("systemd-analyze")
    if analyze is None or not parser.has_section("Service"):
        return ""
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / "page.service"
        # The program is not installed where the page says.
        unit.write_text(re.sub(r"(?m)^(Exec\w+)=/\S+", r"\1=/bin/true", block), encoding="utf-8")
        command = [analyze, "verify", "--man=no", str(unit)]
        checked = subprocess.run(command, capture_output=True, text=True, check=False)
    return "\n".join(line for line in checked.stderr.splitlines() if unit.name in line)


INSTRUCTIONS = (
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
    *("RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
)


def dockerfile_complaint(block: str) -> str:
    """Check the instructions, the lists of words in JSON, and what runs in a shell."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", block))
    for number, line in enumerate(filter(None, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction not in INSTRUCTIONS or not rest.strip():
            return f"{line!r} is no instruction"
        if number == 0 and instruction not in ("ARG", "FROM"):
            return f"it begins with {instruction}"
        if rest.lstrip().startswith("["):
            json.loads(rest)
        elif instruction == "RUN" and (why := shell_complaint(rest)):
            return why
    return ""


CHECKS = {
    "json": json_complaint,
    "pbtxt": pbtxt_complaint,
    "python": python_complaint,
    "toml": toml_complaint,
    "yaml": yaml_complaint,
    "ini": ini_complaint,
    "dockerfile": dockerfile_complaint,
    "sh": shell_complaint,
    "bash": shell_complaint,
}


def complaint(language: str, block: str) -> str:
    """Return what is wrong with a block of code, or nothing."""
    try:
        return CHECKS[language](block) if language in CHECKS else ""
    except (SyntaxError, ValueError, MoonpoolError, yaml.YAMLError, configparser.Error) as error:
        return str(error)


def test_a_block_of_code_can_be_read() -> None:
    complaints = [(path, block.text, complaint(block.language, block.text)) for path in PAGES for block in blocks(path)]

    assert [each for each in complaints if each[-1]] == []


@pytest.mark.parametrize(
    ("language", "block"),
    [
        ("json", '{"s3": {"": {"key_id": "a",}}}\n'),
        ("pbtxt", "instance_group { kin: KIND_CPU }\n"),
        ("pbtxt", "max_batch_size: many\n"),
        ("python", "def f(:\n"),
        ("toml", "port = \n"),
        ("toml", "http-prot = 8000\n"),
        ("toml", "http-port = true\n"),
        ("yaml", "spec:\n  - { name: http\n"),
        ("yaml", "spec:\n\tports: []\n"),
        ("ini", "Description=Models\n"),
        ("ini", "[Service]\nUser=a\nUser=b\n"),
        ("dockerfile", "RUN pip install moonpool\n"),
        ("dockerfile", "FROM python:3.12\nCOPPY models /models\n"),
        ("dockerfile", "FROM python:3.12\nENTRYPOINT ['moonpool']\n"),
        ("dockerfile", "FROM python:3.12\nRUN (pip install \\\n  moonpool\n"),
        ("sh", "if true\n"),
    ],
)
def test_a_block_that_cannot_be_read_is_complained_of(language: str, block: str) -> None:
    assert complaint(language, block)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed here")
def test_a_setting_that_systemd_does_not_know_is_complained_of() -> None:
    assert "KillMod" in complaint("ini", "[Service]\nExecStart=/opt/m\nKillMod=mixed\n")


def test_every_decision_is_in_their_list() -> None:
    folder = DOCS / "decisions"
    headings = {
        path.name: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for path in folder.glob("0*.md")
    }
    lines = [f"- [{headings[name]}]({name})" for name in sorted(headings)]

    assert "\n".join(lines) in (folder / "README.md").read_text(encoding="utf-8")


# Those of the examples that pages name: a server that starts fewer takes less time.
EXAMPLES = ("add_sub", "normalise", "primes")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The folder in which the lines of pages are typed: with the examples, a repository, and moonpool in its own
    environment.
    """
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in EXAMPLES:
        shutil.copytree(MODELS / name, tmp_path / "models" / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    python = f"PYTHONPATH={shlex.quote(str(PACKAGE.parent))} exec {shlex.quote(sys.executable)}"
    for name, arguments in (("moonpool", "-m moonpool "), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\n{python} {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def reader(copy: Path, forks: Forks) -> Reader:
    return Reader(copy, forks)


@pytest.mark.promise(
    "The server (`moonpool serve`)", "The commands and programs in the README run in order as they stand."
)
@pytest.mark.timeout(600)
def test_the_readme_does_what_it_says(reader: Reader) -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 150

    assert reader.follow(blocks(readme)) == []

    doubled = "[[ 0.  2.  4.]\n [ 6.  8. 10.]]\n"
    assert reader.printed[".venv/bin/python use.py"] == doubled
    assert reader.printed[""] == "3.0\n{'COUNT': array([[25]])}\n"
    printed = "".join(reader.printed.values())
    assert re.search(r"^ok: primes: ", printed, re.MULTILINE)
    assert re.search(r"primes .*READY .*strict", reader.logs[0])


# In these, nothing is checked or run.
WITHOUT_CHECK = ("mermaid", "nginx", "text")
# A line with an ellipsis is nothing to type.
COMMAND = re.compile(r"^(\$ )?(\S*/)?(moonpool|pip|python3?|curl|docker|kubectl) [^…]*$", re.MULTILINE)


def test_a_block_says_its_language_and_no_text_is_a_command() -> None:
    known = {*CHECKS, *WITHOUT_CHECK}
    found = [(path, block) for path in PAGES for block in blocks(path)]

    assert [(path, block.text) for path, block in found if block.language not in known] == []
    texts = [(path, block.text) for path, block in found if block.language == "text"]
    assert [(path, text) for path, text in texts if COMMAND.search(text)] == []


# Pages whose blocks have a test that knows what they shall print.
RUN_BY = {"README.md": Path(__file__), "docs/TESTING_MODELS.md": ROOT / "tests" / "testing" / "test_testing_docs.py"}


@pytest.mark.promise(
    "The tree", "The programs and commands on the pages run as they stand, or the page's source says why not."
)
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.timeout(600)
def test_the_blocks_of_a_page_run(path: Path, reader: Reader) -> None:
    if run_by := RUN_BY.get(str(path.relative_to(ROOT))):
        assert path.name in run_by.read_text(encoding="utf-8")
    else:
        complaints = reader.follow(blocks(path))
        assert complaints == [], "\n".join(complaints)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("```sh\nls nowhere\n```\n", "ls nowhere ended with 2"),
        ("```sh\nmoonpool infer models nobody\n```\n", "nobody"),
        ("```sh\nmoonpool serve nowhere\n```\n", "nowhere"),
        ("```sh\necho one 2\n```\n\n```text\nshown 3\n```\n", "the page shows 'shown 0'"),
        ("```python\nprint(1 / 0)\n```\n", "ZeroDivisionError"),
    ],
)
def test_a_page_that_misleads_is_complained_of(page: str, why: str, reader: Reader) -> None:
    path = reader.folder / "page.md"
    path.write_text(page, encoding="utf-8")

    assert why in "".join(reader.follow(blocks(path)))


def test_an_output_may_have_other_numbers(reader: Reader) -> None:
    path = reader.folder / "page.md"
    path.write_text("```sh\necho 'p99   1,234.5 µs'\n```\n\n```text\np99  20 µs\n```\n")

    assert reader.follow(blocks(path)) == []


def test_the_command_line_knows_each_command_and_option_of_a_page() -> None:
    parser = make_parser()
    texts = [block.text for path in PAGES for block in blocks(path) if block.language in SHELL]
    for line in chain.from_iterable(map(lines_of, texts)):
        if shown := re.match(r"(?:\.venv/bin/)?moonpool (.+)", line):
            # What is unknown ends the test with argparse's complaint.
            parser.parse_args(shlex.split(shown[1], comments=True))
