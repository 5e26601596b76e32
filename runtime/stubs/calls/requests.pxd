# `requests.py` is compiled as it is.
