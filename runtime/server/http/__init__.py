"""KServe v2 over HTTP: connections of our own on httptools, inference without tasks, and a table of routes for the
rest.
"""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "connection", "handler", "head", "inference", "infer_request", "infer_response")
