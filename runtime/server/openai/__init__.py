"""Serves OpenAI's API, `/v1`, beside KServe's on the port for HTTP."""
