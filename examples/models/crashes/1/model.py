"""A model that dies when it is told to, in one of the ways in which real ones do."""

import ctypes
import os

from moonpool import Batch, Bytes, Outputs


class Crashes:
    # A crash takes the whole batch with it.
    max_batch_size = 1

    def __call__(self, WISH: Bytes[Batch]) -> Outputs(ANSWER=Bytes[Batch]):
        """`WISH` is `segfault`, `exit`, `raise`, or anything else, which is answered."""
        for wish in WISH:
            if wish == b"segfault":
                ctypes.string_at(0)
            elif wish == b"exit":
                os._exit(3)
            elif wish == b"raise":
                raise ValueError("as you wish")
        return {"ANSWER": [b"alive: " + wish for wish in WISH]}
