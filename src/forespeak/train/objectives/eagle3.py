"""Training of EAGLE-3 with its training-time test (arXiv 2503.01840).

The drafter is unrolled over its own states for ``steps`` steps (``chain.py``), all of them fed the
true tokens; step k at start t is to say x_{t+k+2}::

    loss = mean over starts t of  sum_k depth_decay ** k * loss(law_k, law of x_{t+k+2})
    law_k = softmax(lm_head(norm(out_k)))

The target's law is that of the draft vocabulary, renormalised; a guess whose true token is outside
is left out.

What differs from the official trainer, which ``official`` gives: its mask is that of token t + k
while x_{t+k+2} is predicted; its mean is over all positions, padding included; a guess counts when
the target's best token is in the draft vocabulary, for which it needs the target's whole head;
shifted tokens and laws end in zeros, and laws at padding are taken as they are.
``official_rope`` gives the rotary base 10000 whatever the config says, which its inference does
not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forespeak.drafters.eagle3 import Eagle3Network
from forespeak.errors import OptionError
from forespeak.formats.eagle3_config import EMBEDDING_OUTPUT, HEAD, Eagle3Config
from forespeak.train.chain import Unroll
from forespeak.train.laws import GuessLoss, LawSettings, depth_weights
from forespeak.train.losses import SOFT, Mix
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, Guesses, ahead, find_guesses
from forespeak.train.weights import (
    Tensors,
    begin,
    copied,
    copy_layer,
    last_layers,
    load,
    pass_through,
)

_MOST_STEPS = 16
_OFFICIAL_BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class Eagle3Training(LawSettings):
    """Settings of EAGLE-3.

    Attributes:
        steps: of the training-time test, 1 for plain teacher forcing.
        noise: features get uniform noise up to this.
        official: the official trainer's mask, mean and ends, which soft, hard, l1 and max_positions
            must then be left out for.
        official_rope: rotary base 10000 in training.
    """

    steps: int = 3
    noise: float = 0.0
    official: bool = False
    official_rope: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.steps <= _MOST_STEPS:
            raise OptionError(f"steps is {self.steps}; allowed: 1 to {_MOST_STEPS}.")
        if self.noise < 0:
            raise OptionError(f"noise is {self.noise}; allowed: 0 or more.")
        if self.official:
            self.check_official()


class Eagle3Objective(Objective):
    """See the top of the file."""

    def __init__(
        self,
        config: Eagle3Config,
        target: TargetView,
        settings: Eagle3Training,
        network: Eagle3Network,
        token_ids: Tensor | None,
    ) -> None:
        self.config, self.network, self.token_ids = config, network, token_ids
        self._settings, self._target = settings, target
        ids = config.layers_of(target.config.num_layers)
        self.taps = tuple(i for i in ids if i != EMBEDDING_OUTPUT)
        self._reads_embedding = len(self.taps) < len(ids)
        self._vocabulary = DraftVocabulary(token_ids, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, self._vocabulary)
        layers = config.layers
        if settings.official_rope:
            base = dict(layers.rope_parameters) | {"rope_theta": _OFFICIAL_BASE}
            layers = replace(layers, rope_parameters=base)
        self._unroll = Unroll(layers, target.embedding, network, network.hand_on)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        assert batch.hidden is not None
        settings = self._settings
        if settings.official:
            return self._official(batch)
        guesses = find_guesses(
            batch, settings.steps, generator=generator, max_positions=settings.max_positions
        )
        starts, slots = guesses.padded(len(batch.tokens))
        states = self._fuse(batch, generator)
        outputs = self._unroll(batch.tokens, states, starts, settings.steps)
        picked = self._norm(outputs.flatten(0, 1)[slots[guesses.start], guesses.depth])
        weights = depth_weights(guesses, settings.depth_decay)
        scored = self._score([(picked, self._head())], guesses, weights, batch, settings.mix)
        length = guesses.acceptance_length(scored.chances)
        return Loss(scored.total, scored.by_depth(guesses), length, float(len(guesses.places)))

    def _fuse(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """[B, S, H]"""
        parts = [] if batch.taps is None else [batch.taps.float()]
        if self._reads_embedding:
            embedded = F.embedding(batch.tokens, self._target.embedding).float()
            parts.insert(0, embedded[:, :, None])
        features = torch.cat(parts, 2)
        if self._settings.noise:
            drawn = torch.rand(features.shape, generator=generator).to(features.device)
            features = features + (2 * drawn - 1) * self._settings.noise
        network = self.network
        assert isinstance(network, Eagle3Network)
        return network.fuse(features)

    def _norm(self, states: Tensor) -> Tensor:
        network = self.network
        assert isinstance(network, Eagle3Network)
        normed: Tensor = network.norm(states)
        return normed

    def _head(self) -> Tensor:
        """[Vd, H] the drafter's, or the target's."""
        head = self.network.lm_head
        return self._score.head if head is None else _weight(head)

    def _official(self, batch: Batch) -> Loss:
        """The official trainer's sum: every place of every text is a start."""
        steps, (count, size) = self._settings.steps, batch.tokens.shape
        assert batch.hidden is not None
        everything = torch.arange(size, device=batch.tokens.device).expand(count, size)
        room = steps + 2
        wide = Batch(
            F.pad(batch.tokens, (0, room)), F.pad(batch.supervised, (0, room)), batch.lengths,
            F.pad(batch.hidden, (0, 0, 0, room)), batch.taps,
        )  # fmt: skip
        outputs = self._unroll(batch.tokens, self._fuse(batch, _unused()), everything, steps)
        flat = torch.arange(count * size, device=batch.tokens.device)
        every = Guesses(
            flat // size, flat % size, flat.repeat_interleave(steps),
            torch.arange(steps, device=flat.device).repeat(len(flat)), size + room, steps,
        )  # fmt: skip
        counted = torch.stack([ahead(batch.supervised, k) for k in range(steps)], -1).flatten()
        best = self._best(wide).flatten()[every.law_index]
        counted = counted & (self._vocabulary.draft_ids(best) >= 0)
        weights = self._settings.depth_decay ** every.depth.float() * counted / (count * size)
        picked = self._norm(outputs.flatten(0, 2))
        scored = self._score(
            [(picked, self._head())], every, weights, wide, Mix(soft=1.0), all_words=True
        )
        losses = (scored.numbers[:, SOFT] * counted).view(-1, steps).sum(0) / (count * size)
        parts = {f"step_{k + 1}": value for k, value in enumerate(losses.tolist())}
        chances = scored.chances * counted
        return Loss(scored.total, parts, every.acceptance_length(chances), float(count * size))

    def _best(self, batch: Batch) -> Tensor:
        """[B, S] the target's best token over the whole vocabulary."""
        assert batch.hidden is not None
        head = self._target.head
        return torch.stack([(text.to(head.dtype) @ head.T).argmax(-1) for text in batch.hidden])


