"""Uses one runtime from threads of many kinds at once.

A program, for a run under the sanitizer for threads: PORT FOLDER SECONDS.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.inside import hosted_in


def replaced(name: str, file: str) -> ModuleType:
    """Put the extension in this file in the place of the installed one."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{file} is no module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(request.inputs()[0].as_numpy()) for request in requests]

    def _answer(self, x):
        tensor = pb_utils.Tensor("Y", x * 2)
        if x[0, 0] < 0:
            asked = pb_utils.InferenceRequest(
                model_name="plain", inputs=[pb_utils.Tensor("X", -x)], requested_output_names=["Y"]
            )
            for _ in range(4):
                tensor = asked.exec().output_tensors()[0]
        return pb_utils.InferenceResponse([tensor])
"""
STREAM = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
            for _ in range(8):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TENSORS = {
    "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [-1]}],
    "max_batch_size": 8,
}


def main(folder: Path, seconds: float) -> None:
    """Ask from threads, futures, a loop and models until the time is over."""
    import numpy as np

    import moonpool
    from moonpool.ipc.tensors import CODES
    from moonpool.runtime.schedule.event_loop import wait_for_outcome
    from moonpool.runtime.server.inference.request import InputPlan, RequestPlan

    for name, text in (("model.py", MODEL), ("stream.py", STREAM)):
        (folder / name).write_text(text)
    rows: dict[int, Any] = {n: np.full((1, n), float(n), np.float32) for n in (2, 3, 70_000)}
    failures: list[BaseException] = []
    with moonpool.Runtime() as runtime:
        batched: dict[str, Any] = {**TENSORS, "dynamic_batching": {}}
        runtime.load("plain", folder / "model.py", config=TENSORS, instances=2)
        runtime.load("batched", folder / "model.py", config=batched)
        decoupled = {**TENSORS, "model_transaction_policy": {"decoupled": True}}
        runtime.load("stream", folder / "stream.py", config=decoupled)

        end = time.monotonic() + seconds

        def checked(outputs: Any, x: Any, times: int = 2) -> None:
            if not (outputs["Y"] == times * x).all():
                raise ValueError("a wrong answer")

        def infer(n: int) -> None:
            checked(runtime.infer("plain", {"X": rows[n]}), rows[n])
            checked(runtime.infer("batched", {"X": rows[n]}), rows[n])

        def hurry(n: int) -> None:
            with suppress(moonpool.RequestTimedOut):
                runtime.infer("batched", {"X": rows[n]}, timeout_s=0.0005)

        def submit(n: int) -> None:
            for future in [runtime.submit("batched", {"X": rows[n]}) for _ in range(8)]:
                checked(future.result().outputs, rows[n])

        def ask(n: int) -> None:
            checked(runtime.infer("batched", {"X": -rows[n]}), rows[n])

        def stream(n: int) -> None:
            for response in runtime.stream("stream", {"X": rows[n]}):
                checked(response.outputs, rows[n], 1)

        async def tasks(n: int) -> None:
            made = [runtime.ainfer("batched", {"X": rows[n]}) for _ in range(8)]
            for outputs in await asyncio.gather(*made):
                checked(outputs, rows[n])

        async def clients(n: int) -> None:
            hosted: Any = hosted_in(runtime, "batched")
            service: Any = None
            plan = RequestPlan()
            plan.inputs = [InputPlan("X", CODES["FP32"], [1, n], None, 4 * n)]
            body = rows[n].tobytes()
            for _ in range(8):
                made: Any = plan.usual(service, hosted, body, 0, None, None, has_views=False)
                if made is None:
                    raise ValueError("a request that is not usual")
                outcome: Any = await wait_for_outcome(hosted.scheduler, made, None)
                checked({"Y": outcome.outputs["Y"].raw.view(np.float32)}, rows[n])

        def repeat(work: Callable[[int], object], n: int) -> None:
            try:
                while time.monotonic() < end:
                    work(n)
            except BaseException as failure:
                failures.append(failure)

        works: list[Callable[[int], object]] = [infer, infer, hurry, submit, ask, ask, stream]
        works.append(lambda n: asyncio.run(tasks(n)))
        works.append(lambda n: asyncio.run(clients(n)))
        threads = [
            threading.Thread(target=repeat, args=(work, n))
            for work, n in zip(works, [2, 3, 2, 3, 2, 3, 70_000, 2, 3], strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for failure in failures:
        raise failure


if __name__ == "__main__":
    port = replaced("moonpool.ipc.port._port", sys.argv[1])
    main(Path(sys.argv[2]), float(sys.argv[3]))
    counts = port.counts()
    unused = [name for name, count in counts.items() if not count]
    if unused:
        raise SystemExit(f"methods of the port that were not used: {', '.join(unused)}")
    sys.stdout.write(f"done {counts}\n")
