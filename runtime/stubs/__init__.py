"""The runtime's end of a stub: process, channels, memory, answers and calls. Templates are here, too."""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "borrowed_blocks", "control")
