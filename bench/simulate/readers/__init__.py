"""Trace formats, one a file, behind one contract; `open.open_trace` finds out which a file is."""
