# `borrowed_blocks.py` is compiled as it is.
