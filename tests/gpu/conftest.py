"""What the tests of devices share."""

from __future__ import annotations

from tests.gpu.cards import card, fake, fake_library, gpu
from tests.gpu.late import fake_region, region

__all__ = ["card", "fake", "fake_library", "fake_region", "gpu", "region"]
