"""Settings of Sphinx, which makes a site of the pages, with the reference of the API: `make site`.

The repository is Sphinx's folder of sources: links between pages, and from pages to files, are what they are there.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

import moonpool
import moonpool.errors
import moonpool.testing

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import diagrams  # noqa: E402
import history  # noqa: E402
import specification  # noqa: E402

project = "moonpool"
html_title = f"moonpool {moonpool.__version__}"
html_theme = "furo"
html_copy_source = False
# The versions whose sites lie beside this one, which docs/versions.py knows; versions.html lists them.
html_context = {"versions": os.environ.get("MOONPOOL_VERSIONS", "").split()}
templates_path = ["."]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "versions.html",
        "sidebar/scroll-end.html",
    ]
}
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinxcontrib.mermaid"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md", "deploy/*.md", "examples/*.md"]
# Not searched for pages.
exclude_patterns = [".*", "build", "dist", "ipc", "runtime", "src", "stub", "tests"]
# The anchors of headings are those of the hosts of code.
myst_heading_anchors = 6
myst_fence_as_directive = ["mermaid"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
# The tables of results begin with smaller headings.
suppress_warnings = ["myst.header"]

API = "docs/API"
SECTIONS = {
    "Tours": ("TOUR_HOST", "TOUR_MEASURE", "TOUR_TRITON", "/examples/README"),
    "Host models": (
        "EMBEDDING",
        "NATIVE_MODELS",
        "OPENAI",
        "TRITON_MODELS",
        "ENSEMBLES",
        "BACKENDS",
        "OPTIONS",
        "ENVIRONMENTS",
        "GPU",
    ),
    "Serve": (
        "SERVING",
        "OPERATING",
        "SECURING",
        "MIGRATING",
        "SERVE_OPTIONS",
        "CLOUD",
        "SCALING",
        "/deploy/README",
        "RAY",
        "MONITORING",
        "TRITON_BACKEND",
        "FIDELITY",
    ),
    "Contain": ("SANDBOX", "LIMITS", "PREFORK"),
    "Test and measure": (
        "TESTING_MODELS",
        "BENCH",
        "TUNING",
        "PERFORMANCE",
        "/benchmarks/README",
        "site/HISTORY",
        "site/CONTAINED",
    ),
    "Reference": (
        "API",
        "site/SPECIFICATION",
        "site/THREATS",
        "site/HUB_ATTACKS",
        "site/VERSIONS",
        "ARCHITECTURE",
        "site/GLOSSARY",
        "site/WIRE",
        "site/STATES",
        "site/THREADS",
        "site/CONFIG_FIELDS",
        "site/SANDBOX_KERNEL",
        "site/PROTOCOL_DIFFERENCES",
        "site/CONFORMANCE",
        "site/BENCH_FILES",
        "decisions/README",
    ),
}


def contents() -> str:
    """The list of all pages: those of SECTIONS, and then the others."""
    listed = {
        title: [name if name.startswith("/") else f"/docs/{name}" for name in names]
        for title, names in SECTIONS.items()
    }
    known = {"/README", *(name for names in listed.values() for name in names)}
    folders = ("", "docs", "benchmarks", "benchmarks/results", "deploy", "examples")
    pages = [
        "/" + page.relative_to(ROOT).with_suffix("").as_posix()
        for folder in folders
        for page in sorted((ROOT / folder).glob("*.md"))
    ]
    listed["More"] = [page for page in pages if page not in known]
    return "\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {title}", "", *names, "```", ""])
        for title, names in listed.items()
    )


def reference() -> str:
    """The directives for what the public modules offer; the text is in the docstrings."""
    lines = []
    for module in (moonpool, moonpool.testing, moonpool.errors):
        named = module.__name__
        names = [name for name in sorted(module.__all__) if callable(getattr(module, name))]
        lines += [f"## {named}", "", "```{eval-rst}", f".. automodule:: {named}", ""]
        for name in names:
            kind = "autoclass" if isinstance(getattr(module, name), type) else "autofunction"
            members = ["   :members:"] * (kind == "autoclass")
            lines += [f".. {kind}:: {named}.{name}", *members, ""]
        lines += ["```", ""]
    return "\n".join(lines)


def complete(_: Sphinx, page: str, source: list[str]) -> None:
    """Add what is generated to a page. A link to a folder leads to its README."""
    if page == root_doc:
        source[0] += f"\n{contents()}"
    elif page == API:
        # The site has whole docstrings in place of their first sentences.
        source[0] = f"{source[0].partition('<!-- names -->')[0]}\n{reference()}"
    elif page == "docs/site/SPECIFICATION":
        source[0] = specification.page()
    elif page == "docs/site/HISTORY":
        source[0] = history.page()
    elif page in ("docs/site/WIRE", "docs/site/STATES"):
        source[0] = diagrams.drawn(source[0])
    elif page == "docs/decisions/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    source[0] = re.sub(r"\]\(((?!\w+:)[^()\s#]+/)\)", r"](\1README.md)", source[0])


def as_restructured_text(
    _app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]
) -> None:
    """Read a docstring as the code has it: `words` are code, and so are blocks that are indented."""
    made: list[str] = []
    for line in lines:
        is_code = line.startswith("    ")
        if is_code and made[-1:] == [""] and len(made) > 1 and not made[-2].startswith("    "):
            made += ["::", ""]
        made.append(line if is_code else re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line))
    lines[:] = made


def list_for_models(app: Sphinx, error: Exception | None) -> None:
    """Write llms.txt, where a language model that reads the site looks for what each page is about."""
    if error is not None:
        return
    lines = [f"# {project}", "", f"> {moonpool.__doc__.partition(chr(10))[0]}", ""]
    for title, names in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names:
            page = name.removeprefix("/") if name.startswith("/") else f"docs/{name}"
            lines.append(f"- [{app.env.titles[page].astext()}]({page}.html)")
        lines.append("")
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def lead_to_readme(app: Sphinx, error: Exception | None) -> None:
    """Write index.html, where a browser looks for the first page."""
    if error is None:
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connect the functions above with Sphinx."""
    # Pygments has no lexer for configurations.
    app.add_lexer("pbtxt", TextLexer)
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("build-finished", lead_to_readme)
    app.connect("build-finished", list_for_models)
