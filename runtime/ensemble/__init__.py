"""Ensembles: models that consist of steps, each of which is a request to another model."""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "members", "chain", "scheduler")
