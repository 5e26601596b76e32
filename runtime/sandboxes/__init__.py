"""Runs pieces of source in confined processes: `moonpool.run` and `moonpool.Sandbox`."""
