"""Training of chained prediction modules beside a target that is left as it is (arXiv 2412.19437).

Depth k (from 0) is run by module k mod M, on the state of depth k - 1 and the true token x_{t+k+1};
it is to say x_{t+k+2}::

    loss = mean over starts t of  sum_k share_k * loss(head(norm_f(y_k)), law of x_{t+k+2})
    share_k = depth_decay ** k / sum_j depth_decay ** j

With one module and several ``steps`` this is FastMTP's training of a module that reads its own
states. What a draft sees is what it will see at inference (``drafters/mtp.py``): the verified pairs
of its module, which lag by one for each module before it, and those of its own steps. Two sets of
states follow from that: those of verified text, on which later modules' verified pairs stand, and
the drafts'. With one step for each module, and at most two modules, both are the same.

``attention = "whole"`` is the papers' instead: each depth is causal over a sequence of its own,
which sees pairs that a draft at inference does not.

Modules whose block is a layer of transformers' are not trained here.

B texts, S tokens, N starts of a text, M modules, D depths, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forespeak.drafters.mtp import MtpModules
from forespeak.errors import OptionError, unknown_choice
from forespeak.formats.mtp_config import MtpConfig
from forespeak.train.attention import CausalAttention, DraftAttention, Rotations
from forespeak.train.laws import GuessLoss, LawSettings, depth_weights
from forespeak.train.objective import Batch, Loss, Objective, Start, TargetView
from forespeak.train.rows import DraftVocabulary, ahead, find_guesses
from forespeak.train.weights import Tensors, begin, load, pass_through

_MOST_STEPS = 16
ATTENTIONS = ("drafting", "whole")


@dataclass(frozen=True, kw_only=True)
class MtpTraining(LawSettings):
    """Settings of chained modules.

    Attributes:
        depth_decay: 0.6 as in FastMTP.
        steps: depths D; None is one for each module, and 3 for a single module.
        attention: one of ``ATTENTIONS``.
    """

    depth_decay: float = 0.6
    steps: int | None = None
    attention: str = "drafting"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is not None and not 1 <= self.steps <= _MOST_STEPS:
            raise OptionError(f"steps is {self.steps}; allowed: 1 to {_MOST_STEPS}.")
        if self.attention not in ATTENTIONS:
            raise OptionError(unknown_choice("Attention", self.attention, ATTENTIONS))


class MtpObjective(Objective):
    """See the top of the file."""

    network: MtpModules

    def __init__(
        self,
        config: MtpConfig,
        target: TargetView,
        settings: MtpTraining,
        network: MtpModules,
        token_ids: Tensor | None,
    ) -> None:
        assert config.layer is not None
        self.config, self.network, self.token_ids = config, network, token_ids
        self._settings, self._embedding, self._layer = settings, target.embedding, config.layer
        vocabulary = DraftVocabulary(token_ids, target.config.vocab_size, target.device)
        self._score = GuessLoss(target.head, vocabulary)
        self._rotations = Rotations(config.layer, target.device)
        self._steps = settings.steps or (3 if config.num_modules == 1 else config.num_modules)

    def loss(self, batch: Batch, generator: torch.Generator) -> Loss:
        assert batch.hidden is not None
        settings, count = self._settings, self._steps
        guesses = find_guesses(
            batch, count, generator=generator, max_positions=settings.max_positions
        )
        starts, slots = guesses.padded(len(batch.tokens))
        run = self._whole if settings.attention == "whole" else self._drafting
        outputs = run(batch.tokens, batch.hidden.float(), starts)  # [B, N, D, H], ready for a head
        picked = outputs.flatten(0, 1)[slots[guesses.start], guesses.depth]
        decay = settings.depth_decay
        weights = depth_weights(guesses, decay) / sum(decay**depth for depth in range(count))
        scored = self._score([(picked, self._score.head)], guesses, weights, batch, settings.mix)
        length = guesses.acceptance_length(scored.chances)
        return Loss(scored.total, scored.by_depth(guesses), length, float(len(guesses.places)))

    def _whole(self, tokens: Tensor, hidden: Tensor, starts: Tensor) -> Tensor:
        texts = torch.arange(len(tokens), device=tokens.device)[:, None]
        states, found = hidden, []
        for depth in range(self._steps):
            number = depth % self.config.num_modules
            raw = self._verified(number, tokens, states, depth, CausalAttention(self._layer))
            found.append(self.network.finish(raw[texts, starts], number))
            states = self.network.hand_on(raw, number)
        return torch.stack(found, 2)

    def _drafting(self, tokens: Tensor, hidden: Tensor, starts: Tensor) -> Tensor:
        network, count = self.network, self.config.num_modules
        texts = torch.arange(len(tokens), device=tokens.device)[:, None]
        states, drafts, found = hidden, list[DraftAttention](), []
        newest = hidden.new_zeros(0)
        for depth in range(self._steps):
            number = depth % count
            if depth < count:  # the module's verified pairs, the first time that it runs
                causal = CausalAttention(self._layer)
                raw = self._verified(number, tokens, states, depth, causal)
                states = network.hand_on(raw, number)
                drafts.append(
                    DraftAttention(self._layer, causal.kept, starts, lag=number, first=number)
                )
            if depth < min(2, count):
                # The start's own pair is verified, or stands where a verified one will.
                newest = raw[texts, starts]
                if depth:
                    keys, values = causal.kept[0]
                    drafts[depth].own[0] = [(keys[texts, starts], values[texts, starts])]
            else:
                newest = self._draft(number, depth, tokens, newest, starts, drafts[number])
            found.append(network.finish(newest, number))
            newest = network.hand_on(newest, number)
        return torch.stack(found, 2)

    def _verified(
        self, number: int, tokens: Tensor, states: Tensor, depth: int, attend: CausalAttention
    ) -> Tensor:
        """[B, S, H] raw outputs of a module over all pairs of a depth."""
        places = torch.arange(tokens.shape[1], device=tokens.device) + depth
        embedded = self._embed(ahead(tokens, depth + 1), places)
        raw: Tensor = self.network.module(number)(embedded, states, self._rotations(places), attend)
        return raw

    def _draft(
        self,
        number: int,
        depth: int,
        tokens: Tensor,
        states: Tensor,
        starts: Tensor,
        drafts: DraftAttention,
    ) -> Tensor:
        """[B, N, H] raw outputs of a module for drafts of a depth."""
        places = starts + depth
        texts = torch.arange(len(tokens), device=tokens.device)[:, None]
        after = tokens[texts, (places + 1).clamp(max=tokens.shape[1] - 1)]
        raw: Tensor = self.network.module(number)(
            self._embed(after, places), states, self._rotations(places), drafts.step(places)
        )
        return raw

    def _embed(self, tokens: Tensor, places: Tensor) -> Tensor:
        embedded = F.embedding(tokens, self._embedding).float()
        if self.config.zero_first_embedding:
            embedded = embedded * (places != 0)[..., None]
        return embedded


def make(
    config: MtpConfig, target: TargetView, settings: MtpTraining, start: Start
) -> MtpObjective:
    """The method's objective; see ``objective.make_objective``.

    Fresh modules hand on the state they read and add nothing to it yet, so that they say what the
    target says of the place before. The target's last layer would be a bad start: it reads and adds
    to states before the norm, which are an order of magnitude larger.

    Raises:
        OptionError: the modules' blocks are layers of transformers.
    """
    if config.layer is None:
        raise OptionError(
            f"The modules have blocks of {config.model_type} models, which run through "
            "transformers; trained are modules with a layer of the built-in families."
        )
    tensors, token_ids = begin("mtp", config, target, start)
    if settings.from_target and start.tensors is None:
        for module in range(config.num_modules):
            _hand_on_state(tensors, f"layers.{module}.", config, target)
    for name in [name for name in tensors if name.startswith(("embed_tokens.", "lm_head."))]:
        del tensors[name]  # copies of the target's
    network = MtpModules(config)
    load(network, tensors, target)
    return MtpObjective(config, target, settings, network, token_ids)


def _hand_on_state(tensors: Tensors, prefix: str, config: MtpConfig, target: TargetView) -> None:
    first = 0 if config.hidden_first else config.hidden_size
    name = f"{prefix}input_proj.weight"
    tensors[name] = pass_through(tensors[name], first)
    for name in ("block.self_attn.o_proj.weight", "block.mlp.down_proj.weight"):
        tensors[prefix + name] = torch.zeros_like(tensors[prefix + name])
    # The state has about the size of the final norm's weight, and is normed before and after.
    size = float(target.norm.float().pow(2).mean().sqrt()) - float(config.unit_offset)
    name = f"{prefix}final_layernorm.weight"
    tensors[name] = torch.full_like(tensors[name], size)