def _weight(module: nn.Module | Tensor) -> Tensor:
    assert isinstance(module, nn.Linear)
    return module.weight


def _unused() -> torch.Generator:
    return torch.Generator()


def make(
    config: Eagle3Config, target: TargetView, settings: Eagle3Training, start: Start
) -> Eagle3Objective:
    """The method's objective; see ``objective.make_objective``.

    Raises:
        DrafterError: the target lacks the layers that the drafter reads.
        OptionError: the drafter has an embedding of its own, of another width than the target's.
    """
    config.check_target(target.config)
    if config.own_embedding:
        raise OptionError(
            f"The drafter has hidden size {config.layers.hidden_size} and the target "
            f"{config.feature_size}; training takes the target's embedding, so both must be equal."
        )
    tensors, token_ids = begin("eagle3", config, target, start)
    if settings.from_target and start.tensors is None:
        _from_target(tensors, config, target, token_ids)
    network = Eagle3Network(config)
    load(network, tensors, target)
    return Eagle3Objective(config, target, settings, network, token_ids)


def _from_target(
    tensors: Tensors, config: Eagle3Config, target: TargetView, token_ids: Tensor | None
) -> None:
    """The target's last layers on the highest tap, its norm and its head."""
    hidden = config.layers.hidden_size
    vocabulary = DraftVocabulary(token_ids, target.config.vocab_size, target.device)
    if config.own_head:
        tensors[HEAD] = copied(vocabulary.rows_of(target.head))
    tensors["norm.weight"] = copied(target.norm)
    tensors["fc.weight"] = pass_through(tensors["fc.weight"], (config.num_features - 1) * hidden)
    for at, layer in enumerate(last_layers(target, config.layers.num_layers)):
        copy_layer(tensors, f"layers.{at}.", layer)
        if at:
            continue
        for part in "qkv":  # these read [embedding, state]: the state's half is the target's
            name = f"layers.0.self_attn.{part}_proj.weight"
            whole, half = tensors[name], layer[f"self_attn.{part}_proj.weight"]
            if half.shape == (len(whole), hidden):
                tensors[name] = torch.cat([whole[:, :hidden], copied(half)], 1)
        tensors["layers.0.hidden_norm.weight"] = copied(layer["input_layernorm.weight"])
        tensors["layers.0.input_layernorm.weight"] = torch.ones(hidden)
