"""Answers with response senders in the way that its input HOW names, N times."""

import gc
import threading

import numpy as np
import triton_python_backend_utils as pb_utils
from moonpool.ipc.arena import Keep

# The stub gives back at once the memory that it grew by.
if pb_utils.memory_in_use() is not None:  # a template has no memory for tensors
    pb_utils.memory_in_use().keep = Keep(0.05, 0.05)

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
KEPT = {}


def response(value, name="Y"):
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.array([value], np.int32))])


def number(request):
    return int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])


def count(request):
    sender = request.get_response_sender()
    for i in range(number(request)):
        sender.send(response(i))
    sender.send(flags=FINAL)


def last_with_flag(request):
    sender = request.get_response_sender()
    n = number(request)
    for i in range(n):
        sender.send(response(i), flags=FINAL if i == n - 1 else 0)


def in_thread(request):
    threading.Thread(target=count, args=(request,)).start()


def from_threads(request):
    sender = request.get_response_sender()
    n = number(request)

    def send(part):
        for i in range(part * n // 4, (part + 1) * n // 4):
            sender.send(response(i))

    threads = [threading.Thread(target=send, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender.send(flags=FINAL)


def keep(request):
    KEPT["request"] = request
    KEPT["sender"] = request.get_response_sender()


def release(request):
    KEPT.pop("request")
    sender = KEPT.pop("sender")
    sender.send(response(number(request)))
    sender.send(flags=FINAL)
    count(request)


def forget(request):
    KEPT.clear()
    count(request)


def drop_after(request):
    sender = request.get_response_sender()
    for i in range(number(request)):
        sender.send(response(i))


def raise_after(request):
    drop_after(request)
    raise ValueError("raised on purpose")


def raise_in_thread(request):
    def run(sender=request.get_response_sender()):
        sender.send(response(0))
        raise ValueError("raised in a thread")

    threading.Thread(target=run).start()


def cycle(request):
    class Node:
        pass

    node = Node()
    node.self = node
    node.sender = request.get_response_sender()
    node.request = request

    def collect():
        KEPT["go"].wait()
        gc.collect()

    KEPT["go"] = threading.Event()
    threading.Thread(target=collect).start()
    return KEPT["go"].set


def error_between(request):
    sender = request.get_response_sender()
    sender.send(response(0))
    error = pb_utils.TritonError("not this one", pb_utils.TritonError.NOT_FOUND)
    sender.send(pb_utils.InferenceResponse(error=error))
    sender.send(response(2), flags=FINAL)


def until_cancelled(request):
    sender = request.get_response_sender()

    def run():
        i = 0
        while not sender.is_cancelled():
            sender.send(response(i))
            i += 1
            threading.Event().wait(0.001)
        KEPT["cancelled"] = request.is_cancelled()
        sender.send(flags=FINAL)

    threading.Thread(target=run).start()


def was_cancelled(request):
    sender = request.get_response_sender()
    sender.send(response(int(KEPT.pop("cancelled", 0))), flags=FINAL)


def wrong_name(request):
    sender = request.get_response_sender()
    sender.send(response(0, "NO_SUCH"))
    sender.send(response(1), flags=FINAL)


def parameters(request):
    sender = request.get_response_sender()
    for i in range(number(request)):
        answer = pb_utils.InferenceResponse(
            [pb_utils.Tensor("Y", np.array([i], np.int32))], parameters={"i": i, "half": i / 2}
        )
        sender.send(answer)
    sender.send(flags=FINAL)


def big(request):
    sender = request.get_response_sender()
    for i in range(number(request)):
        output = pb_utils.Tensor("Y", np.full((1 << 18,), i, np.int32))
        sender.send(pb_utils.InferenceResponse([output]))
    sender.send(flags=FINAL)


def long_error(request):
    error = pb_utils.TritonError("x" * 60_000)
    request.get_response_sender().send(pb_utils.InferenceResponse(error=error), flags=FINAL)


def give_input_later(request):
    sender = request.get_response_sender()
    x = pb_utils.get_input_tensor_by_name(request, "N").as_numpy()
    KEPT["later"] = lambda: sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]), flags=FINAL)


def give_now(request):
    KEPT.pop("later")()
    count(request)


HOW = {name: value for name, value in globals().items() if callable(value)}


class TritonPythonModel:
    def execute(self, requests):
        after = []
        for request in requests:
            how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
            if how == "nothing":
                continue
            after.append(HOW[how](request))
        del requests[:], request
        for call in filter(None, after):
            call()
