"""Measurements of the project: one file a question, numbers with their spread, nothing asserted. See ../README.md."""
