"""What bounds an instance from outside, while it runs: groups of the kernel, a watcher, a new start."""
