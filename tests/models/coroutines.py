"""A model whose `execute` is a coroutine, and does what its input HOW names."""

import asyncio

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
STATE = {"inside": 0, "most": 0}


def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([value], np.int32))])


async def meet(request):
    """Wait until another coroutine is here as well."""
    STATE["inside"] += 1
    STATE["most"] = max(STATE["most"], STATE["inside"])
    for _ in range(10_000):
        if STATE["most"] > 1:
            break
        await asyncio.sleep(0.001)
    STATE["inside"] -= 1
    return response(STATE["most"])


async def crowd(request):
    """Wait until four coroutines are here, and a moment for a fifth."""
    STATE["inside"] += 1
    STATE["most"] = max(STATE["most"], STATE["inside"])
    for _ in range(10_000):
        if STATE["most"] >= 4:
            break
        await asyncio.sleep(0.001)
    for _ in range(20):
        await asyncio.sleep(0.001)
    STATE["inside"] -= 1
    return response(STATE["most"])


async def reset(request):
    STATE.update(inside=0, most=0)
    return response(0)


async def fail(request):
    await asyncio.sleep(0)
    raise ValueError("raised in a coroutine")


async def leave(request):
    raise SystemExit(3)


async def wrong(request):
    return "no response"


async def sender(request):
    async def later(answer):
        await asyncio.sleep(0.001)
        answer.send(response(5))
        answer.send(flags=FINAL)

    STATE["task"] = asyncio.get_running_loop().create_task(later(request.get_response_sender()))


async def sender_of_a_task_that_raises(request):
    async def later(answer):
        raise ValueError("raised in a task")

    STATE["task"] = asyncio.get_running_loop().create_task(later(request.get_response_sender()))
    await asyncio.sleep(0)
    del STATE["task"]


async def nothing(request):
    return None


class TritonPythonModel:
    async def execute(self, requests):
        how = [pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode() for request in requests]
        return [await globals()[name](request) for name, request in zip(how, requests)]
