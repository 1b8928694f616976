"""Microbenchmarks of the hot paths, with pytest-benchmark: one file each. `python -m bench.micro` runs them all."""
