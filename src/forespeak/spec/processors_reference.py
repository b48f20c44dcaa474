"""The slow, obvious form of ``processors``: one node, its whole history, one line a rule.

It shares no code with the fast form and is what the tests compare that with. Logits are [V].
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from forespeak.sampling import SamplingParams


def reference_law(
    controls: SamplingParams,
    logits: Tensor,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    eos_ids: Sequence[int],
    bad_word_ids: Sequence[Sequence[int]] = (),
    allowed: Collection[int] | None = None,
) -> Tensor:
    """The law [V] of the token after ``output_ids`` (committed output, then the node's path)."""
    scores = [float(x) for x in logits]
    _mask(scores, controls, output_ids, eos_ids, bad_word_ids, allowed)
    for token, bias in controls.logit_bias.items():
        scores[token] += bias
    _penalise(scores, controls, prompt_ids, output_ids)
    best = max(range(len(scores)), key=lambda i: (scores[i], -i))
    if controls.temperature == 0:
        return torch.tensor([float(i == best) for i in range(len(scores))]).to(logits)
    law = _normalised([math.exp((x - scores[best]) / controls.temperature) for x in scores])
    for keep in (_min_p, _top_k, _top_p, _typical_p):
        kept = keep(controls, law)
        law = _normalised([p if i in kept else 0.0 for i, p in enumerate(law)])
    return torch.tensor(law, dtype=torch.float64).to(logits)


def _mask(
    scores: list[float],
    controls: SamplingParams,
    output_ids: Sequence[int],
    eos_ids: Sequence[int],
    bad_word_ids: Sequence[Sequence[int]],
    allowed: Collection[int] | None,
) -> None:
    for i in range(len(scores)):
        ends = i in eos_ids or i in controls.stop_token_ids
        if (
            (allowed is not None and i not in allowed)
            or (controls.allowed_token_ids is not None and i not in controls.allowed_token_ids)
            or any(_completes(word, [*output_ids, i]) for word in bad_word_ids)
            or (ends and len(output_ids) < controls.min_tokens)
        ):
            scores[i] = -math.inf
    if all(x == -math.inf for x in scores):
        scores[eos_ids[0]] = 0.0


def _completes(word: Sequence[int], text: Sequence[int]) -> bool:
    return list(text[len(text) - len(word) :]) == list(word) if len(word) <= len(text) else False


def _penalise(
    scores: list[float],
    controls: SamplingParams,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> None:
    for i in {*prompt_ids, *output_ids}:
        r = controls.repetition_penalty
        scores[i] = scores[i] / r if scores[i] > 0 else scores[i] * r
    for i in set(output_ids):
        scores[i] -= controls.frequency_penalty * list(output_ids).count(i)
        scores[i] -= controls.presence_penalty


def _normalised(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


def _min_p(controls: SamplingParams, law: list[float]) -> set[int]:
    return {i for i, p in enumerate(law) if p >= controls.min_p * max(law) * (1 - 1e-14)}


def _top_k(controls: SamplingParams, law: list[float]) -> set[int]:
    if controls.top_k == 0:
        return set(range(len(law)))
    limit = sorted(law, reverse=True)[: controls.top_k][-1]
    return {i for i, p in enumerate(law) if p >= limit}


def _top_p(controls: SamplingParams, law: list[float]) -> set[int]:
    kept: set[int] = set()
    for i in sorted(range(len(law)), key=lambda i: (-law[i], i)):
        if controls.top_p < 1 and math.fsum(law[j] for j in kept) >= controls.top_p:
            break
        kept.add(i)
    return kept


def _typical_p(controls: SamplingParams, law: list[float]) -> set[int]:
    entropy = -math.fsum(p * math.log(p) for p in law if p > 0)
    possible = [i for i, p in enumerate(law) if p > 0]
    distance = {i: abs(-math.log(law[i]) - entropy) for i in possible}
    kept: set[int] = set()
    limit = math.inf
    for i in sorted(possible, key=lambda i: distance[i]):
        if controls.typical_p < 1 and math.fsum(law[j] for j in kept) >= controls.typical_p:
            break
        kept.add(i)
        limit = distance[i]
    return {i for i in possible if distance[i] <= limit}
