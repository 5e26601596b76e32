"""A decoupled `execute` that is a coroutine: N responses, while other batches do the same."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        for request in requests:
            n = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            sender = request.get_response_sender()
            for i in range(abs(n)):
                await asyncio.sleep(0)
                output = pb_utils.Tensor("Y", np.array([i], np.int32))
                sender.send(pb_utils.InferenceResponse([output]))
            if n < 0:
                raise ValueError("wait_secs cannot be negative")
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
