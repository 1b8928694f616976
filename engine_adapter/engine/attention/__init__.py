"""Paged attention: the contract in `base`, one backend a file."""
