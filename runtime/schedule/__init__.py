"""Decides which request waits, which batch it goes into, and who waits for the outcome.

The modules that every request passes are compiled as they are, where moonpool was built with a compiler.
"""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "batcher", "request_queue", "lane", "event_loop")
