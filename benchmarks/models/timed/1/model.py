"""Sleeps and computes for as long as each request says, so that latencies are known beforehand."""

import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "MS")
            sleep_ms, work_ms = tensor.as_numpy().tolist()
            time.sleep(sleep_ms / 1000)
            # By the processor's clock, so that others on the machine change the time and not the work.
            end_s = time.thread_time() + work_ms / 1000
            while time.thread_time() < end_s:
                pass
            output = pb_utils.Tensor("DONE", np.zeros(1, np.int8))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
