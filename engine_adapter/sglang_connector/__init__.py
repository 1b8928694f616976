"""Parts of SGLang's storage backend (`engine_adapter.sglang`)."""
