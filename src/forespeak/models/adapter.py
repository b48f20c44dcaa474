"""Loading a model that our own decoder does not run, through transformers.

Refused before any weight is read: what transformers does not know, what is not a causal language
model, and caches that cannot be cut back to an earlier token. Code that comes with a model is never
run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from forespeak.errors import CheckpointError, ModelError, OptionError, unknown_choice
from forespeak.formats.weights import read_json_object, weight_files
from forespeak.models.adapter_check import check_tree_forward
from forespeak.models.adapter_config import context_limit, model_config, pin_rope, stated
from forespeak.models.adapter_masks import CHUNKED, KINDS, SLIDING, MaskRules
from forespeak.models.adapter_model import TransformersModel
from forespeak.models.config import ModelConfig

__all__ = ["TransformersModel", "load_adapter"]

DTYPES = ("float32", "bfloat16")

_NO_CACHE = ("mlp", "moe")  # layers of hybrid models that keep nothing and are not the reason

_OTHER_MODEL = (
    "Choose another model, such as one of the Llama, Qwen2, Qwen3, Mistral, Gemma or Phi families."
)


def load_adapter(
    path: Path,
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    context_length: int | None = None,
    self_test: bool = True,
) -> TransformersModel:
    """Load an HF folder with transformers.

    Args:
        path: a folder with config.json and weights.
        dtype: ``float32`` or ``bfloat16``.
        device: where it runs.
        context_length: tokens a row may hold; None means the model's own limit. With rotary
            frequencies that depend on the text's length (longrope) it decides once and for all
            which are used, and None means the shorter, original length.
        self_test: compare a tree forward with plain ones before handing the model out.

    Raises:
        OptionError: a precision or a context length that is not possible.
        ModelError: the architecture is unknown, not causal, or its cache cannot be cut back.
        CheckpointError: files are missing, damaged, or do not fit the config.
    """
    _check_dtype(dtype)
    with _quiet():
        config, model_class = _known_architecture(path)
        text = config.get_text_config(decoder=True)
        rules = _cuttable_rules(path, model_class, text)
        limit = context_limit(text, context_length)
        _check_files(path)
        language_model = _read(path, config, model_class, text, getattr(torch, dtype))
        language_model.to(device).eval()
        pin_rope(language_model, limit)
        generation = language_model.generation_config
        described = model_config(text, generation, limit)
        model = TransformersModel(language_model, described, rules)
        if self_test:
            check_tree_forward(model, str(path))
    return model


def read_adapter_config(path: Path) -> ModelConfig:
    """Sizes of a model that transformers must load, without its weights.

    Raises:
        ModelError: the architecture is unknown or not causal.
        CheckpointError: the config is damaged.
    """
    with _quiet():
        config, _ = _known_architecture(path)
        text = config.get_text_config(decoder=True)
        generation = transformers.GenerationConfig()  # type: ignore[no-untyped-call]
        return model_config(text, generation, context_limit(text, None))


def _check_dtype(dtype: str) -> None:
    if dtype == "int8":
        raise OptionError(
            "Precision int8 is for the built-in families; allowed for other architectures: "
            f"{', '.join(DTYPES)}. Choose one of these."
        )
    if dtype not in DTYPES:
        raise OptionError(unknown_choice("Precision", dtype, DTYPES))


@contextmanager
def _quiet() -> Iterator[None]:
    """No messages or progress bars of transformers: what matters of them is raised as an error."""
    log: Any = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()


def _known_architecture(path: Path) -> tuple[Any, Any]:
    """(config, model class) of a causal language model that is part of transformers."""
    values = read_json_object(path / "config.json")
    family = values.get("model_type")
    if not isinstance(family, str):
        raise CheckpointError(
            f"{path / 'config.json'}: model_type is {family!r}; it must be a name. Get the file "
            "again from where it came from."
        )
    if family not in CONFIG_MAPPING:
        own_code = " and the code that comes with it is never run" if "auto_map" in values else ""
        raise ModelError(
            f"{path}: transformers {transformers.__version__} does not know the architecture "
            f"{family!r}{own_code}; allowed are architectures that are part of transformers. "
            "Install a later release of transformers or choose another model."
        )
    _refuse_quantised(path, values)
    config = _config(path)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{path}: {family} is an encoder-decoder model; allowed are decoder-only language "
            f"models. {_OTHER_MODEL}"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{path}: {family} is not a causal language model of transformers; only those can "
            f"continue a text. {_OTHER_MODEL}"
        )
    return config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _refuse_quantised(path: Path, values: dict[str, object]) -> None:
    text = values.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    if values.get("quantization_config") is not None or inner is not None:
        raise CheckpointError(
            f"{path}: the checkpoint is quantised (quantization_config); allowed are plain "
            "float32, float16 or bfloat16 weights. Use the original model."
        )


def _config(path: Path) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(
            str(path), trust_remote_code=False, local_files_only=True
        )
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path / 'config.json'} is not a config of its model_type ({_short(error)}). Get the "
            "file again from where it came from."
        ) from error


def _cuttable_rules(path: Path, model_class: Any, text: Any) -> MaskRules:
    """How the layers see; refuses caches that cannot drop a rejected path."""
    rules = MaskRules.from_text_config(text)
    other = [kind for kind in rules.kinds if kind not in (*KINDS, *_NO_CACHE)]
    # GPT-Neo cuts its window by slot inside the attention, where a tree's tokens do not stand at
    # their positions.
    if "local" in (stated(text, "attention_layers") or ()):
        other.append("local attention")
    if getattr(model_class, "_is_stateful", False) and not other:
        other.append("a recurrent state")
    if other:
        raise ModelError(
            f"{path}: {text.model_type} has layers with {', '.join(other)}, whose cache cannot be "
            "cut back to an earlier token when a draft is rejected; allowed layers: "
            f"{', '.join(KINDS)}. {_OTHER_MODEL}"
        )
    for kind, size in ((SLIDING, rules.window), (CHUNKED, rules.chunk)):
        if kind in rules.kinds and not isinstance(size, int):
            raise ModelError(
                f"{path}: {text.model_type} has {kind} of {size} tokens; one number for all such "
                f"layers is expected. {_OTHER_MODEL}"
            )
    return rules


def _check_files(path: Path) -> None:
    """Each weight file is there and whole, as far as its header says."""
    for file in weight_files(path):
        if file.suffix != ".safetensors":
            continue
        try:
            # Opening compares the file's length with what its header promises.
            with safe_open(file, framework="pt", device="cpu") as opened:
                opened.keys()
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{file} is not a whole safetensors file ({_short(error)}); it is cut or damaged. "
                "Get the file again from where it came from."
            ) from error


def _read(path: Path, config: Any, model_class: Any, text: Any, dtype: torch.dtype) -> Any:
    if (path / "generation_config.json").is_file():
        read_json_object(path / "generation_config.json")  # transformers passes over a damaged one
    try:
        model, info = model_class.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            attn_implementation=_attention(model_class, text),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path}: the weights do not load into a {text.model_type} model ({_short(error)}); "
            "they are damaged or belong to another config. Get the whole model again."
        ) from error
    for key, problem in (("missing_keys", "lack"), ("mismatched_keys", "have another shape of")):
        if names := sorted(str(name) for name in info[key]):
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            raise CheckpointError(
                f"{path}: the weights {problem} {shown}; config and weights must belong together. "
                "Get the whole model again."
            )
    return model


def _attention(model_class: Any, text: Any) -> str:
    """An attention of transformers that honours masks of any form.

    The library kernel leaves out soft caps on scores and attention sinks; models with sinks say of
    themselves that they do not support it.
    """
    capped = stated(text, "attn_logit_softcapping") is not None
    return "sdpa" if model_class._supports_sdpa and not capped else "eager"


# What transformers raises for files that are not what they should be.
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)


def _short(error: BaseException) -> str:
    """A library's message on one line, its end left out when it is long."""
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:160].rstrip(" .")
