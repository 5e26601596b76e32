"""Test a model without a server: see `docs/TESTING_MODELS.md`."""

from moonpool.testing.ensemble import EnsembleModel
from moonpool.testing.host import Load, RecordingHost
from moonpool.testing.in_process import InProcessModel
from moonpool.testing.in_stub import StubModel
from moonpool.testing.load import load, load_ensemble, load_in_stub, utilities
from moonpool.testing.model import LoadedModel, NotOneResponse
from moonpool.testing.outputs import BadOutput
from moonpool.testing.request import Request, request
from moonpool.testing.response import Response

__all__ = [
    "BadOutput",
    "EnsembleModel",
    "InProcessModel",
    "Load",
    "LoadedModel",
    "NotOneResponse",
    "RecordingHost",
    "Request",
    "Response",
    "StubModel",
    "load",
    "load_ensemble",
    "load_in_stub",
    "request",
    "utilities",
]
