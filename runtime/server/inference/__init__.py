"""Inference for clients, apart from protocols: tensors, requests, plans of requests, and what becomes of responses."""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "call", "request")
