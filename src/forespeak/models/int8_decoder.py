"""Int8Decoder: the same families as ``decoder.py`` in int8 on CPU, through the fused kernels.

A token's logits do not depend, bit for bit, on what else is in the forward (law 1): every value
of a token is computed by the same operations in the same order, see ``fused.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from forespeak.errors import OptionError
from forespeak.models.attention import build_plan
from forespeak.models.base import Cache, TargetModel, first_layers_config
from forespeak.models.config import ModelConfig
from forespeak.models.decoder import RopeTable, rms_norm, window_flags
from forespeak.models.kernels.fused import multiply, norm_rows, run_layers
from forespeak.models.kernels.layout import (
    Array,
    LayerStack,
    Shape,
    first_layers,
    make_workspace,
)
from forespeak.models.kernels.simd import BLOCK, has_int8_product
from forespeak.models.kernels.team import new_barrier, runs_as_team
from forespeak.models.kv_cache import KVCache
from forespeak.models.parameters import LayerTensors, OuterTensors, read_parameters
from forespeak.models.quantize import MatrixBuilder, dequantize_rows, padded, single_matrix
from forespeak.types import Segment, TargetOutput

_HALF_LIMIT = 60000.0  # embeddings below this magnitude are kept in float16


class _StackBuilder:
    """Collects the layers of a model into a :class:`LayerStack`."""

    def __init__(self, c: ModelConfig) -> None:
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        n = c.num_layers
        self.qkv = MatrixBuilder(n, [queries, keys, keys], c.hidden_size, bias=c.attention_bias)
        self.out = MatrixBuilder(n, [c.hidden_size], queries, bias=c.output_bias)
        self.gate_up = MatrixBuilder(
            n, [c.intermediate_size] * 2, c.hidden_size, bias=c.mlp_bias, pad_parts=True
        )
        self.down = MatrixBuilder(n, [c.hidden_size], c.intermediate_size, bias=c.mlp_bias)
        self.norms = np.ones((2, n, c.hidden_size), np.float32)
        self.head_norms = np.ones((2, n, c.head_dim if c.qk_norm else 0), np.float32)

    def add(self, i: int, layer: LayerTensors) -> None:
        self.qkv.set_layer(
            i, [layer.q, layer.k, layer.v], [layer.q_bias, layer.k_bias, layer.v_bias]
        )
        self.out.set_layer(i, [layer.o], [layer.o_bias])
        self.gate_up.set_layer(i, [layer.gate, layer.up], [layer.gate_bias, layer.up_bias])
        self.down.set_layer(i, [layer.down], [layer.down_bias])
        self.norms[0, i] = layer.attention_norm.float().numpy()
        self.norms[1, i] = layer.mlp_norm.float().numpy()
        if layer.query_norm is not None and layer.key_norm is not None:
            self.head_norms[0, i] = layer.query_norm.float().numpy()
            self.head_norms[1, i] = layer.key_norm.float().numpy()

    def build(self) -> LayerStack:
        matrices = (self.qkv, self.out, self.gate_up, self.down)
        arrays = [array for matrix in matrices for array in matrix.build()]
        return LayerStack(*arrays, *self.norms, *self.head_norms)


class Int8Decoder(TargetModel):
    """A dense decoder with int8 weights and activations.

    Args:
        config, weights, context_length: as for ``Decoder``.
        threads: CPU threads of a forward; None means all that Numba has. One is used where the
            machine's threading layer cannot run them as a team; ``threads`` then says 1.
        portable: plain arithmetic in place of the AVX-512 VNNI product; same numbers, slower.
            None chooses by this CPU.

    Raises:
        CheckpointError: weights and config do not fit together, or a weight is not finite.
        OptionError: more threads than there are.
    """

    dtype_name = "int8"

    def __init__(
        self,
        config: ModelConfig,
        weights: Iterable[tuple[str, Tensor]],
        *,
        context_length: int | None = None,
        threads: int | None = None,
        portable: bool | None = None,
    ) -> None:
        most = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
        if threads is not None and not 1 <= threads <= most:
            raise OptionError(f"threads is {threads}; allowed: 1 to {most} on this machine.")
        self.config = config
        self.device = torch.device("cpu")
        self.threads = threads or most
        if not runs_as_team(self.threads):  # an OpenMP told to use fewer threads, or another layer
            self.threads = 1
        self.portable = not has_int8_product() if portable is None else portable
        self._rope = RopeTable(config, context_length or config.max_position_embeddings)
        self._windowed = window_flags(config)
        self._shape = Shape(
            config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.rms_norm_eps,
        )  # fmt: skip
        stack = _StackBuilder(config)
        for item in read_parameters(config, weights):
            if isinstance(item, OuterTensors):
                self._set_outer(item)
            else:
                stack.add(*item)
        self._stack = stack.build()

    def _set_outer(self, outer: OuterTensors) -> None:
        self._head = single_matrix(outer.head)
        half = bool(outer.embedding.abs().max() < _HALF_LIMIT)
        self._embedding = outer.embedding.to(torch.float16 if half else torch.float32)
        self._norm = outer.norm.float().numpy()

    def new_cache(self, num_rows: int, capacity: int) -> KVCache:
        c = self.config
        return KVCache(
            c.num_layers, num_rows, c.num_kv_heads, c.head_dim, capacity, tiled_keys=True
        )

    def truncated(self, num_layers: int) -> Int8Decoder:
        model = copy.copy(self)
        model.config = first_layers_config(self.config, num_layers)
        model._stack = first_layers(self._stack, num_layers)
        model._windowed = self._windowed[:num_layers]
        return model

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens].float()

    def norm(self, states: Tensor) -> Tensor:
        return rms_norm(states.float(), torch.from_numpy(self._norm), self.config.rms_norm_eps)

    def head_rows(self, tokens: Tensor) -> Tensor:
        return dequantize_rows(self._head, tokens, self.config.hidden_size)

    def head(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).float()
        wide = np.zeros((rows.shape[0], padded(self.config.hidden_size)), np.float32)
        wide[:, : rows.shape[1]] = rows.numpy()
        logits = self._multiply_head(wide)
        return logits.reshape(*hidden.shape[:-1], self.config.vocab_size)

    def _multiply_head(self, rows: Array) -> Tensor:
        """rows [n, padded H] to logits [n, V]."""
        numba.set_num_threads(self.threads)
        out = np.empty((rows.shape[0], self._head.scale.shape[1]), np.float32)
        multiply(
            True if self.portable else None, self.threads, rows, self._head.weight[0],
            self._head.scale[0], out,
        )  # fmt: skip
        return torch.from_numpy(out)[:, : self.config.vocab_size]

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
        assert isinstance(cache, KVCache) and cache.tiled_keys
        numba.set_num_threads(self.threads)
        cache.append(segments, positions.tolist())
        plan = build_plan(cache, segments, self.config.sliding_window, self._windowed)
        cos, sin = self._rope.lookup(positions)
        n, width = self.config.hidden_size, padded(self.config.hidden_size)
        hidden = np.zeros((len(tokens), width), np.float32)
        hidden[:, :n] = self.embed(tokens).numpy()
        tapped = np.empty((len(tokens), len(taps), n), np.float32)
        run_layers(
            True if self.portable else None, self.threads, new_barrier(), self._shape, hidden,
            cos.numpy(), sin.numpy(), self._stack, cache.keys.numpy(), cache.values.numpy(), plan,
            make_workspace(len(tokens), width, self._stack, BLOCK), np.array(taps, np.int64),
            tapped,
        )  # fmt: skip
        normed = np.zeros((len(tokens), width), np.float32)
        eps = np.float32(self.config.rms_norm_eps)
        norm_rows(self.threads, hidden, self._norm, n, eps, normed)
        asked = normed if logits_at is None else normed[logits_at.numpy()]
        return TargetOutput(
            logits=self._multiply_head(asked),
            hidden=torch.from_numpy(normed)[:, :n],
            taps=torch.from_numpy(tapped) if taps else None,
        )
