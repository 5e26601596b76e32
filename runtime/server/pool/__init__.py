"""Lets several processes serve at a server's ports with the same stubs."""
