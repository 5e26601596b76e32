"""Handles tensors and memory on GPUs, for a stub and its model."""
