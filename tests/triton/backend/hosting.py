"""A tritonserver that has this moonpool as one of its backends, and what it is made of."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from tests.runtime.triton.library import library
from tests.server.observability.models import trace_entries
from tests.triton.server import TritonServer
from tests.waiting import wait_until
from tritonclient.utils import np_to_triton_dtype

from moonpool.runtime.triton import install

TIMEOUT_S = 60.0


class HostingServer(TritonServer):
    """Beside its own backends it has `moonpool`."""

    def lay_out_backend(self) -> None:
        super().lay_out_backend()
        install.install(self._backends, library())

    def command(self) -> list[str]:
        # Tests choose the traced requests while it runs.
        return [*super().command(), f"--trace-config=triton,file={self._trace_file}", "--trace-config=level=OFF"]

    @property
    def _trace_file(self) -> Path:
        return self.log_file.with_name("traces.json")

    def traces(self) -> list[dict[str, Any]]:
        """The traces of requests so far. Their times and activities are separate entries."""
        files = self._trace_file.parent.glob(f"{self._trace_file.name}*")
        return [each for file in files for each in trace_entries(file) if "model_name" in each]

    def lay_out(self) -> tuple[Path, Path]:
        """Lay out the folders of the backends and the libraries, for another program to start with."""
        self.lay_out_backend()
        return self._backends, self._package.parent / "nvidia_pytriton.libs"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def launcher(self) -> int:
        """The process that starts the stubs of `moonpool`; waits while one takes another's place."""
        found: list[int] = []

        def is_one() -> bool:
            lines = _commands(self.pid).items()
            found[:] = [pid for pid, line in lines if _is_launcher(line)]
            return len(found) == 1

        wait_until(is_one, TIMEOUT_S, "one launcher")
        return found[0]

    def stub_of(self, model: str) -> int:
        """The process of its only instance."""
        lines = _commands(self.launcher)
        (pid,) = [pid for pid, words in lines.items() if any(f"{model}_0_0" in w for w in words)]
        return pid

    def facts(self) -> dict[str, int]:
        """Count the things that grow if something is left behind."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        (threads,) = re.findall(r"Threads:\s+(\d+)", status)
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return {
            "threads": int(threads),
            "files": len(os.listdir(f"/proc/{self.pid}/fd")),
            "regions": maps.count("memfd:moonpool"),
            "processes": len(children(self.launcher)),
        }

    def has_no_more_than(self, before: dict[str, int]) -> bool:
        """Return true if nothing has grown since. Resources may be freed a moment after the answer, so ask again."""
        return all(now <= before[name] for name, now in self.facts().items())


def children(pid: int) -> list[int]:
    """The processes that this one has started and that are there still."""
    found = []
    for each in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(each))
    return found


def _commands(pid: int) -> dict[int, list[str]]:
    """The command lines of the processes that this one has started, word by word."""
    found = {}
    for each in children(pid):
        with suppress(OSError):  # the process has ended meanwhile
            found[each] = Path(f"/proc/{each}/cmdline").read_text().split("\0")
    return found


def _is_launcher(words: Sequence[str]) -> bool:
    """Return true if the process is this backend's launcher. An overlay has launchers of its own."""
    return install.NAME in words and any(word.endswith("launcher.py") for word in words)


class Client:
    """One client's view of the server."""

    def __init__(self, server: TritonServer) -> None:
        self.grpc = grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")

    def load(self, model: str) -> None:
        self.grpc.load_model(model, client_timeout=TIMEOUT_S)

    def unload(self, model: str) -> None:
        """Return when it is gone."""
        self.grpc.unload_model(model, client_timeout=TIMEOUT_S)
        wait_until(lambda: self._is_unloaded(model), TIMEOUT_S, f"{model} to be unloaded")

    def _is_unloaded(self, model: str) -> bool:
        index = self.grpc.get_model_repository_index(as_json=True)["models"]
        (entry,) = [each for each in index if each["name"] == model]
        return str(entry.get("reason")) == "unloaded"

    def infer(self, model: str, array: np.ndarray, **options: Any) -> np.ndarray:
        """The only output. Raises InferenceServerException."""
        inputs = [tensor(array)]
        result = self.grpc.infer(model, inputs, client_timeout=TIMEOUT_S, **options)
        output: np.ndarray = result.as_numpy("Y")
        return output

    def order(self, what: str, model: str = "orders") -> int:
        """Have the model do it; the number of its process. Raises InferenceServerException."""
        return int(self.infer(model, np.array([what], object))[0])

    def stream(self) -> SimpleQueue[Any]:
        """Begin a stream; gets what the responses hold, and errors."""
        answers: SimpleQueue[Any] = SimpleQueue()
        self.grpc.start_stream(lambda result, error: answers.put(error or int(result.as_numpy("Y")[0])))
        return answers

    def count(self, until: int) -> None:
        """Ask in the stream for the numbers up to this one; -1 asks for endless ones."""
        self.grpc.async_stream_infer("counts", [tensor(np.array([until]))])

    def close(self) -> None:
        self.grpc.close()


def tensor(array: np.ndarray) -> grpc_client.InferInput:
    """The only input of every model."""
    made = grpc_client.InferInput("X", list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made
