"""The real Triton server with its Python backend, as the wheel `nvidia-pytriton` carries it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hosted import folder_of
from benchmarks.peer.peer import Unavailable

VARIABLE = "MOONPOOL_TRITON_PYTHON"
_USUAL = Path(__file__).parents[2] / ".venv-triton" / "bin" / "python"
_FACTS = """
import importlib.util, sys, sysconfig
spec = importlib.util.find_spec("pytriton")
print("" if spec is None else spec.submodule_search_locations[0])
print(sysconfig.get_config_var("LIBDIR") or "")
print("%d.%d" % sys.version_info[:2])
"""


def triton_python() -> Path:
    """Find the interpreter beside which nvidia-pytriton is installed: this one, unless another is named."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return _USUAL if _USUAL.exists() else Path(sys.executable)


class TritonFiles:
    """A folder with a model repository and the Python backend for an interpreter."""

    def __init__(self, python: Path | None = None, models: Sequence[str] = ("add_sub",)) -> None:
        """The interpreter is this one by default. `folder_of` says how models are named. Raises Unavailable."""
        self._python = python or Path(sys.executable)
        asked = subprocess.run(
            [self._python, "-c", _FACTS], capture_output=True, text=True, check=False
        )
        if asked.returncode:
            raise Unavailable(f"{self._python} does not run: {asked.stderr.strip()[-200:]}")
        package, self._own_libraries, version = asked.stdout.splitlines()
        if not package:
            raise Unavailable(
                f"there is no pytriton beside {self._python}; pip install nvidia-pytriton"
            )
        wheel = Path(package) / "tritonserver"
        self.libraries = Path(package).parent / "nvidia_pytriton.libs"
        self.server = wheel / "bin" / "tritonserver"
        stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.is_file():
            raise Unavailable(f"the wheel has no Triton stub for Python {version}")
        self._scratch = tempfile.TemporaryDirectory(prefix="triton-")
        self.folder = Path(self._scratch.name)
        self.backends, self.repository = self.folder / "backends", self.folder / "models"
        backend = self.backends / "python"
        backend.mkdir(parents=True)
        for file in (*(wheel / "backends" / "python").glob("*.*"), stub):
            (backend / file.name).symlink_to(file)
        unwanted = shutil.ignore_patterns("__pycache__")
        for model in models:
            name, folder = folder_of(model)
            shutil.copytree(folder, self.repository / name, ignore=unwanted)

    @property
    def library(self) -> Path:
        """The server as a library."""
        found = sorted(self.libraries.glob("libtritonserver*.so"))
        if not found:
            raise Unavailable(f"there is no libtritonserver in {self.libraries}")
        return found[0]

    def environment(self) -> dict[str, str]:
        """Variables under which Triton's stub finds this interpreter's library and packages."""
        # PYTHON variables of this interpreter would break models of another one.
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        return {
            **kept,
            "LD_LIBRARY_PATH": f"{self._own_libraries}:{self.libraries}",
            # The stub of the wheel runs the first `python3` on the path.
            "PATH": f"{self._python.parent}:{os.environ.get('PATH', '')}",
            "VIRTUAL_ENV": str(self._python.parents[1]),
        }

    def remove(self) -> None:
        """Delete the folder."""
        self._scratch.cleanup()
