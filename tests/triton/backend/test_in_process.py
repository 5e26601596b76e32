"""The server as a library of another program, which keeps its symbols to itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.triton.backend import zoo
from tests.triton.backend.hosting import HostingServer
from tests.triton.server import interpreter

_PROGRAM = """
import ctypes, os, sys

libraries, repository, backends = sys.argv[1:]
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
call("ServerNew", ctypes.byref(server), options)
call("ServerModelIsReady", server, b"identity", ctypes.c_int64(-1), ctypes.byref(is_ready))
print(is_ready.value)
call("ServerStop", server)
call("ServerDelete", server)
print("ended")
"""


def test_models_load_in_a_program_that_holds_the_server_as_a_library(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    zoo.write(repository, ["identity"])
    server = HostingServer(interpreter(), repository, tmp_path)
    backends, libraries = server.lay_out()
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, libraries, repository, backends],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries)},
        check=False,
    )
    assert ended.stdout.splitlines()[-2:] == ["True", "ended"], ended.stderr[-2000:]
