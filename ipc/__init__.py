"""Code that runtime and stub share: messages, channels and memory."""
