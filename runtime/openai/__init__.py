"""Knows how a model offers OpenAI's endpoints by the tensors of its configuration, and reads what it answers."""
