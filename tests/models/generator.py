"""Answers prompts with the tensors of vLLM's and TensorRT-LLM's backends: tells what it was asked, word by word."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

TOKENS = {
    "7": {"logprob": -0.5, "rank": 1, "decoded_token": "so"},
    "9": {"logprob": -2.0, "rank": 2, "decoded_token": "no"},
}


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.decoupled = self.config["model_transaction_policy"]["decoupled"]
        self.outputs = {each["name"]: each for each in self.config["output"]}

    def execute(self, requests):
        answers = [self.answers(request) for request in requests]
        if not self.decoupled:
            return [each[0] for each in answers]
        for request, each in zip(requests, answers):
            sender = request.get_response_sender()
            for answer in each:
                sender.send(answer)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def answers(self, request):
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        told = {name: [list(value.shape), _plain(value)] for name, value in sorted(given.items())}
        if "embedding_request" in given:
            asked = json.loads(given["embedding_request"].reshape(-1)[0])
            return [self.response("[1, %d]" % len(asked["input"]), 4, 0)]
        text = json.dumps(told)
        if "raises" in text:
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no idea"))]
        if not self.decoupled:
            return [self.response(text, 5, 2)]
        half = len(text) // 2
        return [self.response(text[:half], 5, 1), self.response(text[half:], 5, 1)]

    def response(self, text, tokens_in, tokens_out):
        values = {
            "text_output": np.array([text.encode()], np.object_),
            "num_input_tokens": np.array([tokens_in], np.uint32),
            "num_output_tokens": np.array([tokens_out], np.uint32),
            "logprobs": np.array([json.dumps([TOKENS]).encode()], np.object_),
        }
        rank = len(self.outputs["text_output"]["dims"]) + (self.config["max_batch_size"] > 0)
        tensors = [
            pb_utils.Tensor(name, value.reshape((1,) * rank)) for name, value in values.items() if name in self.outputs
        ]
        return pb_utils.InferenceResponse(tensors)


def _plain(value):
    values = [each.decode() if isinstance(each, bytes) else each for each in value.reshape(-1).tolist()]
    return values
