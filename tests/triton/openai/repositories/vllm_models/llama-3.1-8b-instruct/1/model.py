"""Writes words that a hash of the prompt chooses, with the tensors of vLLM's backend."""

import hashlib
import json
import random

import numpy as np
import triton_python_backend_utils as pb_utils

FIRST = ("Models", "learn", "from", "data", "and", "find", "patterns")
WORDS = (*FIRST, "it", "is", "a", "way", "to", "let", "programs", "see")
# It ends by itself here, unless the client has given a seed or wants many words.
USUAL = 8
MANY = 64


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        given = {tensor.name(): tensor.as_numpy().reshape(-1)[0] for tensor in request.inputs()}
        prompt = given["text_input"].decode()
        settings = json.loads(given.get("sampling_parameters", b"{}"))
        pieces = list(self.pieces(prompt, settings))
        if not given.get("exclude_input_in_output", True):
            pieces.insert(0, (prompt + " ", None))
        if not given.get("stream", False):
            pieces = [("".join(text for text, _ in pieces), [each for _, one in pieces for each in one or ()])]
        for number, (text, logprobs) in enumerate(pieces):
            words = len(text.split()) if logprobs is not None else 0
            if not given.get("stream", False):
                words = len(logprobs)
            values = {
                "text_output": np.array([text.encode()], np.object_),
                "num_input_tokens": np.array([len(prompt.split())], np.uint32),
                "num_output_tokens": np.array([words], np.uint32),
            }
            if given.get("return_logprobs", False):
                values["logprobs"] = np.array([json.dumps(logprobs).encode()], np.object_)
            tensors = [pb_utils.Tensor(name, value) for name, value in values.items()]
            is_last = number == len(pieces) - 1
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
            sender.send(pb_utils.InferenceResponse(tensors), flags=flags)

    def pieces(self, prompt, settings):
        """Yield each word, with vLLM's logprobs of its one token."""
        seed = settings.get("seed")
        if settings.get("temperature", 1) == 0:
            key = "greedy"
        else:
            key = random.random() if seed is None else seed
        most = settings["max_tokens"]
        count = most if seed is not None or most >= MANY else min(most, USUAL)
        stop = settings.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        for place in range(count):
            # No text to stop at is among the first ones.
            words = FIRST if place < 3 else WORDS
            ranked = sorted(words, key=lambda word: hashlib.sha256(f"{prompt}|{key}|{place}|{word}".encode()).digest())
            if any(text and text in ranked[0] for text in stop):
                return
            top = ranked[: max(1, settings.get("logprobs", 1))]
            yield (
                ranked[0] + " ",
                [
                    {
                        str(WORDS.index(word)): {"logprob": -0.5 - rank, "rank": rank + 1, "decoded_token": word + " "}
                        for rank, word in enumerate(top)
                    }
                ],
            )
