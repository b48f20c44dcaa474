"""TransformersModel: any causal language model of transformers behind the seam of ``base.py``.

One forward of transformers for each row: correct whatever the architecture does with a batch, and
slower than our own decoder. Shape letters as in ``types.py``.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forespeak.errors import ModelError
from forespeak.models.adapter_cache import TransformersCache
from forespeak.models.adapter_masks import MaskRules, segment_masks
from forespeak.models.base import Cache, TargetModel
from forespeak.models.config import ModelConfig
from forespeak.types import Segment, TargetOutput

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")


class TransformersModel(TargetModel):
    """A causal language model of transformers.

    ``logits`` and ``head`` go through the model's own code after the decoder, so that its scaling
    and soft caps are in both. ``hidden`` is what the decoder returns and the head reads: the state
    after the final norm. ``embed`` is the model's own embedding module, the thing that drafters
    share: a factor inside that module is included (Gemma), one that the decoder applies afterwards
    is not (Granite).

    Taps are read by hooks that live for one call, so two threads must not share a model.

    Args:
        language_model: an ``...ForCausalLM`` (or a composite that holds one) in evaluation mode.
        config: what the rest of the package reads of it.
        rules: what its layers may see.

    Attributes:
        decoder: the part between input tokens and head. ``layers``: its layers in order; empty when
            they could not be told apart.
        cache_argument: what its layers call the cache.
    """

    def __init__(self, language_model: Any, config: ModelConfig, rules: MaskRules) -> None:
        self.config = config
        self.language_model = language_model
        self.rules = rules
        self._embedding: nn.Module = language_model.get_input_embeddings()
        weight: Any = self._embedding.weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.dtype_name = str(self.dtype).removeprefix("torch.")
        self.decoder = _decoder_of(language_model)
        # Named past_key_values in earlier releases of transformers 5.
        takes = inspect.signature(self.decoder.forward).parameters
        self.cache_argument = "cache" if "cache" in takes else "past_key_values"
        self._head = _head_only(language_model, self.decoder)
        self.layers = _decoder_layers(self.decoder, config.num_layers)

    def new_cache(self, num_rows: int, capacity: int) -> TransformersCache:
        return TransformersCache(num_rows, capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._embedding(tokens.to(self.device))
        return embedded

    def norm(self, states: Tensor) -> Tensor:
        for name in _FINAL_NORMS:
            norm = getattr(self.decoder, name, None)
            if isinstance(norm, nn.Module):
                normed: Tensor = norm(states.to(device=self.device, dtype=self.dtype))
                return normed
        raise ModelError(
            f"A {self.config.model_type} model has no final norm that could be told apart; choose "
            "a method that does not share it (forespeak methods)."
        )

    def head_rows(self, tokens: Tensor) -> Tensor:
        weight = getattr(self.language_model.get_output_embeddings(), "weight", None)
        if not isinstance(weight, Tensor):
            raise ModelError(
                f"A {self.config.model_type} model has no plain head, so no part of it can be "
                "taken; leave draft_vocab_size out."
            )
        return weight[tokens.to(self.device)]

    def head(self, hidden: Tensor) -> Tensor:
        states = hidden.to(device=self.device, dtype=self.dtype)
        flat = states.reshape(1, -1, states.shape[-1])
        logits: Tensor = self._head(inputs_embeds=flat, use_cache=False).logits
        return logits.reshape(*states.shape[:-1], logits.shape[-1]).float()

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Cache,
        segments: Sequence[Segment],
        *,
        logits_at: Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> TargetOutput:
        assert isinstance(cache, TransformersCache)
        hidden, tapped, at = [], [], 0
        for segment in segments:
            span = slice(at, at + segment.num_tokens)
            states, outputs = self._row(tokens[span], positions[span], cache, segment, taps)
            hidden.append(states)
            tapped.append(outputs)
            at = span.stop
        assert at == tokens.shape[0], (at, tokens.shape)
        joined = torch.cat(hidden)  # [T, H]
        asked = joined if logits_at is None else joined[logits_at.to(self.device)]
        return TargetOutput(
            logits=self.head(asked),
            hidden=joined,
            taps=torch.cat(tapped) if taps else None,
        )

    def _row(
        self,
        tokens: Tensor,  # [n]
        positions: Tensor,  # [n]
        cache: TransformersCache,
        segment: Segment,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [n, H] and tapped outputs [n, K, H] of one row's new tokens."""
        cache.append(segment, positions.tolist())
        mask = segment_masks(self.rules, cache, segment, self.dtype, self.device)
        with self._tapped(taps) as seen:
            hidden = self._decode(tokens, positions, cache.rows[segment.row], mask)
        outputs = [_flat(seen[index]) for index in taps]
        return hidden, torch.stack(outputs, dim=1) if outputs else hidden[:, None][:, :0]

    def _decode(
        self, tokens: Tensor, positions: Tensor, row_cache: Any, mask: Tensor | Mapping[str, Tensor]
    ) -> Tensor:
        call: dict[str, Any] = {
            "input_ids": tokens[None].to(self.device),
            "position_ids": positions[None].to(self.device),
            "attention_mask": mask,
            self.cache_argument: row_cache,
            "use_cache": True,
        }
        hidden: Tensor = self.decoder(**call).last_hidden_state  # [1, n, H]
        return hidden[0]

    @contextmanager
    def _tapped(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collects the outputs of some decoder layers; the hooks are gone when it ends."""
        seen: dict[int, Tensor] = {}
        if taps and not self.layers:
            raise ModelError(
                f"The layers of a {self.config.model_type} model could not be told apart, so none "
                "can be read; choose a method that reads no layers (forespeak methods)."
            )
        handles = [
            self.layers[index].register_forward_hook(_keep_output(seen, index)) for index in taps
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()


def _keep_output(seen: dict[int, Tensor], index: int) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        seen[index] = output[0] if isinstance(output, tuple) else output

    return hook


def _flat(output: Tensor) -> Tensor:
    """[1, n, H] -> [n, H]."""
    if output.dim() != 3 or output.shape[0] != 1:
        raise ModelError(
            f"A decoder layer of this model gives a state of shape {list(output.shape)}; one "
            "vector a token is expected. Choose a method that reads no layers (forespeak methods)."
        )
    return output[0]


def _decoder_of(language_model: Any) -> nn.Module:
    """The part of the model between input tokens and head."""
    decoder: Any = language_model.get_decoder()
    if decoder is language_model:  # transformers does not find it in models with a prefix of theirs
        decoder = getattr(language_model, "model", None)
    if not isinstance(decoder, nn.Module):
        raise ModelError(
            f"{type(language_model).__name__} has no decoder apart from its head; allowed are "
            "causal language models of transformers that have one. Choose another model."
        )
    return decoder


def _decoder_layers(decoder: nn.Module, num_layers: int) -> list[nn.Module]:
    """The decoder's layers in order; empty when no list of that length is found."""
    for child in decoder.children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return list(child)
    return []


class _GivenStates:
    """What a decoder returns, when its last hidden state is known: anything else is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0, index
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _GivesInput(nn.Module):
    """Stands where the decoder stood and returns the embeddings it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _GivenStates:
        return _GivenStates(inputs_embeds)


def _head_only(language_model: Any, decoder: nn.Module) -> Any:
    """A copy that shares the head's weights and whose decoder is a stand-in.

    Called with hidden states as ``inputs_embeds`` it runs what the model's own forward does after
    the decoder. The decoder may lie some modules deep (``model.decoder``); the outermost of them is
    replaced, with stand-ins below it for models that call the inner one directly.
    """
    path = next(name for name, module in language_model.named_modules() if module is decoder)
    outer, *inner = path.split(".")
    stand_in = top = _GivesInput()
    for name in inner:
        below = _GivesInput()
        stand_in.add_module(name, below)
        stand_in = below
    twin = copy.copy(language_model)
    twin._modules = dict(language_model._modules)
    twin._modules[outer] = top
    return twin
