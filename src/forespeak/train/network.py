"""A whole decoder as a torch module with gradients, for models that are trained themselves.

Parameter names are those of Hugging Face checkpoints, so ``state_dict`` is what a model folder
holds. B texts, S tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from forespeak.formats.drafter_files import write_drafter_files
from forespeak.formats.layer_fields import layer_fields
from forespeak.models.blocks import DecoderLayer, Linear, RMSNorm, blank
from forespeak.models.config import ModelConfig
from forespeak.train.attention import CausalAttention, Rotations
from forespeak.train.objective import TargetView


class _Trunk(nn.Module):
    """Everything below the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        unset = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=unset)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DecoderNetwork(nn.Module):
    """A decoder of the built-in families. Parameters are NaN until they are loaded.

    Args:
        config: its sizes.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Trunk(config)
        self.lm_head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rotations: Rotations | None = None
        blank(self)

    @property
    def head(self) -> Tensor:
        """[V, H] of the logits; the embedding where they are tied."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert isinstance(head.weight, Tensor)
        return head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] to states [B, S, H] after the final norm."""
        return self.above(self.below(tokens, 0), 0)

    def below(self, tokens: Tensor, count: int) -> Tensor:
        """States [B, S, H] of tokens [B, S] after the first ``count`` layers."""
        states: Tensor = self.model.embed_tokens(tokens)
        return self._run(states, 0, count)

    def above(self, states: Tensor, first: int) -> Tensor:
        """States [B, S, H] after the final norm, of those that layer ``first`` reads."""
        normed: Tensor = self.model.norm(self._run(states, first, self.config.num_layers))
        return normed

    def _run(self, states: Tensor, first: int, end: int) -> Tensor:
        if self._rotations is None:
            self._rotations = Rotations(self.config, states.device)
        rotation = self._rotations(torch.arange(states.shape[1]))
        attend = CausalAttention(self.config)
        for index in range(first, end):
            states = self.model.layers[index](states, index, rotation, attend)
        return states


def weights_of(target: TargetView) -> dict[str, Tensor]:
    """A target's weights under HF names, float32 on the CPU, all its layers."""
    found = {"model.embed_tokens.weight": target.embedding, "model.norm.weight": target.norm}
    if not target.config.tie_word_embeddings:
        found["lm_head.weight"] = target.head
    for number in range(target.config.num_layers):
        for name, tensor in target.layers[number].items():
            found[f"model.layers.{number}.{name}"] = tensor
    return {name: tensor.detach().to("cpu", torch.float32) for name, tensor in found.items()}


def write_model(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """A model folder in Hugging Face format, without a tokenizer.

    Args:
        folder: is made.
        config: of the model.
        tensors: under HF names.
    """
    write_drafter_files(folder, model_fields(config), tensors)


def model_fields(config: ModelConfig) -> dict[str, object]:
    """config.json of a model folder."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    values = layer_fields(config)
    architecture = names.get(str(values["model_type"]), "MiMo")
    return {"architectures": [f"{architecture}ForCausalLM"], **values}
