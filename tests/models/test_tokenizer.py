"""Tokenizers, chat templates and text that comes out piece by piece."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from forespeak.errors import CheckpointError, PromptError
from forespeak.formats.gguf_file import read_gguf
from forespeak.models import tokenizer as tokenizer_module
from forespeak.models.tokenizer import IncrementalDecoder, Tokenizer

TEXT = "Hi, 你好世界! 👩‍👩‍👧 🏳️‍🌈 naïve Ωmega\n  def f(x): return 12345 ﷽"


def _wrapped(backend: Backend, eos_token: str) -> Tokenizer:
    make: Any = transformers.PreTrainedTokenizerFast
    return Tokenizer(make(tokenizer_object=backend, eos_token=eos_token))


def _byte_level() -> Tokenizer:
    """A byte-level vocabulary of single bytes, some pairs and added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    for pair in ("Ġa", "ab", "Ã©", "ðŁ"):
        vocabulary[pair] = len(vocabulary)
    merges = [("Ġ", "a"), ("a", "b"), ("Ã", "©"), ("ð", "Ł")]
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("\n\n", special=False)])
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    return _wrapped(backend, "<end>")


def _byte_fallback() -> Tokenizer:
    """As in Llama 2: spaces as ▁, unknown characters as byte tokens, first space stripped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁a", "a", "b", "▁b", "é", "你", "!", "\ufffd"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("▁", "a"), ("▁", "b")]
    backend = Backend(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens[:3]])
    return _wrapped(backend, "</s>")


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def synthetic(request: pytest.FixtureRequest) -> Tokenizer:
    return _byte_level() if request.param == "byte_level" else _byte_fallback()


@pytest.fixture(scope="session")
def kept_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path, kept_tokenizers: Path) -> Tokenizer:
    """Converted from the GGUF file in this very session."""
    tokenizer = Tokenizer.from_gguf(read_gguf(smollm2_path), kept_tokenizers)
    assert tokenizer is not None
    return tokenizer


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push([token_id]) for token_id in ids), decoder.flush()]


def test_kinds_are_told_apart():
    assert _byte_level().is_byte_level and not _byte_fallback().is_byte_level


@pytest.mark.parametrize("seed", range(4))
def test_pieces_make_the_whole(synthetic: Tokenizer, seed: int):
    """Any ids at all: broken characters, special tokens, ids beyond the vocabulary."""
    numbers = random.Random(seed)
    size = len(synthetic.vocab())
    for _ in range(100):
        ids = [numbers.randrange(size) for _ in range(numbers.randrange(30))]
        assert "".join(_pieces(synthetic, ids)) == synthetic.decode(ids), ids


@pytest.mark.parametrize("seed", range(4))
def test_runs_of_bytes_make_the_whole(synthetic: Tokenizer, seed: int):
    """Runs of byte tokens of real characters, now and then with one missing."""
    numbers = random.Random(seed)
    vocabulary = synthetic.vocab()
    alphabet = _byte_level().encode("é你👩ab", add_special_tokens=False)
    if not synthetic.is_byte_level:
        alphabet = [vocabulary[f"<0x{byte:02X}>"] for byte in "é你👩ab".encode()]
    others = [vocabulary["a"], vocabulary["b"], vocabulary["!"]]
    for _ in range(100):
        ids: list[int] = []
        for _ in range(4):
            run = list(alphabet)
            if numbers.random() < 0.3:
                run.pop(numbers.randrange(len(run)))
            ids += run + numbers.choices(others, k=numbers.randrange(3))
        assert "".join(_pieces(synthetic, ids)) == synthetic.decode(ids), ids


def test_pieces_are_whole_characters(synthetic: Tokenizer):
    if synthetic.is_byte_level:
        ids = synthetic.encode(TEXT, add_special_tokens=False)
    else:
        ids = [synthetic.vocab()[f"<0x{byte:02X}>"] for byte in "👩 你".encode()]
    pieces = _pieces(synthetic, ids)
    assert "\ufffd" not in "".join(pieces)
    if synthetic.is_byte_level:
        assert "".join(pieces) == TEXT
        assert pieces.count("") > len(TEXT.encode()) - len(TEXT) - 10


def test_space_after_a_left_out_token_stays():
    tokenizer = _byte_fallback()
    vocabulary = tokenizer.vocab()
    ids = [vocabulary[token] for token in ("<s>", "▁a", "</s>", "▁b", "<s>", "▁", "▁a")]
    assert _pieces(tokenizer, ids)[1:] == ["a", "", " b", "", " ", " a", ""]


def test_an_incomplete_end_comes_with_flush(synthetic: Tokenizer):
    first_byte = "ð" if synthetic.is_byte_level else "<0xF0>"
    ids = [synthetic.vocab()["a"], synthetic.vocab()[first_byte]]
    assert _pieces(synthetic, ids) == ["a", "", "\ufffd"]
    decoder = IncrementalDecoder(synthetic)
    assert decoder.flush() == "" and decoder.push([]) == ""


def test_ids_beyond_the_vocabulary_are_no_text():
    tokenizer = _byte_level()
    assert _pieces(tokenizer, [10**6]) == ["", ""]


def test_no_chat_template():
    tokenizer = _byte_level()
    assert not tokenizer.has_chat_template
    with pytest.raises(PromptError, match="has no chat template.*--raw"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_template_that_refuses():
    tokenizer = _byte_level()
    tokenizer._backend.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(PromptError, match="roles must alternate"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_half_characters_are_refused():
    with pytest.raises(PromptError, match="half a character at position 1"):
        _byte_level().encode("a\ud800", add_special_tokens=False)


def test_vocabularies_are_compared_by_content():
    assert _byte_level().vocabulary_digest() == _byte_level().vocabulary_digest()
    other = _byte_level()
    other._backend.add_tokens(["<more>"])
    assert other.vocabulary_digest() != _byte_level().vocabulary_digest()


def test_folders(tmp_path: Path):
    assert Tokenizer.from_folder(tmp_path) is None
    _byte_level()._backend.save_pretrained(tmp_path)
    loaded = Tokenizer.from_folder(tmp_path)
    assert loaded is not None
    assert loaded.vocabulary_digest() == _byte_level().vocabulary_digest()
    assert loaded.eos_ids == _byte_level().eos_ids
    assert loaded.encode(TEXT, add_special_tokens=False) == _byte_level().encode(
        TEXT, add_special_tokens=False
    )


@pytest.mark.parametrize("content", ["", '{"version": ', "{}", '{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer(tmp_path: Path, content: str):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError) as raised:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(raised.value)


def test_code_of_a_model_is_never_run(tmp_path: Path):
    _byte_level()._backend.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}'
    )
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Own: pass\n")
    try:
        Tokenizer.from_folder(tmp_path)
    except CheckpointError:
        pass
    assert not marker.exists()


# The embedded target


@pytest.mark.slow
def test_conversion_is_kept_and_the_same(
    smollm2: Tokenizer, kept_tokenizers: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = read_gguf(smollm2_path)
    (kept,) = kept_tokenizers.iterdir()
    loads: list[str | None] = []

    def load(folder: Path, gguf_name: str | None) -> transformers.PreTrainedTokenizerBase:
        loads.append(gguf_name)
        return original(folder, gguf_name) if gguf_name is None else smollm2._backend

    original = tokenizer_module._load
    monkeypatch.setattr(tokenizer_module, "_load", load)
    second = Tokenizer.from_gguf(file, kept_tokenizers)
    assert second is not None and loads == [None]
    for special in (False, True):
        ids = smollm2.encode(TEXT, add_special_tokens=special)
        assert second.encode(TEXT, add_special_tokens=special) == ids
    messages = [{"role": "user", "content": "hi"}]
    assert second.render_chat(messages) == smollm2.render_chat(messages)
    assert second.vocabulary_digest() == smollm2.vocabulary_digest()
    assert second.special_ids == smollm2.special_ids
    assert second.eos_ids == smollm2.eos_ids == (2,)
    (kept / "tokenizer.json").write_text("{")  # damaged: converted and kept again
    loads.clear()
    assert Tokenizer.from_gguf(file, kept_tokenizers) is not None
    assert Tokenizer.from_gguf(file, kept_tokenizers) is not None
    assert loads == [smollm2_path.name, None]


@pytest.mark.slow
def test_nowhere_to_keep_a_conversion(
    smollm2: Tokenizer, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tokenizer_module, "_load", lambda *_: smollm2._backend)
    tokenizer = Tokenizer.from_gguf(read_gguf(smollm2_path), tmp_path / "file" / "tokenizers")
    assert tokenizer is not None and tokenizer.eos_ids == (2,)


@pytest.mark.slow
def test_real_text_in_pieces(smollm2: Tokenizer):
    ids = smollm2.encode(TEXT, add_special_tokens=False)
    pieces = _pieces(smollm2, ids)
    assert "".join(pieces) == TEXT == smollm2.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    chat = smollm2.render_chat([{"role": "user", "content": TEXT}])
    assert "".join(_pieces(smollm2, chat)) == smollm2.decode(chat)


@pytest.mark.slow
def test_random_real_tokens_in_pieces(smollm2: Tokenizer):
    numbers = random.Random(0)
    for _ in range(50):
        ids = [numbers.randrange(49152) for _ in range(60)]
        assert "".join(_pieces(smollm2, ids)) == smollm2.decode(ids)
