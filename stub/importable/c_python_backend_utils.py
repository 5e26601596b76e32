"""The same as `triton_python_backend_utils`, under its other name."""

import triton_python_backend_utils  # noqa: F401  # also takes the place of this module
