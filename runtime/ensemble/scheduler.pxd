# `scheduler.py` is compiled as it is.
