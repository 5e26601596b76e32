"""Decides which request waits, which batch it goes into, and who waits for the outcome."""
