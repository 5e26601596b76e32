import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Gives every input back under the name of its output."""

    def execute(self, requests):
        return [pb_utils.InferenceResponse([_back(t) for t in r.inputs()]) for r in requests]


def _back(tensor):
    name = tensor.name().replace("IN_", "OUT_")
    if tensor.is_cpu() and name == "OUT_BF16":
        return pb_utils.Tensor.from_dlpack(name, tensor.to_dlpack())
    return pb_utils.Tensor(name, tensor.as_numpy())
