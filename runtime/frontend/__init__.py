"""What a server offers, whichever protocol asks for it: KServe v2 with Triton's extensions. Knows no socket."""
