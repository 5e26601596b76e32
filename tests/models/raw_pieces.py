"""Answers chats and rankings with the bytes that the last message or the query says, without a writer of pieces."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            body = pb_utils.get_input_tensor_by_name(request, "request").as_numpy()[0]
            fields, (self.output,) = json.loads(body), request.requested_output_names()
            asked = fields["query"] if self.output == "ranking" else fields["messages"][-1]["content"]
            if asked.startswith("large "):
                self._send(sender, b'{"content":"' + b"x" * int(asked[6:]) + b'"}')
            elif asked.startswith("many "):
                _, count, piece = asked.split(" ", 2)
                for _ in range(int(count)):
                    if request.is_cancelled():
                        break
                    self._send(sender, piece.encode())
            else:
                for piece in asked.split("|"):
                    self._send(sender, bytes.fromhex(piece))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send(self, sender, piece):
        tensor = pb_utils.Tensor(self.output, np.array([piece], np.object_))
        sender.send(pb_utils.InferenceResponse([tensor]))
