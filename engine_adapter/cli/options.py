"""Options that several commands of the engine have, said once."""

from typing import Annotated

import typer

__all__ = [
    "CacheOption",
    "DeviceOption",
    "HbmOption",
    "LoadFormatOption",
    "ModelOption",
    "TenantOption",
    "TensorParallelOption",
]

CacheOption = Annotated[
    str | None,
    typer.Option(
        help="What it does with the cache: on, read (stores nothing), write (no hits), off, dry-run."
    ),
]
TenantOption = Annotated[str | None, typer.Option(help="Whose blocks they are; two tenants share none.")]

ModelOption = Annotated[str | None, typer.Option(help="`smollm2`, a Hugging Face folder or a GGUF file.")]
LoadFormatOption = Annotated[
    str | None, typer.Option(help="auto, or dummy: random weights of the shape that --model names.")
]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu or cuda:N.")]
HbmOption = Annotated[
    str | None, typer.Option(help="KV memory of the device, like 8GiB, or like 80% of what is free there.")
]
TensorParallelOption = Annotated[
    int | None, typer.Option("--tp", help="Devices that share the model, from --device on.")
]
