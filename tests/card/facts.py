"""Facts of the machine: what it has, before anything of moonpool runs."""
