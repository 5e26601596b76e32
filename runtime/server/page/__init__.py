"""The page for people at `/`, the samples behind it, and the advice on it."""
