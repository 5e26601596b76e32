"""The server as a library of another program, which keeps its symbols to itself."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.triton.library import library
from tests.triton.backend import zoo
from tests.triton.backend.hosting import HostingServer
from tests.triton.server import interpreter

_PROGRAM = """
import contextlib, ctypes, os, pathlib, sys, threading, time

libraries, repository, backends, *startup = sys.argv[1:]
(name,) = [each for each in os.listdir(libraries) if each.startswith("libtritonserver")]
triton = ctypes.CDLL(os.path.join(libraries, name), mode=os.RTLD_LOCAL | os.RTLD_NOW)
triton.TRITONSERVER_ErrorMessage.restype = ctypes.c_char_p

def call(name, *arguments):
    function = getattr(triton, "TRITONSERVER_" + name)
    function.restype = ctypes.c_void_p
    error = function(*arguments)
    if error:
        sys.exit(triton.TRITONSERVER_ErrorMessage(ctypes.c_void_p(error)).decode())

# Before the server.
options, server, is_ready = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_bool()
call("ServerOptionsNew", ctypes.byref(options))
call("ServerOptionsSetModelRepositoryPath", options, repository.encode())
call("ServerOptionsSetBackendDirectory", options, backends.encode())
for model in startup:
    call("ServerOptionsSetModelControlMode", options, 2)
    call("ServerOptionsSetStartupModel", options, model.encode())
call("ServerNew", ctypes.byref(server), options)
"""
_LOADS = """
call("ServerModelIsReady", server, b"identity", ctypes.c_int64(-1), ctypes.byref(is_ready))
print(is_ready.value)
call("ServerStop", server)
call("ServerDelete", server)
print("ended")
"""
# The program ends the server while `asks` waits for a model that is loading.
_ENDS = """
folder = pathlib.Path(repository)
while not (folder / "loading").exists():
    time.sleep(0.01)
stopping = threading.Thread(target=call, args=("ServerStop", server))
stopping.start()
(folder / "go").touch()
stopping.join()
call("ServerDelete", server)
print("ended")
"""
# This library stands between moonpool's and the server, and knows the instance about which a newer server would ask.
_BETWEEN = """
void *instance;
void *(*real)(void *, void *);
void *TRITONBACKEND_ModelInstanceSetState(void *its, void *state) { instance = its; return real(its, state); }
"""
# The program runs this before it makes the server.
_STANDS_BETWEEN = """
between = ctypes.CDLL(os.path.join(repository, "..", "between.so"), mode=os.RTLD_GLOBAL)
real = ctypes.cast(triton.TRITONBACKEND_ModelInstanceSetState, ctypes.c_void_p)
ctypes.c_void_p.in_dll(between, "real").value = real.value
"""
_ASKS_WHETHER_IT_IS_READY = """
library = ctypes.CDLL(os.path.join(backends, "moonpool", "libtriton_moonpool.so"))
library.TRITONBACKEND_ModelInstanceReady.restype = ctypes.c_void_p

def why_not_ready():
    error = library.TRITONBACKEND_ModelInstanceReady(ctypes.c_void_p.in_dll(between, "instance"))
    return error and triton.TRITONSERVER_ErrorMessage(ctypes.c_void_p(error)).decode()

print(why_not_ready())
for children in pathlib.Path("/proc/self/task").glob("*/children"):
    # A thread may have ended since it was listed.
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in children.read_text().split():
            os.kill(int(child), 9)
while (why := why_not_ready()) is None:
    time.sleep(0.01)
print(why)
call("ServerStop", server)
call("ServerDelete", server)
print("ended")
"""
_ASKS = """
import threading, time
import triton_python_backend_utils as pb_utils

def load():
    # The server may not have begun yet.
    while not pb_utils.is_model_ready("asks"):
        time.sleep(0.01)
    pb_utils.load_model("slow")

class TritonPythonModel:
    def initialize(self, args):
        threading.Thread(target=load, daemon=True).start()

    def execute(self, requests):
        return []
"""
_SLOW = """
import pathlib, time
class TritonPythonModel:
    def initialize(self, args):
        folder = pathlib.Path(args["model_repository"]).parent
        (folder / "loading").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)

    def execute(self, requests):
        return []
"""


def run(program: str, tmp_path: Path, *startup: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program in which the server is a library; `before` is done before the server is made."""
    server = HostingServer(interpreter(), tmp_path / "repository", tmp_path)
    backends, libraries = server.lay_out()
    return subprocess.run(
        [
            sys.executable,
            "-c",
            _PROGRAM.replace("# Before the server.", before) + program,
            libraries,
            tmp_path / "repository",
            backends,
            *startup,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        check=False,
    )


@pytest.mark.promise(
    "Executing in a tritonserver",
    "The library also loads where the server is a library itself, in a program that keeps its symbols to itself.",
)
def test_models_load_in_a_program_that_holds_the_server_as_a_library(tmp_path: Path) -> None:
    zoo.write(tmp_path / "repository", ["identity"])

    ended = run(_LOADS, tmp_path)

    assert ended.stdout.splitlines()[-2:] == ["True", "ended"], ended.stderr[-2000:]


@pytest.mark.promise(
    "Executing in a tritonserver",
    "A server may end while a model waits for another one to load. The library stays in the "
    "process as long as a thread is at work in it.",
)
def test_a_server_that_ends_while_a_model_has_asked_for_another_one(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    zoo.write(repository, ["identity"])
    for name, text in (("asks", _ASKS), ("slow", _SLOW)):
        (repository / name / "1").mkdir(parents=True)
        config = (repository / "identity" / "config.pbtxt").read_text()
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.py").write_text(text)

    ended = run(_ENDS, tmp_path, "asks")

    assert (ended.stdout, ended.returncode) == ("ended\n", 0), ended.stderr[-2000:]


@pytest.mark.promise("Executing in a tritonserver", "If the next launcher cannot …")
def test_an_instance_without_a_process_is_not_ready(tmp_path: Path) -> None:
    compiler = shutil.which("gcc") or pytest.skip("there is no C compiler")
    zoo.write(tmp_path / "repository", ["identity"])
    (tmp_path / "between.c").write_text(_BETWEEN)
    arguments = ["-shared", "-fPIC", "-o", "between.so", "between.c"]
    subprocess.run([compiler, *arguments], cwd=tmp_path, check=True)

    ended = run(_ASKS_WHETHER_IT_IS_READY, tmp_path, before=_STANDS_BETWEEN)

    said = ["None", "Stub process 'identity_0_0' is not healthy.", "ended"]
    assert ended.stdout.splitlines()[-3:] == said, ended.stderr[-2000:]


@pytest.mark.promise("Executing in a tritonserver", "A server may end while …")
def test_the_library_stays_for_threads_that_outlive_its_models() -> None:
    path = str(library())
    closed = ctypes.CDLL(path)
    _ctypes.dlclose(closed._handle)

    assert path in Path("/proc/self/maps").read_text()
