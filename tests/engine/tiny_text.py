"""A byte-level tokenizer of a few dozen tokens, and checkpoints that carry one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from forespeak.models.config import ModelConfig
from forespeak.models.tokenizer import Tokenizer
from tests.formats.tiny_checkpoints import write_folder
from tests.tiny import random_weights

END = "<end>"
_LETTERS = 'abcdefgh Ġ0123456789{}[]":,.-truefalsnIJ'


def characters() -> list[str]:
    """One token a character (Ġ stands for the space), and three longer ones."""
    return [*dict.fromkeys(_LETTERS.replace(" ", "")), "ab", "Ġa", '":']


def backend(tokens: Sequence[str] | None = None) -> Backend:
    """The tokenizer itself; ``END`` is the first id."""
    listed = characters() if tokens is None else list(tokens)
    vocabulary = {END: 0} | {token: at for at, token in enumerate(listed, start=1)}
    merges = [(t[0], t[1]) for t in listed if len(t) == 2]
    made = Backend(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    return made


def tokenizer(tokens: Sequence[str] | None = None) -> Tokenizer:
    make: Any = transformers.PreTrainedTokenizerFast
    return Tokenizer(make(tokenizer_object=backend(tokens), eos_token=END))


SIZE = len(characters()) + 1


def write_checkpoint(
    folder: Path, config: ModelConfig, tokens: Sequence[str] | None, *, seed: int = 0
) -> Path:
    """A folder in Hugging Face format; ``tokens`` None leaves the tokenizer out."""
    values: dict[str, object] = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 0,
    }
    write_folder(folder, values, random_weights(config, seed))
    if tokens is not None:
        backend(tokens).save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
