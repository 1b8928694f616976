"""Blocks on a disk: preallocated slab files of equal slots, a trailer that proves each block, and a durable index."""
