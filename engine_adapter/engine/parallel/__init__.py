"""Tensor parallelism: one scheduling process and its members, each with a shard of the model and of every page."""
