"""The places where blocks live: one contract, one implementation a file."""
