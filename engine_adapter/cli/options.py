"""Options that several commands of the engine have, said once."""

from typing import Annotated

import typer

__all__ = ["DeviceOption", "LoadFormatOption", "ModelOption"]

ModelOption = Annotated[str | None, typer.Option(help="`smollm2`, a Hugging Face folder or a GGUF file.")]
LoadFormatOption = Annotated[
    str | None, typer.Option(help="auto, or dummy: random weights of the shape that --model names.")
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda:N.")]
