"""Uses the instance's GPU while it starts, as the parameter `workload` says: by the driver alone, by PyTorch or by
CuPy.

What a library opens and asks for on a GPU, it does here once. An error makes the load fail. Inputs are passed through.
"""

import ctypes
import mmap

PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry nothing() { ret; }
\0"""


def driver():
    from moonpool.ipc.cuda.device import device
    from moonpool.ipc.cuda.lane import DeviceLane
    from moonpool.ipc.cuda.region import DeviceRegion

    here = device(0)
    lane = DeviceLane(here)
    region = DeviceRegion.create(1, here.rounded(1), here)
    region.read(0, 1)
    pages = mmap.mmap(-1, 1 << 20)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    with here:
        here.driver.cuMemHostRegister_v2(address, len(pages), 1)
        module = ctypes.c_void_p()
        library = ctypes.CDLL("libcuda.so.1")
        number = library.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(PTX))
        here.driver.cuMemHostUnregister(address)
    region.close()
    lane.close()
    if number:
        raise RuntimeError(f"the driver compiles no PTX: cuModuleLoadData says {number}")


def torch():
    import torch

    if torch.version.cuda is None:
        raise NotImplementedError("this PyTorch was built without CUDA")
    a = torch.ones(256, 256, device="cuda")
    pinned = torch.ones(256).pin_memory()
    total = (a @ a).sum() + torch.nn.functional.softmax(a, 0).sum() + pinned.cuda().sum()
    if total.item() != 256 * 256 * 256 + 256 + 256:
        raise RuntimeError(f"PyTorch computes {total.item()}")


def cupy():
    import cupy

    a = cupy.ones((256, 256), dtype=cupy.float32)
    total = (a @ a).sum() + (cupy.arange(8, dtype=cupy.float32) ** 2).sum()
    if float(total) != 256 * 256 * 256 + 140:
        raise RuntimeError(f"CuPy computes {float(total)}")


WORKLOADS = {"driver": driver, "torch": torch, "cupy": cupy}


class TritonPythonModel:
    def initialize(self, args):
        import json

        given = json.loads(args["model_config"])["parameters"]
        WORKLOADS[given["workload"]["string_value"]]()

    def execute(self, requests):
        import triton_python_backend_utils as pb_utils

        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)]))
        return responses
