"""Programs that the runtime starts by their paths, and that are no stubs."""
