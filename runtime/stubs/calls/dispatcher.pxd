# `dispatcher.py` is compiled as it is.
