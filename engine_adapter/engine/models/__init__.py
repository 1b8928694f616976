"""Models: one architecture a file. All take flat rows `[rows]` and an attention for the step."""
