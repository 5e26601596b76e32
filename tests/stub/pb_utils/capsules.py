"""Fields of DLPack's capsules, as `dlpack.h` lays them out."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

# By the name of the form: that of its capsule, and where its tensor begins.
FORMS = {"first form": (b"dltensor", 0), "later form": (b"dltensor_versioned", 32)}
_FIELDS = {
    "data": (0, "Q"),
    "device_type": (8, "i"),
    "code": (20, "B"),
    "bits": (21, "B"),
    "lanes": (22, "H"),
    "shape": (24, "Q"),
    "strides": (32, "Q"),
}


def address_of(capsule: object, form: str) -> int:
    """Return where the structure of a capsule lies."""
    pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(pointer(capsule, FORMS[form][0]))


def overwrite(capsule: object, form: str = "first form", /, **fields: int) -> None:
    """Change fields of the tensor in a capsule."""
    for name, value in fields.items():
        offset, kind = _FIELDS[name]
        place = address_of(capsule, form) + FORMS[form][1] + offset
        ctypes.memmove(place, struct.pack(f"={kind}", value), struct.calcsize(f"={kind}"))
