"""The kinds of custom metrics and what may be done to them, as they are numbered in messages."""

from __future__ import annotations

COUNTER = 0
GAUGE = 1
HISTOGRAM = 2

INCREMENT = 0
SET = 1
OBSERVE = 2
