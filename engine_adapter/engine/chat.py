"""Chat templates: Jinja text that came with a model, rendered in a sandbox because the file is not trusted."""

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine_adapter.engine.errors import ModelError

__all__ = ["ChatTemplate"]


def _refuse(message: str) -> None:
    raise TemplateError(message)


class ChatTemplate:
    """One compiled template. `specials` are the names it may use, such as `bos_token`."""

    def __init__(self, text: str, specials: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._specials = dict(specials)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, with the opening of the assistant's answer. ModelError where it refuses."""
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._specials
            )
        except TemplateError as error:
            raise ModelError(f"the model's chat template refuses these messages: {error}") from error
