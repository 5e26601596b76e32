"""Makes the attempt that its input ATTEMPT names, `module.function` and arguments, and answers with the result.

No attempt does harm if nothing stops it: each is the step before the harm, such as signal 0.
"""

import errno
import json
import os

import numpy as np
import triton_python_backend_utils as pb_utils
import tries_files
import tries_gpu
import tries_kernel
import tries_memory
import tries_network
import tries_processes
import tries_protocol
import tries_resources
import tries_self
import tries_sharing

MODULES = {
    "files": tries_files,
    "gpu": tries_gpu,
    "kernel": tries_kernel,
    "memory": tries_memory,
    "network": tries_network,
    "processes": tries_processes,
    "protocol": tries_protocol,
    "resources": tries_resources,
    "self": tries_self,
    "sharing": tries_sharing,
}


def tried(name, arguments):
    module, _, function = name.partition(".")
    try:
        return {"done": getattr(MODULES[module], function)(**arguments)}
    except OSError as error:
        return {"refused": errno.errorcode.get(error.errno, "OSError"), "text": str(error)}
    except Exception as error:
        return {"raised": type(error).__name__, "text": str(error)}


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            text = request.inputs()[0].as_numpy()[0].decode()
            tries_protocol.REQUEST.append(request)
            said = json.dumps({**tried(*json.loads(text)), "by": os.getpid()}, default=repr)
            tries_protocol.REQUEST.clear()
            output = pb_utils.Tensor("SAID", np.array([said.encode()], np.object_))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
