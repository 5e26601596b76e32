# `signature.py` is compiled as it is.
