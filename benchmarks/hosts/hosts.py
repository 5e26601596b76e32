"""Opens one model in several hosts, each of which becomes a subject of measurements.

`moonpool` and `triton` speak KServe v2. The others are programs in this folder (`on_*.py`), which run in an environment
that has their packages in pinned versions; it is built once into the cache of environments. They take the same bodies
at the same path, so all hosts get equal requests from the same generator. `processpool` has no server: it is called
from threads, and beside it moonpool in this process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool import BadEnvironment, MoonpoolError, __version__
from moonpool.benchmarks.data import DataMix
from moonpool.benchmarks.hosts.kserve import TRITON_PYTHON, KserveHost, MoonpoolHost, TritonHost
from moonpool.benchmarks.hosts.process import ServerProcess, Unavailable, held_ports, port_of
from moonpool.benchmarks.hosts.process_pool import ProcessPool
from moonpool.benchmarks.server import MeasuredServer
from moonpool.benchmarks.windows import Subject
from moonpool.runtime.client.request import Endpoint, Question
from moonpool.runtime.repository.environment import Environment, EnvironmentCache, resolve

# Hosts with an adapter program.
_PROGRAMS = ("ray", "litserve", "bentoml", "mosec", "fastapi")
HOSTS = ("moonpool", "triton", *_PROGRAMS, "processpool")
# The packages that a model needs in any host.
_FOR_MODELS = ("msgpack>=1.1", "numpy>=1.26")
_FOR_TRITON = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
_ASK_S = 30.0
# The folder of the package `moonpool`.
_PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Task:
    """The model that all hosts get, and the requests to it."""

    model: str
    # The model's directory.
    folder: Path
    # A file with the START of an instance.
    start_file: Path
    instances: int
    mix: DataMix
    # Packages that the model needs beside numpy.
    packages: Sequence[str]
    # Options of `moonpool serve`.
    serve_options: Sequence[str]
    timeout_s: float
    processes: int
    most_connections: int


@dataclass(frozen=True, slots=True)
class OpenHost:
    """A host that answers, with the packages and the command by which it was started."""

    name: str
    subject: Subject
    versions: str
    command: str

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "versions": self.versions, "command": self.command}


def open_host(stack: contextlib.ExitStack, name: str, task: Task) -> OpenHost:
    """Start a host and send it a request; the stack ends it. Raises `Unavailable` with the reason, for any reason."""
    try:
        if name == "processpool":
            return _process_pool(stack, task)
        if name in _PROGRAMS:
            return _program(stack, name, task)
        return _kserve(stack, name, task)
    except Unavailable:
        raise
    except (MoonpoolError, OSError) as error:
        raise Unavailable(str(error)) from error


def _kserve(stack: contextlib.ExitStack, name: str, task: Task) -> OpenHost:
    models = {task.model: task.folder}
    host: KserveHost
    if name == "moonpool":
        host, versions = MoonpoolHost(models, task.serve_options), f"moonpool {__version__}"
    else:
        python = _triton_python(stack)
        host, versions = TritonHost(python, models), _versions(python, ("nvidia-pytriton",))
    stack.callback(host.close)
    subject = _measured(stack, name, task, host.http_port, host.pid)
    return OpenHost(name, subject, versions, " ".join(host.command))


def _triton_python(stack: contextlib.ExitStack) -> Path:
    if named := os.environ.get(TRITON_PYTHON):
        return Path(named).absolute()
    return _environment(stack, "triton", _FOR_TRITON).python


def _process_pool(stack: contextlib.ExitStack, task: Task) -> OpenHost:
    pool = ProcessPool(str(task.start_file), task.mix, task.instances, task.timeout_s)
    stack.callback(pool.close)
    versions = f"Python {platform.python_version()}"
    return OpenHost("processpool", pool, versions, f"ProcessPoolExecutor({task.instances})")


def needs_of(name: str) -> tuple[str, ...]:
    """Return the packages of a host with a program."""
    found: tuple[str, ...] = importlib.import_module(f"{__package__}.on_{name}").NEEDS
    return found


def _program(stack: contextlib.ExitStack, name: str, task: Task) -> OpenHost:
    needs = needs_of(name)
    environment = _environment(stack, name, (*needs, *_FOR_MODELS, *task.packages))
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"moonpool-{name}-")))
    # A path with moonpool alone: beside it lie this interpreter's packages, which are not for the host.
    path = scratch / "path"
    path.mkdir()
    (path / "moonpool").symlink_to(_PACKAGE.resolve())
    kept = {key: text for key, text in os.environ.items() if not key.startswith("PYTHON")}
    variables = {**kept, **environment.variables, "PYTHONPATH": str(path), "HOME": str(scratch)}
    [held] = held_ports(1)
    stack.callback(held.close)
    endpoint = Endpoint("http", "127.0.0.1", port_of(held))
    question = Question(task.model, "", task.mix.requests[0].inputs)
    where = f"/v2/models/{task.model}/infer"
    command = [str(environment.python), "-m", f"{__package__}.on_{name}"]
    command += [str(task.start_file), where, str(endpoint.port), str(task.instances)]
    probe = question.as_http(endpoint).partition(b"\r\n\r\n")[2]
    url = endpoint.url + where
    process = ServerProcess(name, command, variables, scratch / "log", lambda: _answers(url, probe))
    stack.callback(process.close)
    subject = _measured(stack, name, task, endpoint.port, process.pid)
    return OpenHost(name, subject, _versions(environment.python, needs), " ".join(command))


def _answers(url: str, body: bytes) -> bool:
    headers = {"Content-Type": "application/octet-stream"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=_ASK_S) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _environment(stack: contextlib.ExitStack, name: str, packages: Sequence[str]) -> Environment:
    """Build the environment of a host, or take it from the cache. Raises `Unavailable`."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / f"{name}.txt"
        wanted.write_text("\n".join(packages) + "\n", encoding="utf-8")
        try:
            found = resolve(str(wanted), Path(folder), cache=EnvironmentCache())
        except BadEnvironment as error:
            raise Unavailable(str(error)) from error
    stack.callback(found.release)
    return found


