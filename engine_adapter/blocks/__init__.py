"""The block manager: `engine_adapter.base.BlockManager` over a session, and what it is made of."""
