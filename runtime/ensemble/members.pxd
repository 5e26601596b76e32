# `members.py` is compiled as it is.
