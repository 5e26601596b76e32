"""Sends as `sends` does, from a coroutine."""

import ast
import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def y(*values, **more):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(values, np.float32))], **more)


class TritonPythonModel:
    async def execute(self, requests):
        (code,) = pb_utils.get_input_tensor_by_name(requests[0], "CODE").as_numpy()
        names = {**globals(), "requests": requests, "request": requests[0], "model": self}
        names["sender"] = requests[0].get_response_sender()
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        running = eval(compile(code.decode(), "snippet", "exec", flags=flags), names)
        if running is not None:
            await running
        return names.get("returned")
