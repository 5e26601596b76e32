# `usual.py` is compiled as it is.
