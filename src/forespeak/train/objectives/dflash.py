"""Training of DFlash's block (arXiv 2602.06036).

Of each text ``num_anchors`` tokens are drawn as roots, anew each time; the block below each is
trained to fill its places, all at once (``blocks.py``)::

    loss = sum over blocks and depths k of  w_k * loss(law_k, law of x_{anchor+k+1})  /  sum of w_k
    w_k  = exp(-k / position_decay)

A depth counts as long as its token and all before it in the block are answer. Both label
conventions come to the same sum: depth k is row k where each row says the token after its place
(``sample_from_anchor``), and row k + 1 where each fills its own, row 0 then saying nothing.

What differs from the paper: its labels are the tokens of the text (``hard``), here the target's law
by default. Embedding and head are the target's and frozen, as there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.drafters.dflash import DFlashNetwork
from forespeak.errors import OptionError
from forespeak.formats.dflash_config import EMBED, EMBEDDING_OUTPUT, HEAD, DFlashConfig
from forespeak.train.attention import Rotations
from forespeak.train.blocks import run_blocks
from forespeak.train.laws import GuessLoss, LawSettings, Scored
from forespeak.train.losses import Product
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, Guesses, find_guesses
from forespeak.train.weights import begin, copied, copy_layer, last_layers, load, pass_through

_DECAYS = ((16, 7.0), (10, 5.0))
"""Position decays of the paper, from this block size on; 4 for smaller blocks."""


@dataclass(frozen=True, kw_only=True)
class BlockSettings(LawSettings):
    """Settings of block drafters.

    Attributes:
        num_anchors: blocks drawn from each text.
        position_decay: of the weights of depths; None follows the block size as in the paper.
        depth_decay, max_positions: have no meaning for blocks and must be left out.
    """

    num_anchors: int = 512
    position_decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_anchors < 1:
            raise OptionError(f"num_anchors is {self.num_anchors}; allowed: 1 or more.")
        if self.position_decay is not None and not self.position_decay > 0:
            raise OptionError(f"position_decay is {self.position_decay}; allowed: above 0.")
        if self.max_positions is not None or self.depth_decay != LawSettings.depth_decay:
            raise OptionError(
                "Blocks are drawn by num_anchors and weighed by position_decay; leave "
                "max_positions and depth_decay out."
            )


@dataclass(frozen=True, kw_only=True)
class DFlashTraining(BlockSettings):
    """Settings of DFlash."""


@dataclass(frozen=True)
class Blocks:
    """Blocks that have been run.

    Attributes:
        states: [B, A, W, H] after the last norm.
        previous: [B, A, W] int64, the true token before each row's law.
        slots: [N] place of each start in [B * A].
    """

    states: Tensor
    previous: Tensor
    slots: Tensor


class BlockObjective(Objective):
    """What DFlash and DSpark share; see the top of the file."""

    network: DFlashNetwork

    def __init__(
        self,
        config: DFlashConfig,
        target: TargetView,
        settings: BlockSettings,
        network: DFlashNetwork,
        token_ids: Tensor | None,
    ) -> None:
        self.config, self.network, self.token_ids = config, network, token_ids
        self.taps = config.taps
        self._settings, self._embedding = settings, target.embedding
        vocabulary = DraftVocabulary(token_ids, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, vocabulary)
        self._rotations = Rotations(config.layers, target.device)
        self._shift = 0 if config.sample_from_anchor else 1

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        return self.loss_of(batch, self.draw(batch, generator))

    def draw(self, batch: Batch, generator: torch.Generator) -> Guesses:
        """Blocks at random roots of each text."""
        every = find_guesses(batch, self.config.max_depth)
        return _drawn(every, self._settings.num_anchors, generator)

    def loss_of(self, batch: Batch, guesses: Guesses) -> Loss:
        """The loss of given blocks, whose roots are the tokens after the starts."""
        blocks = self._run(batch, guesses)
        shares = torch.exp(-guesses.depth.float() / self._decay)
        weight = float(shares.sum())
        weights = shares / max(weight, 1e-6)
        at = blocks.slots[guesses.start], guesses.depth + self._shift
        states = blocks.states.flatten(0, 1)[at]  # [n, H]
        products = [(states, self._score.head), *self._corrections(blocks, at)]
        scored = self._score(products, guesses, weights, batch, self._settings.mix)
        more, parts = self._further(blocks, at, scored, weights)
        parts = scored.by_depth(guesses) | parts
        length = guesses.acceptance_length(scored.chances)
        return Loss(scored.total + more, parts, length, weight)

    @property
    def _decay(self) -> float:
        given = self._settings.position_decay
        if given is not None:
            return given
        return next((d for size, d in _DECAYS if self.config.block_size >= size), 4.0)

    def _corrections(self, blocks: Blocks, at: tuple[Tensor, Tensor]) -> list[Product]:
        """What heads add to the logits of the guesses at (block, row)."""
        return []

    def _further(
        self, blocks: Blocks, at: tuple[Tensor, Tensor], scored: Scored, weights: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Losses besides those of the laws, and their parts."""
        return scored.total.new_zeros(()), {}

    def _run(self, batch: Batch, guesses: Guesses) -> Blocks:
        config = self.config
        starts, slots = guesses.padded(len(batch.tokens))
        # A place without a block is one at 0, which sees nothing and counts nowhere.
        used = torch.zeros(starts.numel(), dtype=torch.bool, device=starts.device)
        used[slots] = True
        anchors = torch.where(used.view_as(starts), starts + 1, 0)
        texts = torch.arange(len(anchors), device=anchors.device)[:, None]
        ids = torch.full((*anchors.shape, config.block_size), config.mask_token_id)
        ids = ids.to(anchors.device)
        ids[..., 0] = batch.tokens[texts, anchors]
        embedded = F.embedding(ids, self._embedding).float()
        states = run_blocks(self.network, self._rotations, self._features(batch), embedded, anchors)
        rows = torch.arange(config.block_size, device=anchors.device)
        before = anchors[..., None] + (rows - self._shift).clamp(min=0)
        before = before.clamp(max=batch.tokens.shape[1] - 1)
        previous = batch.tokens[texts[..., None], before]
        return Blocks(states, previous, slots)

    def _features(self, batch: Batch) -> Tensor:
        """[B, S, K * H]"""
        parts = [] if batch.taps is None else [batch.taps.float()]
        if self.config.target_layer_ids[0] == EMBEDDING_OUTPUT:
            embedded = F.embedding(batch.tokens, self._embedding).float()
            parts.insert(0, embedded[:, :, None])
        return torch.cat(parts, 2).flatten(2)


