"""The server as a library of another program, which keeps its symbols to itself."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import subprocess
import sys
from pathlib import Path

from tests.runtime.triton.library import library
from tests.triton.backend import zoo
from tests.triton.backend.hosting import HostingServer
from tests.triton.server import interpreter

_PROGRAM = """
import ctypes, os, pathlib, sys, threading, time

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
# Ends the server while `asks` has asked for a model whose load goes on.
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


def run(program: str, tmp_path: Path, *startup: str) -> subprocess.CompletedProcess[str]:
    server = HostingServer(interpreter(), tmp_path / "repository", tmp_path)
    backends, libraries = server.lay_out()
    return subprocess.run(
        [
            sys.executable,
            "-c",
            _PROGRAM + program,
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


def test_models_load_in_a_program_that_holds_the_server_as_a_library(tmp_path: Path) -> None:
    zoo.write(tmp_path / "repository", ["identity"])

    ended = run(_LOADS, tmp_path)

    assert ended.stdout.splitlines()[-2:] == ["True", "ended"], ended.stderr[-2000:]


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


def test_the_library_stays_for_threads_that_outlive_its_models() -> None:
    path = str(library())
    closed = ctypes.CDLL(path)
    _ctypes.dlclose(closed._handle)

    assert path in Path("/proc/self/maps").read_text()
