"""What runtime and stub share: the messages, the channel they travel in, and the memory."""
