"""Moving a namespace between machines as one file: `archive` is the format, `export` and `restore` fill and read it."""
