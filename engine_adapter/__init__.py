"""Joins inference engines to kvstore: the engine-neutral contract and adapter, and the bundled engine.

Importing this package, or `engine_adapter.base`, imports no torch; only `engine_adapter.engine` may.
"""
