"""Answers in the way that HOW names; as a decoupled model, as a coroutine, or neither, by its model's name."""

import asyncio
import gc
import json
import os
import queue
import random
import stat
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils
from moonpool.ipc.codec import encode
from moonpool.stub.pb_utils.response import Reply

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
LASTING = (pb_utils.InferenceRequest, pb_utils.InferenceResponse, pb_utils.Tensor, Reply)
# Each of these values is wrong in every field of every message.
JUNK = (None, -1, 0, 2**62, 1.5, True, "x" * 300, b"\xc1", [], [[2**62, -1]], [[]] * 9, {})


def lie(seed):
    """Send the runtime a message that no stub may send, on one of the channels."""
    dice = random.Random(seed)
    channels = [fd for fd in range(3, 64) if is_socket(fd)]
    packet = encode(dice.randrange(50), *dice.choices(JUNK, k=dice.randrange(10)))
    if dice.random() < 0.3:
        packet = packet[: dice.randrange(1, len(packet) + 1)]
    for _ in range(dice.choice((1, 1, 100))):
        os.write(dice.choice(channels), packet)


def hog():
    """Take all the memory that it gets, while the other threads of the process work, and give it back."""
    taken = []
    for size in (1 << 26, 1 << 20, 1 << 14):
        try:
            while True:
                taken.append(np.empty(size, np.uint8))
        except MemoryError:
            time.sleep(0.005)


def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def doubled(request):
    x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
    given = json.loads(request.parameters())
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 2)], parameters=given or None)


def failed(text):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text))


def request_to(model, how, x):
    batch = x.shape[:1] if model == "plain" else ()
    hows = np.full((*batch, 1), how, np.object_)
    inputs = [pb_utils.Tensor("HOW", hows), pb_utils.Tensor("X", x)]
    return pb_utils.InferenceRequest(inputs=inputs, requested_output_names=["Y"], model_name=model)


def taken(response):
    """Return the output of another model's response, or raise its error."""
    if response.has_error():
        raise ValueError(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, "Y").as_numpy()


def alive():
    """Count the objects of requests and responses."""
    gc.collect()
    return sum(isinstance(each, LASTING) for each in gc.get_objects())


class TritonPythonModel:
    def initialize(self, args):
        self.execute = getattr(self, args["model_name"])
        self.later = queue.SimpleQueue()
        threading.Thread(target=self.send_later, daemon=True).start()

    def plain(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy().ravel()[0]
        if how == b"error":
            return failed("on purpose")
        if how.startswith(b"lie"):
            lie(how)
        if how == b"hog":
            hog()
        if how == b"pass":
            tensor = pb_utils.get_input_tensor_by_name(request, "X")
            return pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor.as_numpy())])
        if how == b"sender":
            sender = request.get_response_sender()
            sender.send(doubled(request))
            sender.send(flags=FINAL)
            return None
        if how == b"later":
            self.later.put((request.get_response_sender(), [doubled(request)]))
            return None
        if how == b"drop":
            return None
        if how == b"alive":
            tensor = pb_utils.Tensor("Y", np.full((1, 16), alive(), np.float32))
            return pb_utils.InferenceResponse([tensor])
        return doubled(request)

    def stream(self, requests):
        for request in requests:
            how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0]
            sender = request.get_response_sender()
            if how.startswith(b"lie"):
                lie(how)
                how = b"1"
            if how == b"drop":
                continue
            if how == b"cycle":
                cycle = [sender]
                cycle.append(cycle)
            elif how == b"raise":
                sender.send(doubled(request))
                raise ValueError("on purpose")
            elif how == b"until cancelled":
                self.later.put((sender, None))
            elif how == b"later":
                self.later.put((sender, [doubled(request)] * 3))
            else:
                for _ in range(int(how)):
                    sender.send(doubled(request))
                sender.send(flags=FINAL)

    async def coroutine(self, requests):
        await asyncio.sleep(0)
        return [await self.answer_later(request) for request in requests]

    async def answer_later(self, request):
        how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy().ravel()[0]
        if how != b"ask":
            return self.answer(request)
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        answers = await asyncio.gather(*(request_to("plain", b"ok", x).async_exec() for _ in range(2)))
        y = sum(taken(answer) for answer in answers) / 2
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])

    def asker(self, requests):
        return [self.ask(request) for request in requests]

    def ask(self, request):
        how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        if how in ("ok", "error"):
            answer = request_to("plain", how.encode(), x[None]).exec()
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            y = taken(answer)[0]
        else:
            answers = request_to("stream", how.encode(), x).exec(decoupled=True)
            if how == "until cancelled":
                answers.cancel()
                y = x * 2
            else:
                outputs = [taken(each) for each in answers if each.has_error() or each.output_tensors()]
                y = sum(outputs) / len(outputs)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])

    def send_later(self):
        try:
            self.send_on()
        except BaseException:  # others wait for it, and must not wait for ever
            os._exit(9)

    def send_on(self):
        waiting = []
        while True:
            try:
                sender, responses = self.later.get(timeout=0.01 if waiting else None)
            except queue.Empty:
                responses = ()
            if responses is None:
                waiting.append(sender)
            for response in responses or ():
                sender.send(response)
            if responses:
                sender.send(flags=FINAL)
            sender = responses = None
            for each in waiting:
                if each.is_cancelled():
                    each.send(flags=FINAL)
            waiting = [each for each in waiting if not each.is_cancelled()]
            each = None
