import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Answers with the error of the code that HOW names."""

    def execute(self, requests):
        return [_failure(request) for request in requests]


def _failure(request):
    how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
    code = getattr(pb_utils.TritonError, how)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("on purpose", code))
