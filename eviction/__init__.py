"""Which blocks go first: one batch contract, one policy a file."""
