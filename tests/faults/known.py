"""What a misbehaving stub can do, by name, for whoever starts one."""

from __future__ import annotations

from pathlib import Path

MISBEHAVE = Path(__file__).parent / "misbehave.py"
# The names alone; the functions need the channels of a stub.
FAULTS = [
    line.split('"')[1]
    for line in MISBEHAVE.read_text().partition("FAULTS: dict")[2].partition("\n}\n")[0].split("\n")
    if line.startswith('    "')
]
