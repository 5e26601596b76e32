"""A model, its configuration and a request to it: values, and the checks on them."""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "backend", "details", "protobuf", "signature")
