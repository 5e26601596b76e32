"""Builds the site of this tree, and of each release beside it, in `build/site`: `make site`.

A release is a tag such as v0.2.0, and its site is made by its own settings from its own files. Each site lists the
others. The address of all leads to the newest release, or to `next`, the site of this tree, before there is one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITES = ROOT / "build" / "site"
NEXT = "next"
RELEASE = re.compile(r"v\d+(\.\d+)+")


def releases(tree: Path) -> list[str]:
    """Return the versions that a repository has a tag for, newest first."""
    tags = subprocess.check_output(["git", "tag", "--sort=-version:refname"], cwd=tree, text=True).split()
    return [tag.removeprefix("v") for tag in tags if RELEASE.fullmatch(tag)]


def build(tree: Path, site: Path, versions: list[str]) -> None:
    """Build the site of a tree, which lists these versions. Raises CalledProcessError at a warning."""
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "-c", "docs/site", "."]
    # What is described is the moonpool of that tree, wherever another one is installed.
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "MOONPOOL_VERSIONS": " ".join(versions)}
    subprocess.run([*command, site], cwd=tree, env=environment, check=True)


def build_all(tree: Path, sites: Path) -> None:
    """Build the sites of a tree and of its releases in a folder, which is emptied."""
    shutil.rmtree(sites, ignore_errors=True)
    found = releases(tree)
    versions = [NEXT, *found]
    build(tree, sites / NEXT, versions)
    for version in found:
        with tempfile.TemporaryDirectory() as folder:
            # Not an unpacked archive: the page of figures asks git for their history.
            worktree = partial(subprocess.run, cwd=tree, check=True)
            worktree(["git", "worktree", "add", "--quiet", "--detach", folder, f"v{version}"])
            try:
                build(Path(folder), sites / version, versions)
            finally:
                worktree(["git", "worktree", "remove", "--force", folder])
    first = found[0] if found else NEXT
    page = f'<!doctype html><meta http-equiv="refresh" content="0; url={first}/index.html">\n'
    (sites / "index.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    build_all(ROOT, SITES)
