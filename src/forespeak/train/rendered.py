"""Samples of a folder of dialogues, rendered once.

Putting answers between what the chat template writes around them, and checking that they stand
there, takes a millisecond a dialogue: half a minute for data of a GPU, each time a run begins. The
result is kept beside the dialogues for as long as these and the template stay what they were::

    FOLDER/rendered.safetensors   tokens of all samples, their lengths and spans
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from forespeak.models.tokenizer import Tokenizer
from forespeak.train.atomic import write_whole
from forespeak.train.dialogues import DIALOGUES, Sample, Samples, read_manifest, read_samples

RENDERED = "rendered.safetensors"
_VERSION = "1"


def read_rendered(folder: Path, tokenizer: Tokenizer) -> Samples:
    """What ``read_samples`` gives, from the file where it is of these dialogues.

    Raises:
        DataError: the data are damaged, or of another vocabulary or template.
    """
    read_manifest(folder).check_target(tokenizer, folder)
    if not (folder / DIALOGUES).is_file():
        return read_samples(folder, tokenizer)  # which says what is wrong
    key = _key(folder, tokenizer)
    found = _load(folder / RENDERED, key)
    if found is None:
        found = read_samples(folder, tokenizer)
        try:
            write_whole(folder / RENDERED, lambda part: _save(part, found, key))
        except OSError:  # a full or read-only disk: it is made again next time
            pass
    return found


def _key(folder: Path, tokenizer: Tokenizer) -> str:
    content = hashlib.sha256((folder / DIALOGUES).read_bytes()).hexdigest()
    template, vocabulary = tokenizer.template_digest(), tokenizer.vocabulary_digest()
    return " ".join((_VERSION, content, template, vocabulary))


def _save(path: Path, samples: Samples, key: str) -> None:
    texts = [sample.token_ids for sample in samples.samples]
    spans = [sample.spans for sample in samples.samples]
    tensors = {
        "tokens": torch.tensor([t for text in texts for t in text], dtype=torch.int32),
        "lengths": torch.tensor([len(text) for text in texts], dtype=torch.int32),
        "spans": torch.tensor(
            [end for some in spans for span in some for end in span], dtype=torch.int32
        ),
        "span_counts": torch.tensor([len(some) for some in spans], dtype=torch.int32),
    }
    save_file(tensors, path, {"key": key, "refused": json.dumps(samples.refused)})


def _load(path: Path, key: str) -> Samples | None:
    """None where there is no whole file of these dialogues."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("key") != key:
                return None
            names = ("tokens", "lengths", "spans", "span_counts")
            tokens, lengths, spans, counts = (file.get_tensor(name).tolist() for name in names)
    except (OSError, SafetensorError):
        return None
    whole = sum(lengths) == len(tokens) and 2 * sum(counts) == len(spans)
    if not whole or len(lengths) != len(counts) or "refused" not in metadata:
        return None
    samples, at, span_at = [], 0, 0
    for length, count in zip(lengths, counts, strict=True):
        ends = range(span_at, span_at + 2 * count, 2)
        ranges = tuple((spans[place], spans[place + 1]) for place in ends)
        samples.append(Sample(tuple(tokens[at : at + length]), ranges))
        at, span_at = at + length, span_at + 2 * count
    return Samples(samples, Counter(json.loads(metadata["refused"])))
