"""The bundled decode engine: Llama-family models, paged attention over the store's pages, continuous batching.

    config  source  gguf_file  weights   what a model is and where it lies
    rope  models/  attention/            the mathematics, in plain torch
    scheduler                            who runs in a step; pure, knows neither torch nor pages
    tiles  batch  runner  sampler        one step: batches, kernels, tokens
    tokenizer  chat  detokenizer         text in and out
    plain                                a block manager without a cache
    engine                               all of it behind `Engine`

`config`, `source` and `gguf_file` import no torch, so a daemon's client can know a model's geometry before torch loads.
"""
