"""The real Triton server with its Python backend, as the wheel `nvidia-pytriton` carries it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from benchmarks.hosted import MODELS
from benchmarks.peer.peer import Unavailable


class TritonFiles:
    """A folder with a model repository and the Python backend for this interpreter."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("pytriton")
        if spec is None or spec.origin is None:
            raise Unavailable("there is no pytriton here; pip install nvidia-pytriton")
        wheel = Path(spec.origin).parent / "tritonserver"
        self.libraries = Path(spec.origin).parents[1] / "nvidia_pytriton.libs"
        self.server = wheel / "bin" / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.is_file():
            raise Unavailable(f"the wheel has no Triton stub for Python {version}")
        self._room = tempfile.TemporaryDirectory(prefix="triton-")
        self.folder = Path(self._room.name)
        self.backends, self.repository = self.folder / "backends", self.folder / "models"
        backend = self.backends / "python"
        backend.mkdir(parents=True)
        for file in (*(wheel / "backends" / "python").glob("*.*"), stub):
            (backend / file.name).symlink_to(file)
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(MODELS / "add_sub", self.repository / "add_sub", ignore=unwanted)

    @property
    def library(self) -> Path:
        """The server as a library."""
        found = sorted(self.libraries.glob("libtritonserver*.so"))
        if not found:
            raise Unavailable(f"there is no libtritonserver in {self.libraries}")
        return found[0]

    def environment(self) -> dict[str, str]:
        """Variables under which Triton's stub finds this interpreter's library and packages."""
        own = sysconfig.get_config_var("LIBDIR") or ""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": f"{own}:{self.libraries}",
            # The stub of the wheel takes whatever `python3` is first.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        }

    def remove(self) -> None:
        """Delete the folder."""
        self._room.cleanup()
