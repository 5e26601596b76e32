"""Inference for clients, apart from protocols: tensors, requests, plans of requests, and what becomes of responses."""
