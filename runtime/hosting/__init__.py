"""Loads models, starts, supervises and recycles their instances, and unloads them."""
