"""The comparisons with Triton's Python backend pass with moonpool in its place in a tritonserver."""

from __future__ import annotations

from importlib import import_module

import pytest
from tests.triton.test_sequences import models

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Executing in a tritonserver",
        "If moonpool is the Python backend of a tritonserver, models and clients get the same "
        "as from Triton's own: values, refusals, returns, streams, sequences, logs, metrics, "
        "requests to other models, completed configurations, Python-based backends, loads that "
        "fail and unloads.",
    ),
]

__all__ = ["models", "pytestmark"]

TOPICS = (
    "backends",
    "completion",
    "differences",
    "log",
    "metrics",
    "returns",
    "senders",
    "sequences",
    "snippets",
    "stages",
    "values",
)
# These tests show how moonpool's own core differs. Here both sides have Triton's core.
OF_THE_CORE = {
    "test_a_batcher_that_does_nothing_useful_in_triton_is_refused",
    "test_a_decoupled_model_needs_a_stream",
    "test_a_difference_of_the_core_is_what_it_is_said_to_be",
    "test_a_wrong_batcher_is_refused_in_the_same_words",
    "test_an_id_that_is_given_to_the_model_as_text_arrives_here",
    "test_requests_that_triton_lets_through_or_misreports_are_refused",
}

for topic in TOPICS:
    for name, value in vars(import_module(f"tests.triton.test_{topic}")).items():
        if name.startswith("test_") and name not in OF_THE_CORE:
            globals()[name] = value
