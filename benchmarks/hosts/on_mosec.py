"""mosec: a worker process for each instance, behind a server in Rust.

`python -m moonpool.benchmarks.hosts.on_mosec START PATH PORT INSTANCES` serves the model of START at that path.
"""

from __future__ import annotations

import sys
from typing import Any

NEEDS = ("mosec==0.9.8",)


def main() -> None:
    """Serve until a signal."""
    import mosec

    from moonpool.benchmarks.hosts.hosted import ModelInHost

    start, path, port, instances = sys.argv[1:]
    # mosec has its own command line.
    sys.argv[1:] = ["--address", "127.0.0.1", "--port", port, "--log-level", "warning"]

    class Worker(mosec.Worker):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._model = ModelInHost(start)

        def deserialize(self, data: bytes) -> Any:
            return data

        def forward(self, data: Any) -> Any:
            return self._model.answer(data)

        def serialize(self, data: Any) -> bytes:
            answer: bytes = data
            return answer

    server = mosec.Server()
    # A class of a function reaches the workers by fork alone.
    server.append_worker(Worker, num=int(instances), start_method="fork", route=path)
    server.run()


if __name__ == "__main__":
    main()
