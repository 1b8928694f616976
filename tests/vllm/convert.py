"""Writes the demo's model as a folder in fp32 that vLLM and the bundled engine both load: `convert GGUF FOLDER`.

Runs in vLLM's environment, whose transformers reads the GGUF file.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # it is read at import: no file of another place is wanted

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(source: Path, target: Path) -> None:
    """The folder appears whole or not at all."""
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # It is no longer what the file said: plain weights.
    model.hf_quantizer = None
    for name in ("is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = ["LlamaForCausalLM"]
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
