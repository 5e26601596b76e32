"""Sum and difference of INPUT0 and INPUT1 as OUTPUT0 and OUTPUT1, computed by torch on the instance's GPU.

The inputs may be in any memory; the outputs are on the GPU.
"""

import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.device = torch.device("cuda", int(args["model_instance_device_id"]))

    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (
                torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, name)).to(self.device)
                for name in ("INPUT0", "INPUT1")
            )
            outputs = [pb_utils.Tensor.from_dlpack("OUTPUT0", a + b), pb_utils.Tensor.from_dlpack("OUTPUT1", a - b)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
