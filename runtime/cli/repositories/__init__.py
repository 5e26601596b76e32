"""Commands for what is in a repository, before it is served."""
