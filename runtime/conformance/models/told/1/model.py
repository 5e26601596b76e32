import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Tells what came with the request."""

    def execute(self, requests):
        return [pb_utils.InferenceResponse([_told(request)]) for request in requests]


def _told(request):
    told = {
        "id": request.request_id(),
        "correlation_id": request.correlation_id(),
        "flags": request.flags(),
        "timeout": request.timeout(),
        "outputs": sorted(request.requested_output_names()),
        "parameters": json.loads(request.parameters() or "{}"),
    }
    return pb_utils.Tensor("TOLD", np.array([json.dumps(told, sort_keys=True).encode()], object))
