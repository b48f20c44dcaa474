"""GGUF files: header, tensor table and weights, with every length checked before it is used.

    magic "GGUF" | version | tensor count | field count
    fields:   key, type, value             strings and arrays carry their length before them
    tensors:  name, dims (innermost first), type, offset from the data's start
    padding to the alignment
    data:     each tensor padded to the alignment, in the order of the table

The header is parsed here and not by ``gguf.GGUFReader``, which takes seconds for a vocabulary and
believes the counts of a damaged file. Block types and their arithmetic are the package's.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from forespeak.errors import CheckpointError

TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K",
)  # fmt: skip
"""Tensor types that can be read."""

_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4

_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
"""Numbers that divide the rotary frequencies: part of the config and not of the weights."""


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. ``shape`` is in the order of torch; ``offset`` counts from byte 0."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A checked header. ``header_bytes`` is its length, vocabulary included."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    header_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def read_gguf(path: Path) -> GgufFile:
    """Read the header and check that the file is whole; no weight is read.

    Raises:
        CheckpointError: not a GGUF file, cut or damaged, split in parts, or with tensor types that
            cannot be read.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise _damaged(path, "it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(path, data))
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); a GGUF file is expected. Check the path "
            "and its permissions."
        ) from None


def iter_gguf_weights(file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    """HF names and float32 tensors in HF's layout, one at a time.

    Raises:
        CheckpointError: a tensor of another kind of model, or the file changed meanwhile.
    """
    for tensor in file.tensors.values():
        if tensor.name != ROPE_FACTORS:
            yield _hf_name(file, tensor.name), read_tensor(file, tensor)


def read_tensor(file: GgufFile, tensor: GgufTensor) -> Tensor:
    """One tensor as float32, rows in the order of HF checkpoints."""
    raw = np.fromfile(file.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
    if raw.size != tensor.num_bytes:
        raise _damaged(file.path, f"it ends inside tensor {tensor.name!r}")
    kind = GGMLQuantizationType[tensor.type_name]
    rows = raw.reshape(*tensor.shape[:-1], -1)  # [..., bytes of one row]
    with np.errstate(all="ignore"):  # scales of a damaged file may overflow
        values = gguf.dequantize(rows, kind).reshape(tensor.shape)
    values = np.ascontiguousarray(values, dtype=np.float32)
    return _undo_permutation(file, tensor.name, torch.from_numpy(values))


def _undo_permutation(file: GgufFile, name: str, tensor: Tensor) -> Tensor:
    """Bring q and k rows of llama-type files back from interleaved to half-split rotary order.

    Rows of one head, d = head_dim / 2:   file  0, d, 1, d+1, ...   HF  0, 1, ..., d, d+1, ...
    """
    match = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", name)
    if file.architecture != "llama" or match is None:
        return tensor
    heads = file.metadata.get("llama.attention.head_count")
    if match[1] == "k":
        heads = file.metadata.get("llama.attention.head_count_kv", heads)
    if not isinstance(heads, int) or heads < 1 or tensor.shape[0] % (2 * heads):
        raise _damaged(file.path, f"{name} has {tensor.shape[0]} rows for {heads!r} heads")
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _hf_name(file: GgufFile, name: str) -> str:
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise CheckpointError(
            f"{file.path} has a tensor {name!r}, which the built-in decoder has no place for; "
            "allowed are dense Llama, Mistral, Qwen2 and Qwen3 models. Use the model's HF folder."
        )
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


class _Cursor:
    """Reads forward through the file; nothing is taken that is not there."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = 0
        self.size = len(data)

    def need(self, num_bytes: int, what: str) -> None:
        if num_bytes > self.size - self.offset:
            raise _damaged(self.path, f"{what} runs past its end at byte {self.size}")

    def scalars(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        self.need(layout.size, what)
        values = layout.unpack_from(self.data, self.offset)
        self.offset += layout.size
        return values

    def scalar(self, code: str, what: str) -> Any:
        return self.scalars(code, 1, what)[0]

    def string(self, what: str) -> str:
        length = self.scalar("Q", what)
        self.need(length, what)
        raw = self.data[self.offset : self.offset + length]
        self.offset += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged(self.path, f"{what} is not UTF-8 text") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise _damaged(self.path, f"{what} has the unknown type {kind}")
        return self.scalar(_SCALARS[kind], what)

    def array(self, what: str) -> list[Any]:
        kind, count = self.scalar("I", what), self.scalar("Q", what)
        if kind == _STRING:
            self.need(8 * count, what)  # the lengths alone; stops a wild count at once
            return [self.string(what) for _ in range(count)]
        if kind not in _SCALARS:
            raise _damaged(self.path, f"{what} is an array of the unknown type {kind}")
        self.need(struct.calcsize(_SCALARS[kind]) * count, what)
        return list(self.scalars(_SCALARS[kind], count, what))


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    tensor_count, field_count = _parse_counts(path, cursor)
    metadata: dict[str, Any] = {}
    for index in range(field_count):
        key = cursor.string(f"the name of field {index}")
        if key in metadata:
            raise _damaged(path, f"field {key!r} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I", f"field {key!r}"), f"field {key!r}")
    _refuse_parts(path, metadata)
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise _damaged(path, f"its alignment is {alignment!r} and no small power of two")
    rows = [_parse_tensor(path, cursor, index) for index in range(tensor_count)]
    tensors = _place(path, rows, _padded(cursor.offset, alignment), alignment, cursor.size)
    return GgufFile(path, metadata, tensors, cursor.offset)


def _parse_counts(path: Path, cursor: _Cursor) -> tuple[int, int]:
    if cursor.data[:4] != b"GGUF":
        raise CheckpointError(
            f"{path} does not begin with the letters GGUF; a GGUF file is expected. Get the file "
            "again or name an HF folder."
        )
    cursor.offset = 4
    version = cursor.scalar("I", "the version")
    if version not in (2, 3):
        raise CheckpointError(
            f"{path} is GGUF of version {version}; allowed: 2 and 3, little-endian. "
            "Convert the model again with a recent llama.cpp."
        )
    tensor_count, field_count = cursor.scalars("Q", 2, "the header")
    # The least that a tensor and a field can take stops a wild count before any loop.
    cursor.need(24 * tensor_count + 13 * field_count, "the header")
    return tensor_count, field_count


def _refuse_parts(path: Path, metadata: dict[str, Any]) -> None:
    parts = metadata.get("split.count", 0)
    if parts not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {parts} parts; a single GGUF file is expected. "
            "Join them with llama.cpp's `llama-gguf-split --merge`."
        )


@dataclass(frozen=True)
class _Row:
    """One line of the tensor table. ``offset`` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    num_bytes: int
    offset: int


def _parse_tensor(path: Path, cursor: _Cursor, index: int) -> _Row:
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    num_dims = cursor.scalar("I", what)
    if not 1 <= num_dims <= _MAX_DIMS:
        raise _damaged(path, f"{what} has {num_dims} dimensions")
    shape = tuple(reversed(cursor.scalars("Q", num_dims, what)))
    kind, offset = cursor.scalar("I", what), cursor.scalar("Q", what)
    try:
        type_name = GGMLQuantizationType(kind).name
    except ValueError:
        raise _damaged(path, f"{what} has the unknown type {kind}") from None
    if type_name not in TYPES:
        raise CheckpointError(
            f"{path} stores {what} as {type_name}; allowed: {', '.join(TYPES)}. "
            "Use a version of the model with one of these."
        )
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    num_elements = 1
    for size in shape:
        num_elements *= size
    if num_elements == 0 or shape[-1] % block_size:
        raise _damaged(path, f"{what} has the shape {shape}, impossible for {type_name}")
    return _Row(name, shape, type_name, num_elements // block_size * block_bytes, offset)


def _place(
    path: Path, rows: list[_Row], start: int, alignment: int, size: int
) -> dict[str, GgufTensor]:
    """Check that the tensors follow one another without gap and end inside the file."""
    tensors: dict[str, GgufTensor] = {}
    next_offset = 0
    for row in rows:
        if row.name in tensors:
            raise _damaged(path, f"tensor {row.name!r} is there twice")
        if row.offset != next_offset:
            raise _damaged(
                path, f"tensor {row.name!r} lies at {row.offset} of the data and not {next_offset}"
            )
        next_offset = _padded(row.offset + row.num_bytes, alignment)
        if start + next_offset > size:
            raise _damaged(
                path,
                f"tensor {row.name!r} needs {start + next_offset} bytes and the file has {size}",
            )
        tensors[row.name] = GgufTensor(
            row.name, row.shape, row.type_name, start + row.offset, row.num_bytes
        )
    return tensors


def _padded(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is cut or damaged: {why}; a whole GGUF file is expected. "
        "Get the file again from where it came from."
    )
