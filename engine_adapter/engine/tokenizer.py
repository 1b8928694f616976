"""Text to tokens and back: a tokenizer from `tokenizer.json` or GGUF metadata, and the model's chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from engine_adapter.endings import tool_tokens
from engine_adapter.engine.chat import ChatTemplate
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.source import ModelSource

__all__ = ["ByteTokenizer", "TextTokenizer", "load_tokenizer"]


class TextTokenizer:
    """Encodes and decodes; immutable, so any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, bos_token_id: int | None) -> None:
        """`bos_token_id` is put before a plain prompt; None where the tokenizer does it itself or nobody does."""
        self._tokenizer = tokenizer
        self._template = template
        self._bos_token_id = bos_token_id
        self.tool_tokens = tool_tokens(tokenizer.token_to_id)
        """Those that begin a call of a tool."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt; the spelling of a special token in the text becomes that token."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids if self._bos_token_id is None else [self._bos_token_id, *ids]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of a conversation (`role`, `content`) up to the assistant's answer. ModelError without a template."""
        if self._template is None:
            raise ModelError("this model has no chat template: give a plain prompt")
        ids: list[int] = self._tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class ByteTokenizer(TextTokenizer):
    """Of models that have no files: text is its UTF-8 bytes; of a token beyond a byte the low eight bits are shown."""

    def __init__(self) -> None:
        super().__init__(Tokenizer(models.BPE()), None, None)

    def encode(self, text: str) -> list[int]:
        """One token a byte."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return bytes(token & 0xFF for token in token_ids).decode(errors="replace")


def load_tokenizer(source: ModelSource) -> TextTokenizer:
    """The tokenizer that lies with a model. ModelError when there is none that can be used."""
    if source.seed is not None:
        return ByteTokenizer()
    if source.gguf is not None:
        return _from_gguf(source.gguf.metadata)
    return _from_folder(source.path)


def _from_folder(folder: Path) -> TextTokenizer:
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    except Exception as error:  # `tokenizers` raises bare Exception for a file that it cannot parse
        raise ModelError(f"{path} is no tokenizer: {error}") from error
    settings = _read_settings(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        template = template_file.read_text(encoding="utf-8")
    specials = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token")}
    return TextTokenizer(
        tokenizer, ChatTemplate(template, specials) if isinstance(template, str) else None, None
    )


def _read_settings(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _token_text(value: object) -> str:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


# Splits before byte-level BPE, by `tokenizer.ggml.pre`; None stands for GPT-2's own, which ByteLevel brings along.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4


def _from_gguf(metadata: Mapping[str, object]) -> TextTokenizer:
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        kind = metadata.get("tokenizer.ggml.model")
        raise ModelError(
            f"GGUF tokenizer {kind!r} is not supported, only byte-level BPE: use the Hugging Face folder"
        )
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    pairs = (merge.partition(" ") for merge in _strings(metadata, "tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=_pre(metadata) == "llama-bpe"))
    tokenizer.pre_tokenizer = _gguf_pre_tokenizer(_pre(metadata))
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = types if isinstance(types, list) else []
    special = [_added(t) for t, kind in zip(tokens, kinds, strict=False) if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([_added(t) for t, kind in zip(tokens, kinds, strict=False) if kind == _USER_DEFINED])
    names = {key: _token_name(metadata, tokens, key) for key in ("bos", "eos")}
    template = metadata.get("tokenizer.chat_template")
    specials = {f"{key}_token": name for key, name in names.items()}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token") is True and isinstance(bos, int)
    return TextTokenizer(
        tokenizer,
        ChatTemplate(template, specials) if isinstance(template, str) else None,
        bos if adds_bos and isinstance(bos, int) else None,
    )


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _pre(metadata: Mapping[str, object]) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "default"))


def _gguf_pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in ("default", "gpt-2"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    raise ModelError(f"GGUF pre-tokenizer {pre!r} is not supported: use the model's Hugging Face folder")


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelError(f"GGUF metadata has no {key}: the tokenizer is missing")
    return values


def _token_name(metadata: Mapping[str, object], tokens: list[str], key: str) -> str:
    index = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else ""
