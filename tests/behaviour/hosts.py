"""Everything that hosts a model, asked in one way: what a piece of Python comes to inside `execute`."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from tests.server.running import SOURCE, environment
from tests.server.running import running as serving
from tests.triton.backend.hosting import HostingServer
from tests.triton.server import TritonServer, interpreter

from moonpool import testing

# The first model runs the code and asks the others.
ASKER = "snippets"
ASKED = ("sends", "streams", "timed", "timed_fixed", "timed_alone")
TIMEOUT_S = 60.0

Ask: TypeAlias = Callable[[str], str]


def repository(folder: Path, backend: str = "python") -> Path:
    """The models in a folder of their own, for this backend."""
    models = Path(__file__).parents[1] / "triton" / "models"
    for name in (ASKER, *ASKED):
        shutil.copytree(models / name, folder / name)
        config = folder / name / "config.pbtxt"
        config.write_text(config.read_text().replace('backend: "python"', f'backend: "{backend}"'))
    return folder


def _others(folder: Path) -> dict[str, str]:
    return {name: str(folder / name) for name in ASKED}


@contextlib.contextmanager
def in_process(folder: Path) -> Iterator[Ask]:
    """`moonpool.testing`, in the process of the test."""
    with testing.load(repository(folder) / ASKER, models=_others(folder)) as model:
        yield lambda code: _text(model.infer(CODE=[code])["SAID"])


@contextlib.contextmanager
def in_stub(folder: Path) -> Iterator[Ask]:
    """`moonpool.testing`, in a stub."""
    with testing.load_in_stub(repository(folder) / ASKER, models=_others(folder)) as model:
        yield lambda code: _text(model.infer(CODE=[code])["SAID"])


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Ask]:
    """`moonpool serve`, over HTTP."""
    with serving(repository(folder)) as server:
        yield from _over_http(server.http)


@contextlib.contextmanager
def in_tritonserver(folder: Path) -> Iterator[Ask]:
    """The library in a tritonserver, over HTTP."""
    (folder / "server").mkdir()
    models = repository(folder / "repository", "moonpool")
    server = HostingServer(interpreter(), models, folder / "server", (ASKER, *ASKED))
    yield from _of_server(server)


@contextlib.contextmanager
def in_triton(folder: Path) -> Iterator[Ask]:
    """Triton's own Python backend, over HTTP."""
    (folder / "server").mkdir()
    models = repository(folder / "repository")
    server = TritonServer(interpreter(), models, folder / "server", (ASKER, *ASKED))
    yield from _of_server(server)


def _of_server(server: TritonServer) -> Iterator[Ask]:
    server.start()
    try:
        yield from _over_http(f"127.0.0.1:{server.http_port}")
    finally:
        server.stop()


def _over_http(address: str) -> Iterator[Ask]:
    def ask(code: str) -> str:
        tensor = {"name": "CODE", "datatype": "BYTES", "shape": [1], "data": [code]}
        url = f"http://{address}/v2/models/{ASKER}/infer"
        body = json.dumps({"inputs": [tensor]}).encode()
        with urllib.request.urlopen(url, body, timeout=TIMEOUT_S) as response:
            (said,) = json.loads(response.read())["outputs"][0]["data"]
        return str(said)

    yield ask


def _text(said: np.ndarray) -> str:
    (text,) = said
    return text.decode() if isinstance(text, bytes) else str(text)


def check(folder: Path) -> list[str]:
    """Run `moonpool check`; return its lines about the models, without the times."""
    ended = subprocess.run(
        [sys.executable, "-m", "moonpool", "check", str(repository(folder))],
        capture_output=True,
        text=True,
        env=environment(),
        cwd=SOURCE,
        timeout=120,
        check=False,
    )
    return sorted(line.partition(": version")[0] for line in ended.stdout.splitlines())
