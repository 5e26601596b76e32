"""Device memory that two processes see. Nothing in here is imported before device memory is used."""
