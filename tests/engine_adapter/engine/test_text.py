"""Text in and out: byte-level tokenizers, chat templates, and a stream that never emits half a character."""

import json
import random
from pathlib import Path

import pytest

from engine_adapter.engine.chat import ChatTemplate
from engine_adapter.engine.detokenizer import Detokenizer
from engine_adapter.engine.errors import ModelError
from engine_adapter.engine.source import find_model
from engine_adapter.engine.tokenizer import TextTokenizer, load_tokenizer
from tests.engine_adapter.engine import tiny

TEXT = "naïve façade — 東京タワー 🚀👩‍👩‍👧 done\n"


@pytest.fixture
def tokenizer(tiny_folder: Path) -> TextTokenizer:
    return load_tokenizer(find_model(str(tiny_folder)))


def test_encoding_and_decoding_are_inverse(tokenizer: TextTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_a_stream_never_emits_half_a_character(tokenizer: TextTokenizer, group: int) -> None:
    """Elsewhere a token that ends within a multi-byte character came out as U+FFFD, twice."""
    ids = tokenizer.encode(TEXT)
    stream = Detokenizer(tokenizer.decode)
    pieces = [stream.push(ids[i : i + group]) for i in range(0, len(ids), group)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.flush() == TEXT
    seen = ""
    for piece in pieces:
        seen += piece
        assert TEXT.startswith(seen)


def test_bytes_that_are_no_text_come_out_once_and_text_goes_on(tokenizer: TextTokenizer) -> None:
    broken = tokenizer.encode("🚀")[:2]
    stream = Detokenizer(tokenizer.decode)
    text = stream.push(broken) + stream.push(tokenizer.encode("ok")) + stream.flush()
    assert text == tokenizer.decode(broken + tokenizer.encode("ok"))
    assert text.endswith("ok")
    assert text.count("\ufffd") >= 1


def test_a_character_cut_by_the_end_is_flushed(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode("a🚀")
    stream = Detokenizer(tokenizer.decode)
    assert stream.push(ids[:-1]) == "a"
    assert stream.flush() == "\ufffd"


def test_random_bytes_stream_to_the_text_of_the_whole(tokenizer: TextTokenizer) -> None:
    rng = random.Random(5)
    for _ in range(30):
        ids = [rng.choice([*range(256), 256]) for _ in range(40)]
        stream = Detokenizer(tokenizer.decode)
        pieces = [stream.push([token]) for token in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)


def test_the_window_of_a_stream_is_bounded(tokenizer: TextTokenizer) -> None:
    lengths: list[int] = []

    def decode(ids: object) -> str:
        assert isinstance(ids, list)
        lengths.append(len(ids))
        return tokenizer.decode(ids)

    stream = Detokenizer(decode)
    endless = [tokenizer.encode("é")[0]] * 1000  # never completes a character
    for token in endless:
        stream.push([token])
    assert max(lengths) <= 2 * 64
    stream = Detokenizer(decode)
    lengths.clear()
    for token in tokenizer.encode("plain text " * 50):
        stream.push([token])
    assert max(lengths) <= 2


def test_a_chat_becomes_the_templates_tokens(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 257
    assert tokenizer.decode(ids) == "user\nhi\n"


def test_templates_are_rendered_in_a_sandbox() -> None:
    """A template comes with a downloaded file: it must not reach the interpreter."""
    hostile = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(ModelError, match="refuses"):
        hostile.render([{"role": "user", "content": "x"}])
    with pytest.raises(ModelError, match="no system"):
        ChatTemplate("{{ raise_exception('no system') }}", {}).render([])
    with pytest.raises(ModelError, match="compile"):
        ChatTemplate("{% for %}", {})
    assert (
        ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"}).render(
            [{"role": "user", "content": "x"}]
        )
        == "<s>x"
    )


def test_damaged_tokenizers_give_one_line(tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="is no tokenizer"):
        load_tokenizer(find_model(str(folder)))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="cannot read"):
        load_tokenizer(find_model(str(folder)))


def test_a_template_may_lie_in_a_file_of_its_own_or_be_missing(tmp_path: Path) -> None:
    folder = tiny.save_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer(find_model(str(folder))).encode_chat([])
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}")
    assert load_tokenizer(find_model(str(folder))).encode_chat([{"role": "user", "content": "x"}])[-1] == 256
