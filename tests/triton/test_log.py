"""What models log: text, level, file and line."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.triton
