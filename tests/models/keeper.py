"""Does with the memory of its input X what its input HOW names."""

import numpy as np
import triton_python_backend_utils as pb_utils
from moonpool.ipc.arena import Keep

# The stub gives back at once the memory that it grew by.
pb_utils.memory_in_use().keep = Keep(0.05, 0.05)

KEPT = []


def keep(x):
    KEPT.append(x)
    return x * 2


def forget(x):
    KEPT.clear()
    return x


def mutate(x):
    x += 1
    return x


HOW = {
    "same": lambda x: x,
    "slice": lambda x: x[1:],
    "middle": lambda x: x[1:2, 1:2],
    "column": lambda x: x[:, 1],
    "transpose": lambda x: x.T,
    "backwards": lambda x: x[::-1, ::-1],
    "flat": lambda x: x.reshape(-1),
    "as integers": lambda x: x.view(np.int32),
    "as bytes": lambda x: x.view(np.uint8),
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "nothing": lambda x: x[:0],
    "of a subclass": lambda x: x.view(np.matrix),
    "mutate": mutate,
    "keep": keep,
    "kept": lambda x: np.stack(KEPT).sum(0),
    "first kept": lambda x: KEPT[0],
    "forget": forget,
    "big": lambda x: np.full((1 << 22,), x[0, 0], np.float32),
}


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            if how == "twice":
                outputs = [pb_utils.Tensor("Y", x), pb_utils.Tensor("Z", x)]
            elif how == "overlapping":
                outputs = [pb_utils.Tensor("Y", x), pb_utils.Tensor("Z", x[1:])]
            elif how == "one array twice":
                own = x + 1
                outputs = [pb_utils.Tensor("Y", own), pb_utils.Tensor("Z", own)]
            elif how == "one tensor twice":
                tensor = pb_utils.Tensor("Y", x)
                outputs = [tensor, tensor]
            else:
                outputs = [pb_utils.Tensor("Y", HOW[how](x))]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
