"""Holds so many bytes on a GPU, which go to ordinary memory and back when it sleeps and wakes.

Y is X. SECONDS says how long the last sleep and the last wake took, without what the runtime does around them.
"""

import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        kind = TorchWeights if parameters["library"]["string_value"] == "torch" else Weights
        size_bytes = int(parameters["bytes"]["string_value"])
        self.weights = kind(size_bytes, int(args["model_instance_device_id"]))
        self.seconds = np.zeros(2)

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            outputs = [pb_utils.Tensor.from_dlpack("Y", x), pb_utils.Tensor("SECONDS", self.seconds.copy())]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses

    def sleep(self):
        self.seconds[0] = seconds_of(self.weights.sleep)

    def wake(self):
        self.seconds[1] = seconds_of(self.weights.wake)


def seconds_of(call):
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


class Weights:
    """Bytes of the driver's own, with pinned memory to go to: the fastest way that there is."""

    def __init__(self, size_bytes, ordinal):
        from moonpool.ipc.cuda.device import device
        from moonpool.ipc.region import SharedRegion

        self.device = device(ordinal)
        self.place = None
        self.size_bytes = size_bytes
        self.allocate()
        self.host_region = SharedRegion.create(1, size_bytes)
        self.host = np.frombuffer(self.host_region.buffer, np.uint8)[:size_bytes]

    def allocate(self):
        from moonpool.ipc.cuda.region import DeviceRegion

        self.place = DeviceRegion.create(2, self.size_bytes, self.device)
        self.place.forget_fd()

    def sleep(self):
        # Pinned when it is needed first: that takes seconds, and not every model sleeps.
        self.device.pin(self.host_region)
        with self.device.borrowed_stream() as stream:
            self.device.read(self.host, self.place.address, stream)
        self.place.close()
        self.device.tidy()

    def wake(self):
        self.allocate()
        self.device.write(self.place.address, self.host)


class TorchWeights:
    """A module of PyTorch that goes to the CPU and back as a user of it would have it go."""

    def __init__(self, size_bytes, ordinal):
        import torch

        self.torch, self.ordinal = torch, ordinal
        row = 1 << 12
        self.net = torch.nn.Linear(row, max(1, size_bytes // 4 // row), bias=False, device="cuda")

    def sleep(self):
        self.net.to("cpu")
        self.torch.cuda.empty_cache()

    def wake(self):
        self.net.to("cuda")
        self.torch.cuda.synchronize()
