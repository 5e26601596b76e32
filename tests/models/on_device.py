"""A model for a device that computes on the processor: what is on the device is copied to it and back.

HOW says what it does with X: `pass` it through, `add` one in new memory on the device, `copy` it there and wait for
nothing, `host` for one more in ordinary memory, `keep` it and pass through what was kept before, `ask NAME` to have
another model pass it, `die`; `fault` has the fake driver refuse everything from then on. Without HOW it copies.
"""

import ctypes
import os

import numpy as np
import triton_python_backend_utils as pb_utils

from moonpool.ipc.cuda.array import DeviceArray

GPU = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0)
CPU = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)


class TritonPythonModel:
    def initialize(self, _):
        self.kept = self.stream = None

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X")
        how = pb_utils.get_input_tensor_by_name(request, "HOW")
        how = "copy" if how is None else how.as_numpy().item().decode()
        seen = pb_utils.Tensor("ON_CPU", np.array([x.is_cpu()]))
        try:
            y = self.make(how, x)
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse([y, seen])

    def make(self, how, x):
        how, _, rest = how.partition(" ")
        if how == "die":
            os._exit(3)
        if how == "fault":
            ctypes.CDLL("libcuda.so.1").fakeFault(700)
        if how == "ask":
            return self.ask(*rest.split(), x)
        if how == "host":
            return pb_utils.Tensor("Y", x.as_numpy() + 1)
        if how == "add":
            made = pb_utils.empty(x.shape(), np.float32, device=0)
            made.settle()
            made.device.write(made.address, x.as_numpy() + 1)
            return pb_utils.Tensor.from_dlpack("Y", made)
        if how == "copy":
            return self.copy(x)
        if how == "keep":
            self.kept, x = x, self.kept or x
        if x.is_cpu():
            return pb_utils.Tensor("Y", x.as_numpy())
        return pb_utils.Tensor.from_dlpack("Y", x)

    def copy(self, x):
        """Copy as a library does: on its own stream, which nobody waits for."""
        made = pb_utils.empty(x.shape(), np.float32, device=0)
        if self.stream is None:
            self.stream = made.device.new_stream()
        source = DeviceArray.of(x, self.stream)
        made.enter(self.stream)
        made.device.copy(made.address, source.address, made.nbytes, self.stream)
        return pb_utils.Tensor.from_dlpack("Y", made)

    def ask(self, name, how, wanted, x):
        preferred = {"gpu": GPU, "cpu": CPU}.get(wanted)
        options = {} if preferred is None else {"preferred_memory": preferred}
        if how == "copy":
            x = pb_utils.Tensor.from_dlpack("X", self.copy(x))
        request = pb_utils.InferenceRequest(
            model_name=name,
            requested_output_names=["Y"],
            inputs=[x, pb_utils.Tensor("HOW", np.array([how.encode()], object))],
            **options,
        )
        response = request.exec()
        if response.has_error():
            raise response.error()
        y = response.output_tensors()[0]
        where = "on the CPU" if y.is_cpu() else "on a GPU"
        pb_utils.Logger.log_info(f"{name} answered {where}")
        return y
