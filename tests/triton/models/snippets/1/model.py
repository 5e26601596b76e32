"""Runs a piece of Python inside `execute` and says what it comes to: a value or an exception."""

import ast
import re

import c_python_backend_utils as c
import numpy as np
import triton_python_backend_utils as pb_utils


def shown(value):
    """A text that is the same for the same value in any implementation and version of numpy."""
    if isinstance(value, np.ndarray):
        return f"array({value.dtype.str}, {value.shape}, {shown(value.tolist())})"
    if isinstance(value, np.generic):
        return f"{type(value).__name__}({value.item()!r})"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{', '.join(shown(each) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(k)}: {shown(v)}" for k, v in value.items()) + "}"
    if isinstance(value, set):
        return "set" + shown(sorted(value))
    if isinstance(value, c.Tensor):
        return f"Tensor({value.name()!r}, {value.shape()}, {shown(value.as_numpy())})"
    if isinstance(value, c.TritonError):
        return f"TritonError({value.code()}, {value.message()!r})"
    if isinstance(value, c.InferenceResponse):
        return f"Response({shown(value.output_tensors())}, {shown(value.error())})"
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))


def asking(model, outputs, code=None, **more):
    """A request to another model of the zoo; `code` becomes its input CODE."""
    inputs = [pb_utils.Tensor(name, more.pop(name)) for name in list(more) if name.isupper()]
    if code is not None:
        inputs.append(pb_utils.Tensor("CODE", np.array([code.encode()], object)))
    return pb_utils.InferenceRequest(model_name=model, requested_output_names=outputs, inputs=inputs, **more)


def run(code, names):
    """The value of the last line, which must be an expression."""
    tree = ast.parse(code)
    last = tree.body.pop()
    exec(compile(tree, "snippet", "exec"), names)
    return eval(compile(ast.Expression(last.value), "snippet", "eval"), names)


class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        (code,) = pb_utils.get_input_tensor_by_name(request, "CODE").as_numpy()
        names = {"pb_utils": pb_utils, "c": c, "np": np, "request": request, "self": self}
        names.update(asking=asking, shown=shown)
        try:
            said = shown(run(code.decode(), names))
        except BaseException as error:
            kind = type(error)
            said = f"{kind.__module__}.{kind.__qualname__}: {error}"
        said = np.array([said.encode()], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", said)])
