"""Shapes of known models, for random weights (`--load-format dummy`). Imports no torch.

No token ends a turn, and a little more context is allowed than a model was trained for: the longest prompt of a
benchmark leaves room for its answer.
"""

from engine_adapter.engine.config import ModelConfig, RopeConfig, RopeKind

__all__ = ["known_shapes", "shape_of"]

_ROOM_TOKENS = 8192


def known_shapes() -> tuple[str, ...]:
    """Names that `shape_of` knows."""
    return tuple(sorted(_SHAPES))


def shape_of(name: str) -> ModelConfig | None:
    """The configuration of a known model."""
    return _SHAPES.get(name)


def _shape(
    architecture: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    context: int,
    rope: RopeConfig,
    eps: float = 1e-5,
    tied: bool = False,
) -> ModelConfig:
    return ModelConfig(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_tokens=context + _ROOM_TOKENS,
        rms_norm_eps=eps,
        rope=rope,
        tied_embeddings=tied,
        attention_bias=False,
        mlp_bias=False,
        bos_token_id=None,
        eos_token_ids=(),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


_LLAMA, _QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"

_SHAPES = {
    "llama-3.1-8b": _shape(
        _LLAMA,
        layers=32,
        hidden=4096,
        ffn=14336,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=128256,
        context=131072,
        rope=RopeConfig(theta=500000.0, kind=RopeKind.LLAMA3, factor=8.0),
    ),
    "llama-3.2-1b": _shape(
        _LLAMA,
        layers=16,
        hidden=2048,
        ffn=8192,
        heads=32,
        kv_heads=8,
        head_dim=64,
        vocab=128256,
        context=131072,
        rope=RopeConfig(theta=500000.0, kind=RopeKind.LLAMA3, factor=32.0),
        tied=True,
    ),
    "qwen3-8b": _shape(
        _QWEN3,
        layers=36,
        hidden=4096,
        ffn=12288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        vocab=151936,
        context=40960,
        rope=RopeConfig(theta=1000000.0),
        eps=1e-6,
    ),
    # For tests: every size is one that the GPU kernels take, and a CPU runs it in milliseconds.
    "llama-tiny": _shape(
        _LLAMA,
        layers=2,
        hidden=256,
        ffn=512,
        heads=8,
        kv_heads=2,
        head_dim=64,
        vocab=512,
        context=4096,
        rope=RopeConfig(theta=10000.0),
    ),
    "qwen3-tiny": _shape(
        _QWEN3,
        layers=2,
        hidden=256,
        ffn=512,
        heads=8,
        kv_heads=2,
        head_dim=64,
        vocab=512,
        context=4096,
        rope=RopeConfig(theta=10000.0),
        eps=1e-6,
    ),
}
