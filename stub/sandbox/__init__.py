"""The sandbox: layers of restrictions that a stub puts on itself before it imports foreign code."""
