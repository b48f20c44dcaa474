"""Features of a data set on disk, for many recipes and many epochs.

    folder/manifest.json               target, precision, layers, texts of each shard
           probe.safetensors           features of a few tokens: tells targets apart
           shard-00000.safetensors     hidden [N, H], tap.LAYER [N, H], all bfloat16

A shard holds texts one after another. It enters the manifest when it is whole, so a stopped run
goes on after the last one, and new texts at the end of a data set are added the same way.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from forespeak.errors import CheckpointError, OptionError
from forespeak.formats.weights import read_json_object
from forespeak.models.base import TargetModel
from forespeak.train.atomic import remove_parts, write_json_whole, write_whole
from forespeak.train.features import Features, FeatureSource, Needs, target_features
from forespeak.train.target import probe_tokens

FORMAT, VERSION = "forespeak features", 1
_SHARD_BYTES = 256 * 1024**2
_PROBE_TOLERANCE = 0.05  # of a state's norm: far above rounding, far below another model

OnTexts = Callable[[int, int], None]
"""Called with texts done and texts in all."""


@dataclass(frozen=True)
class CachePlan:
    """What a cache still needs.

    Attributes:
        done: texts that it holds.
        total: texts of the data set.
        num_bytes: that are still to be written.
        bytes_per_token: of every text.
    """

    done: int
    total: int
    num_bytes: int
    bytes_per_token: int


def plan_cache(
    folder: Path, model: TargetModel, texts: Sequence[Sequence[int]], needs: Needs
) -> CachePlan:
    """What writing a cache would take.

    Args:
        folder: it may hold a part already.
        model: the target.
        texts: token ids of the data set, as long as features are wanted.
        needs: what a new cache keeps; an old one keeps what it has, which must be enough.

    Raises:
        OptionError: the folder holds features of another target, other layers or other texts, or
            the disk has no room.
        CheckpointError: it is damaged.
    """
    done = 0
    if (folder / "manifest.json").is_file():
        manifest = _read_manifest(folder)
        _check_same(folder, manifest, model, needs)
        needs = _needs_of(manifest)
        done = _check_texts(folder, manifest, texts)
    each = (len(needs.taps) + needs.hidden) * model.config.hidden_size * 2
    missing = sum(map(len, texts[done:])) * each
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if missing > free:
        raise OptionError(
            f"The features take {missing / 1e6:,.1f} MB and {existing} has {free / 1e6:,.1f} MB "
            'free; free some space, use fewer or shorter texts, or data.features="live".'
        )
    return CachePlan(done, len(texts), missing, each)


def write_cache(
    folder: Path,
    model: TargetModel,
    texts: Sequence[Sequence[int]],
    needs: Needs,
    *,
    target: str = "",
    on_texts: OnTexts | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    shard_bytes: int | None = None,
) -> bool:
    """Write the features that a folder lacks; what is there stays.

    Args:
        folder, model, texts, needs: see :func:`plan_cache`.
        target: the model's name, for people.
        on_texts: told after every shard.
        should_stop: asked after every shard.
        shard_bytes: about the size of a shard; None takes 256 MiB.

    Returns:
        Whether all are there.

    Raises:
        OptionError, CheckpointError: see :func:`plan_cache`.
        OSError: the disk is full; the shards before stay good.
    """
    plan = plan_cache(folder, model, texts, needs)
    folder.mkdir(parents=True, exist_ok=True)
    remove_parts(folder)
    if not (folder / "manifest.json").is_file():
        probe = _flat([_probe(model, needs)], needs)
        write_whole(folder / "probe.safetensors", lambda part: save_file(probe, part))
        write_json_whole(folder / "manifest.json", _new_manifest(model, needs, target))
    manifest, first, most = _read_manifest(folder), plan.done, shard_bytes or _SHARD_BYTES
    needs = _needs_of(manifest)
    while first < len(texts):
        end, size = first, 0
        while end < len(texts) and (end == first or size < most):
            size += len(texts[end]) * plan.bytes_per_token
            end += 1
        chosen = texts[first:end]
        tensors = _flat(target_features(model, chosen, needs), needs)
        name = f"shard-{len(manifest['shards']):05d}.safetensors"
        write_whole(folder / name, lambda part, whole=tensors: save_file(whole, part))  # type: ignore[misc]
        lengths = [len(text) for text in chosen]
        manifest["shards"].append({"file": name, "lengths": lengths, "digest": _digest(chosen)})
        write_json_whole(folder / "manifest.json", manifest)
        first = end
        if on_texts is not None:
            on_texts(first, len(texts))
        if should_stop():
            break
    return first == len(texts)


class CachedFeatures(FeatureSource):
    """Reads features from a folder; a part of its layers may be asked for.

    Args:
        folder: written by :func:`write_cache`.
        model: the target, to check that it is the cache's.
        texts: token ids of the data set, each as long as it was written.
        needs: what is read.

    Raises:
        OptionError: it is of another target, lacks layers or texts, or of other texts.
        CheckpointError: it is damaged.
    """

    def __init__(
        self,
        folder: Path,
        model: TargetModel,
        texts: Sequence[Sequence[int]],
        needs: Needs,
    ) -> None:
        manifest = _read_manifest(folder)
        _check_same(folder, manifest, model, needs)
        done = _check_texts(folder, manifest, texts)
        if done < len(texts):
            raise OptionError(
                f"{folder} holds features of {done} texts and the data has {len(texts)}; let the "
                "same command write the rest first."
            )
        self._needs = needs
        self._places: list[tuple[int, int]] = []  # (shard, first token) of each text
        self._files: list[Any] = []
        for number, shard in enumerate(manifest["shards"]):
            start = 0
            for length in shard["lengths"]:
                self._places.append((number, start))
                start += length
            self._files.append(_open_shard(folder, shard["file"], start, manifest))

    def get(self, indices: Sequence[int], lengths: Sequence[int]) -> list[Features]:
        return [self._one(*self._places[i], n) for i, n in zip(indices, lengths, strict=True)]

    def _one(self, shard: int, start: int, length: int) -> Features:
        def part(name: str) -> Tensor:
            rows: Tensor = self._files[shard].get_slice(name)[start : start + length]
            return rows

        taps = [part(f"tap.{layer}") for layer in self._needs.taps]
        return Features(
            hidden=part("hidden") if self._needs.hidden else None,
            taps=torch.stack(taps, dim=1) if taps else None,
        )


def check_cache(folder: Path) -> list[str]:
    """What is wrong with a cache, reading every number; empty when nothing is.

    Raises:
        CheckpointError: it has no manifest that can be read.
    """
    manifest = _read_manifest(folder)
    problems = []
    for shard in manifest["shards"]:
        try:
            file = _open_shard(folder, shard["file"], sum(shard["lengths"]), manifest)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for name in file.keys():  # not a mapping
            if not bool(file.get_tensor(name).isfinite().all()):
                problems.append(f"{folder / shard['file']}: {name} has values that are not finite.")
    return problems


def _new_manifest(model: TargetModel, needs: Needs, target: str) -> dict[str, Any]:
    return {
        "format": FORMAT, "version": VERSION, "target": target, "precision": model.dtype_name,
        "hidden_size": model.config.hidden_size, "num_layers": model.config.num_layers,
        "vocab_size": model.config.vocab_size, "taps": list(needs.taps), "hidden": needs.hidden,
        "dtype": "bfloat16", "shards": [],
    }  # fmt: skip


def _needs_of(manifest: dict[str, Any]) -> Needs:
    return Needs(tuple(manifest["taps"]), bool(manifest["hidden"]))


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = read_json_object(folder / "manifest.json")
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{folder} says format {manifest.get('format')!r}, version "
            f"{manifest.get('version')!r}; this version reads {FORMAT!r}, {VERSION}. Write the "
            "features again in a new folder."
        )
    missing = [key for key in _new_keys() if key not in manifest]
    if missing or not _are_shards(manifest["shards"]):
        raise CheckpointError(
            f"{folder / 'manifest.json'} lacks {', '.join(missing) or 'a list of shards'}; it is "
            "damaged. Write the features again in a new folder."
        )
    return manifest


def _are_shards(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(one, dict)
        and isinstance(one.get("file"), str)
        and isinstance(one.get("digest"), str)
        and isinstance(one.get("lengths"), list)
        and all(isinstance(length, int) for length in one["lengths"])
        for one in values
    )


def _new_keys() -> tuple[str, ...]:
    return ("precision", "hidden_size", "num_layers", "vocab_size", "taps", "hidden", "shards")


def _check_same(folder: Path, manifest: dict[str, Any], model: TargetModel, needs: Needs) -> None:
    config = model.config
    for name, ours in (
        ("hidden_size", config.hidden_size),
        ("num_layers", config.num_layers),
        ("vocab_size", config.vocab_size),
        ("precision", model.dtype_name),
    ):
        if manifest[name] != ours:
            raise OptionError(
                f"{folder} holds features of another target ({manifest['target']}): its {name} is "
                f"{manifest[name]}, this target's is {ours}. Name another folder for the features."
            )
    kept = set(manifest["taps"])
    if not kept >= set(needs.taps) or (needs.hidden and not manifest["hidden"]):
        raise OptionError(
            f"{folder} holds the layers {sorted(kept)} {_with_hidden(manifest['hidden'])}; needed "
            f"are {sorted(needs.taps)} {_with_hidden(needs.hidden)}. Name another folder for the "
            "features, or write them with all layers that your recipes read."
        )
    _check_probe(folder, model, needs)


def _with_hidden(hidden: bool) -> str:
    return "and the last state" if hidden else "without the last state"


def _check_probe(folder: Path, model: TargetModel, needs: Needs) -> None:
    try:
        kept = load_file(folder / "probe.safetensors")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{folder / 'probe.safetensors'} cannot be read ({error}); write the features again in "
            "a new folder."
        ) from None
    for name, now in _flat([_probe(model, needs)], needs).items():
        then = kept[name].float()
        if float((now.float() - then).norm()) > _PROBE_TOLERANCE * float(then.norm()):
            raise OptionError(
                f"{folder} holds features of another target: the same tokens give other values "
                f"({name}). It may have been trained on since. Name another folder for features."
            )


def _check_texts(folder: Path, manifest: dict[str, Any], texts: Sequence[Sequence[int]]) -> int:
    """How many texts the cache holds, which must be the first of the data set."""
    done = 0
    for shard in manifest["shards"]:
        lengths = shard["lengths"]
        chosen = texts[done : done + len(lengths)]
        whole = [len(text) for text in chosen] == lengths
        fits = len(chosen) == len(lengths) and whole and _digest(chosen) == shard["digest"]
        if not fits:
            raise OptionError(
                f"{folder} holds features of other texts (from number {done} on, or cut to another "
                "length). It serves the --data folders that it was written for, in that order, "
                "more of them behind, and one data.max_length. Name another folder for the "
                "features."
            )
        done += len(lengths)
    return done


def _digest(texts: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.asarray([len(text), *text], np.int32).tobytes())
    return digest.hexdigest()


def _probe(model: TargetModel, needs: Needs) -> Features:
    return target_features(model, [probe_tokens(model.config).tolist()], needs)[0]


def _flat(found: Sequence[Features], needs: Needs) -> dict[str, Tensor]:
    """Features of texts one after another, by their names in a shard."""
    tensors: dict[str, Tensor] = {}
    if needs.hidden:
        tensors["hidden"] = torch.cat([f.hidden for f in found if f.hidden is not None])
    for at, layer in enumerate(needs.taps):
        parts = [f.taps[:, at] for f in found if f.taps is not None]
        tensors[f"tap.{layer}"] = torch.cat(parts)
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _open_shard(folder: Path, name: str, num_tokens: int, manifest: dict[str, Any]) -> Any:
    path = folder / name
    expected = {f"tap.{layer}" for layer in manifest["taps"]}
    expected |= {"hidden"} if manifest["hidden"] else set()
    try:
        file: Any = safe_open(path, framework="pt", device="cpu")
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is missing, cut or damaged ({error}); write the features again in a new "
            "folder, or delete this shard and all after it from the manifest."
        ) from None
    if shapes != dict.fromkeys(expected, (num_tokens, manifest["hidden_size"])):
        raise CheckpointError(
            f"{path} has other tensors or sizes than its manifest says; write the features again "
            "in a new folder."
        )
    return file
