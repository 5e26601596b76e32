"""Compiles the library for tritonserver into the wheel if there is a compiler, and keeps the tree's links in an sdist.

Everything else is in pyproject.toml.

A wheel that has the library is for one platform and any Python. One without it works for everything but Triton.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist
from setuptools.errors import CompileError

NATIVE = Path("src/moonpool/runtime/triton/native")
LIBRARY = "moonpool.runtime.triton.libtriton_moonpool"
# `0`: leave it out.
SWITCH = "MOONPOOL_BUILD_TRITON"


def extensions() -> list[Extension]:
    if os.environ.get(SWITCH) == "0":
        return []
    tools = ("make", os.environ.get("CXX", "g++"))
    missing = ", ".join(tool for tool in tools if shutil.which(tool) is None)
    if missing:
        print(f"moonpool is built without its library for tritonserver: there is no {missing}")
        return []
    return [Extension(LIBRARY, sorted(map(str, NATIVE.glob("*.cpp"))))]


class Build(build_ext):
    """Runs the Makefile. The library is no Python module, so its file name has no tag of an interpreter."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    @property
    def is_in_tree(self) -> bool:
        """True for a source tree, where the tests compile the library when they need it."""
        return bool(self.inplace or getattr(self, "editable_mode", False))

    def run(self) -> None:
        if not self.is_in_tree:
            super().run()

    def get_outputs(self) -> list[str]:
        return [] if self.is_in_tree else super().get_outputs()

    def build_extension(self, extension: Extension) -> None:
        made = Path(self.build_temp).absolute()
        command = ["make", "-C", str(NATIVE), f"OUT={made}", f"-j{os.cpu_count() or 1}"]
        if subprocess.run(command, check=False).returncode:
            raise CompileError(
                f"the library for tritonserver was not compiled; {SWITCH}=0 builds moonpool without it"
            )
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(made / target.name, target)


class Sdist(sdist):
    """Packs the repository's tree, links included. setuptools alone would pack the files behind a link a second time."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        links = sorted({link for file in files if (link := link_of(file))})
        super().make_release_tree(base_dir, [file for file in files if not link_of(file)])
        for link in links:
            copy = Path(base_dir, link)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(os.readlink(link))


def link_of(file: str) -> str | None:
    """Return the link that a path leads through or ends at; None if there is none."""
    path = Path(file)
    return next((str(part) for part in (*reversed(path.parents), path) if part.is_symlink()), None)


class Wheel(bdist_wheel):
    """Any Python may have what is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(ext_modules=extensions(), cmdclass={"build_ext": Build, "bdist_wheel": Wheel, "sdist": Sdist})
