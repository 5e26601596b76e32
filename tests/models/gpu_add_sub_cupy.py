"""Sum and difference of INPUT0 and INPUT1 as OUTPUT0 and OUTPUT1, computed by cupy on the instance's GPU.

The inputs may be in any memory. OUTPUT0 is computed right into the memory that the runtime reads, OUTPUT1 is cupy's
own; all on a stream of the model's.
"""

import cupy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.number = int(args["model_instance_device_id"])
        with cupy.cuda.Device(self.number):
            self.stream = cupy.cuda.Stream(non_blocking=True)

    def execute(self, requests):
        with cupy.cuda.Device(self.number), self.stream:
            return [self.answer(request) for request in requests]

    def answer(self, request):
        a, b = (on_gpu(pb_utils.get_input_tensor_by_name(request, name)) for name in ("INPUT0", "INPUT1"))
        place = pb_utils.empty(a.shape, a.dtype, device=self.number)
        cupy.add(a, b, out=cupy.from_dlpack(place))
        outputs = [pb_utils.Tensor.from_dlpack("OUTPUT0", place), pb_utils.Tensor.from_dlpack("OUTPUT1", a - b)]
        return pb_utils.InferenceResponse(outputs)


def on_gpu(tensor):
    return cupy.asarray(tensor.as_numpy()) if tensor.is_cpu() else cupy.from_dlpack(tensor)
