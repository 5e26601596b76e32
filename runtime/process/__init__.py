"""Child processes, threads, timers, files and terminals. Nothing in this package knows a model."""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "reactor")
