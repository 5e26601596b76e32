"""Passes each chat on to the model `calculator`, and its pieces back as they come. Here you could choose a model, keep
a record, or change what is said.
"""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils

from moonpool.openai import ChatRequest

TARGET = "calculator"


class Relay:
    async def chat(self, request: ChatRequest):
        # The other model's tensors are the client's JSON, and an output of one piece each.
        body = json.dumps({**request, "model": TARGET}).encode()
        asked = pb_utils.InferenceRequest(
            model_name=TARGET,
            requested_output_names=["chat"],
            inputs=[pb_utils.Tensor("request", np.array([body], np.object_))],
        )
        responses = await asked.async_exec(decoupled=True)
        try:
            # Waiting for the next response blocks, and other chats go on meanwhile.
            while (response := await asyncio.to_thread(next, responses, None)) is not None:
                if response.has_error():
                    raise RuntimeError(response.error().message())
                for tensor in response.output_tensors():
                    yield json.loads(tensor.as_numpy().item())
        finally:
            responses.cancel()
