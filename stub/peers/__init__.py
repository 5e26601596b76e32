"""Keeps what a stub has of the processes of the runtime: channels, memory, batches and answers."""
