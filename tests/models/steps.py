"""A coroutine that takes X steps: a request is rescheduled until it took them. Y is their number."""

import numpy as np
import triton_python_backend_utils as pb_utils

AGAIN = pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


class TritonPythonModel:
    def initialize(self, args):
        self.taken = {}

    def execute(self, requests):
        for request in requests:
            which = request.correlation_id()
            if which:
                self.taken[which] = self.taken.get(which, 0) + 1
                # The flags are set before the coroutine runs, because its end decides what happens to the request.
                if self.taken[which] < request.inputs()[0].as_numpy().item():
                    request.set_release_flags(AGAIN)
        return self.answer(requests)

    async def answer(self, requests):
        return [self.response(request) for request in requests]

    def response(self, request):
        taken = self.taken.get(request.correlation_id(), 0)
        x = request.inputs()[0].as_numpy()
        if taken and taken < x.item():
            return None
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.full_like(x, taken))])
