"""Calls that the models in stubs make: requests to other models, and what they ask of the runtime."""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "requests", "dispatcher")