class DFlashObjective(BlockObjective):
    """See the top of the file."""


def _drawn(every: Guesses, most: int, generator: torch.Generator) -> Guesses:
    """The guesses below up to ``most`` starts of each text."""
    order = torch.randperm(len(every.texts), generator=generator).to(every.texts.device)
    texts = every.texts[order]
    # In a random order, the number of a start among those of its text.
    grouped = texts.argsort(stable=True)
    counts = torch.bincount(texts)
    first = (counts.cumsum(0) - counts)[texts[grouped]]
    number = torch.arange(len(texts), device=texts.device) - first
    chosen = order[grouped[number < most]].sort().values
    kept = torch.full((len(every.texts),), -1, device=texts.device)
    kept[chosen] = torch.arange(len(chosen), device=texts.device)
    start = kept[every.start]
    inside = start >= 0
    return Guesses(
        every.texts[chosen], every.places[chosen], start[inside], every.depth[inside],
        every.num_tokens, every.num_depths,
    )  # fmt: skip


def make(
    config: DFlashConfig, target: TargetView, settings: DFlashTraining, start: Start
) -> DFlashObjective:
    """The method's objective; see ``objective.make_objective``.

    Raises:
        DrafterError: the target lacks the layers that the drafter reads.
        OptionError: the config has heads, which DFlash does not train.
    """
    if config.has_heads:
        raise OptionError(
            "The drafter has a sequential or confidence head, which is DSpark's; train it as "
            "dspark, or set markov_rank to 0 and confidence_head to false."
        )
    network = DFlashNetwork(config)
    token_ids = begin_block(network, "dflash", target, settings, start)
    return DFlashObjective(config, target, settings, network, token_ids)


def begin_block(
    network: DFlashNetwork, method: str, target: TargetView, settings: LawSettings, start: Start
) -> Tensor | None:
    """Puts the weights that training begins from into a network; its draft vocabulary.

    Fresh layers start from the target's last ones, which read the last tapped layer.

    Raises:
        DrafterError: the target lacks the layers that the drafter reads.
        OptionError: the draft vocabulary does not fit.
    """
    config = network.config
    config.check_target(target.config)
    tensors, token_ids = begin(method, config, target, start)
    for copy in (EMBED, HEAD):  # training takes the target's
        tensors.pop(copy, None)
    if settings.from_target and start.tensors is None:
        first = (len(config.target_layer_ids) - 1) * config.hidden_size
        tensors["fc.weight"] = pass_through(tensors["fc.weight"], first)
        tensors["norm.weight"] = copied(target.norm)
        layers = last_layers(target, config.layers.num_layers)
        for at, layer in enumerate(layers):
            copy_layer(tensors, f"layers.{at}.", layer)
        if layers:
            tensors["hidden_norm.weight"] = copied(layers[0]["input_layernorm.weight"])
    load(network, tensors, target)
    return token_ids
