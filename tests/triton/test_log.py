"""Models log with the right text, level, file and line."""

from __future__ import annotations

import numpy as np
import pytest
from tests.triton.both import Both

pytestmark = [
    pytest.mark.triton,
    pytest.mark.promise(
        "Fidelity", "The lines that models log are those of a real Triton: text, level, file and line."
    ),
]

SPOKEN = [
    "logger.log_info('info')",
    "logger.log_warn('warning')",
    "logger.log_error('error')",
    "logger.log_verbose('not heard')",
    "logger.log('plain')",
    "logger.log('as an error', logger.ERROR)",
    "logger.log('as a warning', level=logger.WARNING)",
    "logger.log(message='by name', level=logger.INFO)",
    "logger.log('not heard', logger.VERBOSE)",
    "logger.log_info(message='by name')",
    "logger.log_info('')",
    "logger.log_info('ä € \\U0001f600')",
    "logger.log_info(b'bytes')",
    "logger.log_info('x' * 5000)",
    "logger.log_info(' spaces ')",
    "logger.log_info('[brackets] \\'and quotes\\'')",
    "[logger.log_info(str(i)) for i in range(20)]",
]


@pytest.mark.parametrize("code", SPOKEN)
def test_a_line_is_the_same_in_both_logs(both: Both, code: str) -> None:
    both.forget_log()

    both.infer("speaks", {"CODE": np.array([f"\n\n{code}".encode()], object)})

    both.log("speaks")
