"""Ways of local inference, one per file."""
