import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [_answer(request) for request in requests]


def _answer(request):
    left, right = (tensor.as_numpy() for tensor in request.inputs())
    outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
    return pb_utils.InferenceResponse(outputs)
