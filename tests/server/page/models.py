"""A repository with models for everything that a page shows: numbers, texts, errors, streams, 16-bit floats."""

from __future__ import annotations

from pathlib import Path

# This would run if an error's text were taken for markup.
HOSTILE = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 2'>"

_SOURCES = {
    "add_sub": """
from moonpool import Batch, Float32, Outputs


class AddSub:
    def __call__(
        self, INPUT0: Float32[Batch, 4], INPUT1: Float32[Batch, 4]
    ) -> Outputs(OUTPUT0=Float32[Batch, 4], OUTPUT1=Float32[Batch, 4]):
        return {"OUTPUT0": INPUT0 + INPUT1, "OUTPUT1": INPUT0 - INPUT1}
""",
    "fails": f"""
from moonpool import Float32


class Fails:
    def __call__(self, X: Float32[4]) -> Float32[4]:
        return self.deeper()

    def deeper(self):
        raise ValueError({HOSTILE!r})
""",
    "shouts": """
from moonpool import Batch, Bytes


class Shouts:
    def __call__(self, TEXT: Bytes[Batch]) -> Bytes[Batch]:
        return [text.upper() for text in TEXT]
""",
    "large_numbers": """
from moonpool import Int64, Outputs


class LargeNumbers:
    def __call__(self, X: Int64[:]) -> Outputs(Y=Int64[:]):
        return {"Y": X + 1}
""",
    "doubles_halves": """
from moonpool import Float16, Outputs


class DoublesHalves:
    def __call__(self, X: Float16[:]) -> Outputs(Y=Float16[:]):
        return {"Y": X * 2}
""",
    "talker": f"""
import asyncio

from moonpool.openai import ChatRequest, Usage


class Talker:
    async def chat(self, request: ChatRequest):
        said = request.messages[-1]["content"]
        if said == "breaks":
            yield "half "
            raise ValueError({HOSTILE!r})
        if said == "waits":
            yield "first "
            await asyncio.Event().wait()
        yield f"{{len(request.messages)}} messages, the last is: "
        yield said.upper() + {HOSTILE!r}
        yield f" at {{request.temperature}}, {{request.id}}"
        yield Usage(prompt_tokens=2, completion_tokens=3)
""",
    "counts": """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "N", "data_type": "TYPE_INT32", "dims": [1]})
        config.add_output({"name": "I", "data_type": "TYPE_INT32", "dims": [1]})
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            for i in range(count):
                tensor = pb_utils.Tensor("I", np.array([i], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
}


def write(repository: Path, *names: str) -> Path:
    """Write these models, by default all, and return the repository."""
    for name in names or _SOURCES:
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_SOURCES[name].lstrip())
    return repository
