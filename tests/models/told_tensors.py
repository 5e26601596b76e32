"""Answers a prompt, which is JSON, with the outputs that it names: a list of responses, each with values by output."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        outputs = json.loads(args["model_config"])["output"]
        self.dtypes = {each["name"]: pb_utils.triton_string_to_numpy(each["data_type"]) for each in outputs}

    def execute(self, requests):
        for request in requests:
            given = {each.name(): each.as_numpy().reshape(-1)[0] for each in request.inputs()}
            told = given["text_input"] if "text_input" in given else json.loads(given["embedding_request"])["input"]
            sender = request.get_response_sender()
            for values in json.loads(told):
                sender.send(pb_utils.InferenceResponse([self.tensor(name, *each) for name, each in values.items()]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def tensor(self, name, value, times=1):
        # A long text is not sent to get it back.
        return pb_utils.Tensor(name, np.array([value * times], self.dtypes[name]))
