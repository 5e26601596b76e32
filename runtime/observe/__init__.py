"""Counts what it is given, and writes metrics in Prometheus' form."""

from moonpool.ipc.extension import use_compiled

use_compiled(__name__, "distributions", "statistics")
