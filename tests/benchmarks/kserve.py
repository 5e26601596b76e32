"""A small KServe v2 server of another kind than moonpool's, as a program: prints its two ports, ends with its input.

Models: `add_sub` (FP32, any size, batches), `fails` (an error each time), `closes` (hangs up instead of answering),
`chunks` (as add_sub, in chunks over HTTP), `sequence` (as add_sub, an error unless sequences begin and end), `repeat`
(decoupled: as many responses as COUNT says).
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

_LOCK = threading.Lock()
_COUNTS: dict[str, int] = {}
_INPUTS = {"repeat": [("COUNT", "INT32", [1])]}
_USUAL = [(f"INPUT{i}", "FP32", [-1, -1]) for i in range(2)]
MODELS = ("add_sub", "fails", "closes", "chunks", "sequence", "repeat")
_SEQUENCES: set[int] = set()
_CLOSED: set[int] = set()


def _counted(model: str) -> None:
    with _LOCK:
        _COUNTS[model] = _COUNTS.get(model, 0) + 1


def _out_of_order(model: str, sequence: int, is_start: bool, is_end: bool) -> str:
    """Return the error of a request that does not continue its sequence; "" for one that does."""
    if model != "sequence":
        return ""
    with _LOCK:
        if not sequence or sequence in _CLOSED:
            return f"sequence {sequence} is over, or none"
        if is_start == (sequence in _SEQUENCES):
            return f"sequence {sequence} has another state"
        _SEQUENCES.add(sequence)
        if is_end:
            _CLOSED.add(sequence)
    return ""


def _statistics(model: str) -> dict[str, Any]:
    """Each request waits 1 µs, copies 2 and 4 µs and computes 3 µs, it says."""
    count = _COUNTS.get(model, 0)
    parts = {"queue": 1, "compute_input": 2, "compute_infer": 3, "compute_output": 4}
    stats = {part: {"count": count, "ns": count * us * 1000} for part, us in parts.items()}
    stats["success"] = {"count": count, "ns": count * 10_000}
    return {
        "name": model,
        "version": "1",
        "inference_count": 2 * count,
        "execution_count": count,
        "inference_stats": stats,
    }


def _tensors(model: str) -> list[dict[str, Any]]:
    described = _INPUTS.get(model, _USUAL)
    return [{"name": n, "datatype": d, "shape": s} for n, d, s in described]


class Http(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        model = self.path.split("/")[3]
        if model not in MODELS:
            self._json(404, {"error": f"Request for unknown model: '{model}' is not found"})
        elif self.path.endswith("/stats"):
            self._json(200, {"model_stats": [_statistics(model)]})
        elif self.path.endswith("/config"):
            self._json(404, {"error": "there is no such extension"})
        else:
            self._json(200, {"name": model, "inputs": _tensors(model), "outputs": []})

    def do_POST(self) -> None:
        model = self.path.split("/")[3]
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("X-Secret", "yes") != "yes":
            self._json(403, {"error": "who are you?"})
        elif model == "fails":
            self._json(500, {"error": "no luck today"})
        elif model == "closes":
            self.close_connection = True
        else:
            size = int(self.headers["Inference-Header-Content-Length"])
            header = json.loads(body[:size])
            parameters = header.get("parameters", {})
            names = ("sequence_id", "sequence_start", "sequence_end")
            if why := _out_of_order(model, *(parameters.get(name, 0) for name in names)):
                self._json(400, {"error": why})
                return
            _counted(model)
            a, b = np.frombuffer(body[size:], np.float32).reshape(2, -1)
            outputs = {"OUTPUT0": a + b, "OUTPUT1": a - b}
            answer = {
                "model_name": model,
                "outputs": [
                    {
                        "name": name,
                        "datatype": "FP32",
                        "shape": header["inputs"][0]["shape"],
                        "parameters": {"binary_data_size": array.nbytes},
                    }
                    for name, array in outputs.items()
                ],
            }
            text = json.dumps(answer).encode()
            data = text + b"".join(array.tobytes() for array in outputs.values())
            self._send(200, data, {"Inference-Header-Content-Length": str(len(text))}, model)

    def _json(self, status: int, value: object) -> None:
        self._send(status, json.dumps(value).encode(), {}, "")

    def _send(self, status: int, data: bytes, headers: dict[str, str], model: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if model == "chunks":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in (data[:7], data[7:]):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


class Grpc(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name not in MODELS:
            context.abort(grpc.StatusCode.NOT_FOUND, f"there is no '{request.name}'")
        tensors = [messages.ModelMetadataResponse.TensorMetadata(**t) for t in _tensors(request.name)]
        return messages.ModelMetadataResponse(name=request.name, inputs=tensors)

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        del context
        return messages.ModelStatisticsResponse(model_stats=[_statistics(request.name)])

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.model_name == "fails":
            context.abort(grpc.StatusCode.INTERNAL, "no luck today: 100 % µ")
        if dict(context.invocation_metadata()).get("x-secret", "yes") != "yes":
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "who are you?")
        values = request.parameters
        why = _out_of_order(
            request.model_name,
            values["sequence_id"].int64_param,
            values["sequence_start"].bool_param,
            values["sequence_end"].bool_param,
        )
        if why:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        _counted(request.model_name)
        a, b = (np.frombuffer(data, np.float32) for data in request.raw_input_contents)
        answer = messages.ModelInferResponse(model_name=request.model_name)
        for name, array in (("OUTPUT0", a + b), ("OUTPUT1", a - b)):
            answer.outputs.add(name=name, datatype="FP32", shape=request.inputs[0].shape)
            answer.raw_output_contents.append(array.tobytes())
        return answer

    def ModelStreamInfer(self, requests: Any, context: Any) -> Any:  # noqa: N802
        del context
        for request in requests:
            _counted(request.model_name)
            if request.model_name == "fails":
                yield messages.ModelStreamInferResponse(error_message="no luck in a stream")
                continue
            count = int(np.frombuffer(request.raw_input_contents[0], np.int32)[0])
            for index in range(count + 1):
                answer = messages.ModelInferResponse(model_name=request.model_name)
                if index < count:
                    answer.outputs.add(name="INDEX", datatype="INT32", shape=[1])
                    answer.raw_output_contents.append(np.int32(index).tobytes())
                answer.parameters["triton_final_response"].bool_param = index == count
                yield messages.ModelStreamInferResponse(infer_response=answer)


def main() -> None:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Http)
    http.daemon_threads = True
    server = grpc.server(
        ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    )
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Grpc(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    threading.Thread(target=http.serve_forever, daemon=True).start()
    sys.stdout.write(f"{http.server_port} {port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    main()
