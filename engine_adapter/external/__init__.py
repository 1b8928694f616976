"""Engines that keep their HBM to themselves, with a prefix cache of their own above the store: DRAM is the top tier.

What is here knows no engine: `scheduling` decides (one process, which makes all calls), `working` copies (each rank),
`jobs` is what they say to each other. `engine_adapter.vllm` puts them behind vLLM's interface.
"""
