"""Several processes that share a server's ports and its stubs."""
