"""Where the elements of a block lie in an engine's memory, and copies from one such layout into another."""
