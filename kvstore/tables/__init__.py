"""The tables in shared memory: rows, slots, extents, the index, and what makes them whole after a crash. Pure."""
