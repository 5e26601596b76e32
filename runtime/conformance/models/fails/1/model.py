import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Fails as HOW says: raises, or answers with the error of that code."""

    def execute(self, requests):
        return [_failure(request) for request in requests]


def _failure(request):
    how = pb_utils.get_input_tensor_by_name(request, "HOW").as_numpy()[0].decode()
    if how == "raise":
        raise ValueError("on purpose")
    code = getattr(pb_utils.TritonError, how)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError("on purpose", code))
