"""The two hosts that speak KServe v2 themselves: `moonpool serve`, and tritonserver with its Python backend."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from moonpool.benchmarks.hosts.process import ServerProcess, Unavailable, held_ports, port_of, with_moonpool

_ASK_S = 60.0
# The Python beside which nvidia-pytriton is installed.
TRITON_PYTHON = "MOONPOOL_TRITON_PYTHON"
_FACTS = """
import importlib.util, sys, sysconfig
spec = importlib.util.find_spec("pytriton")
print("" if spec is None else spec.submodule_search_locations[0])
print(sysconfig.get_config_var("LIBDIR") or "")
print("%d.%d" % sys.version_info[:2])
"""


class KserveHost:
    """A server with ports for HTTP, gRPC and metrics, which are options of its command. `close` ends it."""

    name = ""
    # The health that it is waited for.
    health = "ready"

    def __init__(self, command: Sequence[str | Path], variables: Mapping[str, str] | None, log: Path) -> None:
        """Start it, and wait until it is ready. Raises `Unavailable` with the end of its log."""
        self._held = held_ports(3)
        numbers = [port_of(each) for each in self._held]
        ports = dict(zip(("http", "grpc", "metrics"), numbers, strict=True))
        self.http_port, self.grpc_port = ports["http"], ports["grpc"]
        options = [f"--{name}-port={port}" for name, port in ports.items()]
        options += [f"--{name}-address=127.0.0.1" for name in ports]
        self.command = [*map(str, command), *options]
        try:
            self._process = ServerProcess(self.name, self.command, variables, log, self._is_ready)
        except BaseException:
            self._close_ports()
            raise

    def _is_ready(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.http_port}/v2/health/{self.health}"
            with urllib.request.urlopen(url, timeout=_ASK_S):
                return True
        except OSError:
            return False

    @property
    def process(self) -> ServerProcess:
        """The server's process."""
        return self._process

    @property
    def pid(self) -> int:
        """The number of the server's process."""
        return self._process.pid

    def _close_ports(self) -> None:
        for each in self._held:
            each.close()

    def close(self) -> None:
        """End the server."""
        self._process.close()
        self._close_ports()


class MoonpoolHost(KserveHost):
    """`moonpool serve`, of the tree or installation that this program runs in."""

    name = "moonpool"
    program: Sequence[str] = ("-m", "moonpool")

    def __init__(self, models: Mapping[str, Path] | None, options: Sequence[str] = ()) -> None:
        """Serve these models, folders by name; with None, those that the options name. Raises `Unavailable`."""
        self._cleanup = contextlib.ExitStack()
        with self._cleanup:
            folder = Path(self._cleanup.enter_context(tempfile.TemporaryDirectory(prefix="moonpool-")))
            command: list[str | Path] = [sys.executable, *self.program, "serve"]
            if models is not None:
                repository = folder / "models"
                repository.mkdir()
                for name, model in models.items():
                    (repository / name).symlink_to(model.absolute())
                command += [f"--model-repository={repository}", "--allow-client-shm=true"]
            super().__init__([*command, *options], with_moonpool(), folder / "log")
            self._cleanup = self._cleanup.pop_all()

    def close(self) -> None:
        super().close()
        self._cleanup.close()


class TritonFiles:
    """A folder with a model repository and the Python backend for an interpreter, as the wheel `nvidia-pytriton` has
    it.
    """

    def __init__(self, python: Path, models: Mapping[str, Path]) -> None:
        """Copy the models, folders by name. Raises `Unavailable`."""
        self._python = python
        try:
            asked = subprocess.run([python, "-c", _FACTS], capture_output=True, text=True, check=False)
        except OSError as error:
            raise Unavailable(f"{python} does not run: {error}") from error
        if asked.returncode:
            raise Unavailable(f"{python} does not run: {asked.stderr.strip()[-200:]}")
        package, self._own_libraries, version = asked.stdout.splitlines()
        if not package:
            raise Unavailable(f"there is no pytriton beside {python}; pip install nvidia-pytriton")
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
        for name, folder in models.items():
            shutil.copytree(folder, self.repository / name, ignore=unwanted)

    @property
    def library(self) -> Path:
        """The server as a library."""
        found = sorted(self.libraries.glob("libtritonserver*.so"))
        if not found:
            raise Unavailable(f"there is no libtritonserver in {self.libraries}")
        return found[0]

    def environment(self) -> dict[str, str]:
        """Return the variables under which Triton's stub finds this interpreter's library and packages."""
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


class TritonHost(KserveHost):
    """tritonserver with its Python backend."""

    name = "Triton"

    def __init__(self, python: Path, models: Mapping[str, Path], options: Sequence[str] = ()) -> None:
        """Serve these models, folders by name, by the server that is installed beside an interpreter. Raises
        `Unavailable`.
        """
        self._files = TritonFiles(python, models)
        command: list[str | Path] = [
            self._files.server,
            f"--model-repository={self._files.repository}",
            f"--backend-directory={self._files.backends}",
            "--log-info=false",
            "--log-warning=false",
            *options,
        ]
        try:
            super().__init__(command, self._files.environment(), self._files.folder / "log")
        except BaseException:
            self._files.remove()
            raise

    def close(self) -> None:
        super().close()
        self._files.remove()
