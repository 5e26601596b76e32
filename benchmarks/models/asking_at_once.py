"""Asks another model as often as its input N says, from 16 coroutines; answers with the seconds that it took."""

import asyncio
import time

import numpy as np
import triton_python_backend_utils as pb_utils

COROUTINES = 16


class TritonPythonModel:
    async def execute(self, requests):
        return [await self._answer(request) for request in requests]

    async def _answer(self, request):
        n, size = pb_utils.get_input_tensor_by_name(request, "N").as_numpy()
        inputs = [pb_utils.Tensor(name, np.ones((1, size), np.float32)) for name in ("INPUT0", "INPUT1")]
        before = time.perf_counter()
        await asyncio.gather(*(self._ask(inputs, n // COROUTINES) for _ in range(COROUTINES)))
        seconds = np.array([time.perf_counter() - before])
        return pb_utils.InferenceResponse([pb_utils.Tensor("SECONDS", seconds)])

    async def _ask(self, inputs, times):
        for _ in range(times):
            response = await pb_utils.InferenceRequest(
                model_name="add_sub", inputs=inputs, requested_output_names=["OUTPUT0", "OUTPUT1"]
            ).async_exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
