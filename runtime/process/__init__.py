"""Child processes, threads, timers, files and terminals. Nothing in this package knows a model."""
