# `reactor.py` is compiled as it is.
