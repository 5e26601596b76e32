# `chain.py` is compiled as it is.