def _versions(python: Path, needs: Sequence[str]) -> str:
    """Name the installed versions of packages, from the names of their folders, so that nothing runs for it."""
    found = []
    for need in needs:
        name = re.split(r"[\[=<>]", need)[0]
        pattern = f"lib/python*/site-packages/{name.replace('-', '_')}-*.dist-info"
        folders = sorted(python.parents[1].glob(pattern))
        found += [f"{name} {path.name.removesuffix('.dist-info').partition('-')[2]}" for path in folders]
    return ", ".join(found)


def _measured(stack: contextlib.ExitStack, name: str, task: Task, port: int, pid: int) -> MeasuredServer:
    """Return the model behind a port, after one request."""
    endpoint = Endpoint("http", "127.0.0.1", port)
    server = MeasuredServer(endpoint, task.model, "", timeout_s=task.timeout_s, server_pid=pid)
    stack.callback(server.close)
    server.where = f"{name}, HTTP"
    server.prepare(task.mix, processes=task.processes, most_connections=task.most_connections)
    return server


def copy_of_model(folder: Path, target: Path, instances: int | None) -> None:
    """Copy a model's directory; with `instances`, its configuration gets one group of so many."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"))
    if instances is None:
        return
    from google.protobuf import text_format

    from moonpool.runtime.model.protobuf import config_messages

    messages = config_messages()
    path = target / "config.pbtxt"
    config = messages.ModelConfig()
    if path.exists():
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    del config.instance_group[:]
    config.instance_group.add(count=instances, kind=messages.ModelInstanceGroup.KIND_CPU)
    path.write_text(text_format.MessageToString(config), encoding="utf-8")
