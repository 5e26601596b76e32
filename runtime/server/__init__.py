"""A KServe v2 server with Triton's extensions: a service, the protocols that speak for it, and the process."""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "meter")
