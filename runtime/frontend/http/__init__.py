"""KServe v2 over HTTP: our own protocol on httptools, and Starlette for what is not in a hurry."""
