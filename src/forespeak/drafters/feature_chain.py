"""FeatureChain: drafters that continue the target's features token by token (EAGLE, MTP).

Such a drafter eats pairs of a state and the token after it, and gives the law of the token after
that::

    text       x_0   x_1   x_2   x_3 = root
    state      f_0   f_1   f_2                      of the target, true
    pair       (f_0, x_1)  (f_1, x_2)  (f_2, x_3)   at positions 0, 1, 2: verified, committed
    law of           x_2         x_3         x_4    the last one is what propose gives
    node d_1   (g, d_1)    at position 3            g: what the drafter made of (f_2, x_3)

Pairs of verified text are committed to the drafter's cache with the target's true states (law 7);
pairs of tree nodes, whose states the drafter made up itself, are pending and dropped when the round
is over.

With several modules in a chain, module m takes the states that module m - 1 made of verified text,
so its pairs lag by one token each: pair i of module m holds token i + m + 1 and stands one position
before it. Nodes at depth d are run by module d mod M. A module sees the committed pairs of its own
and those ancestors of a node that it ran itself (the M-th above it, the 2M-th, ...).

T tokens of a call, H hidden size, F width of features, M modules, Vd draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forespeak.drafters.base import Drafter
from forespeak.drafters.layer_cache import LayerCache
from forespeak.drafters.pending import PendingNodes
from forespeak.models.base import Cache
from forespeak.models.blocks import Attend, Rotation
from forespeak.types import DenseLaws, DrafterInfo, Frontier, Observation, Segment

_CHUNK = 512  # pairs that go through a module at a time


class ChainModule(ABC):
    """One module with its own cache."""

    cache: Cache

    @abstractmethod
    def run(
        self, embedded: Tensor, states: Tensor, positions: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        """Run pairs and append them to the cache as pending.

        Args:
            embedded: [T, H] embeddings of the tokens.
            states: [T, H] states before them.
            positions: [T] int64.
            segments: whose they are and what they see.

        Returns:
            [T, H] outputs.
        """


LayersForward = Callable[[Tensor, Tensor, Rotation, Attend], Tensor]
"""(embedded [T, H], states [T, H], rotation, attend) -> outputs [T, H]."""


class LayersModule(ChainModule):
    """A module whose keys and values a :class:`LayerCache` holds.

    Args:
        forward: the module's layers.
        cache: for these layers.
    """

    def __init__(self, forward: LayersForward, cache: LayerCache) -> None:
        self._forward, self._layers = forward, cache
        self.cache = cache.rows

    def run(
        self, embedded: Tensor, states: Tensor, positions: Tensor, segments: Sequence[Segment]
    ) -> Tensor:
        rotation = self._layers.rotation(positions)
        return self._forward(embedded, states, rotation, self._layers.append(segments, positions))


class ChainNetwork(ABC):
    """What sets one method apart from another."""

    token_ids: Tensor | None
    """[Vd] target ids of the draft vocabulary, None when it is the target's."""

    @abstractmethod
    def enter(self, observation: Observation) -> Tensor:
        """States [n, H] that verified tokens enter with, from the target's features."""

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [T, H] of tokens [T] at positions [T] of their pairs."""

    @abstractmethod
    def hand_on(self, outputs: Tensor, module: int) -> Tensor:
        """States [T, H] that the outputs [T, H] of a module become for the next step."""

    @abstractmethod
    def logits(self, outputs: Tensor, module: int) -> Tensor:
        """Logits [T, Vd] float32 of the outputs [T, H] of a module."""


@dataclass
class _Queue:
    """Pairs that wait for a module, and the last state, whose token is not known yet."""

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    last: Tensor | None = None

    def push(self, tokens: Sequence[int], states: Tensor) -> None:
        """Take tokens [n] and the states [n, H] at them; each state waits for the token after."""
        if self.last is not None:
            self.tokens.append(tokens[0])
            self.states.append(self.last)
        self.tokens += tokens[1:]
        self.states.append(states[:-1])
        self.last = states[-1:]

    def take(self, most: int) -> tuple[list[int], Tensor]:
        """Up to ``most`` of the pairs that wait: tokens [n] and states [n, H]."""
        tokens, states = self.tokens[:most], torch.cat(self.states)
        self.tokens, self.states = self.tokens[most:], [states[most:]]
        return tokens, states[:most]


@dataclass
class _Row:
    """Pairs on their way, and the nodes of this round.

    ``paths`` holds the nodes from the root (0) to each node, both included; ``states`` what the
    pairs of its children enter with.
    """

    queues: list[_Queue]
    pending: list[PendingNodes]
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    states: dict[int, Tensor] = field(default_factory=dict)

    def ancestor(self, node: int, above: int) -> int:
        """The node so many steps above; the root where there are none that far."""
        path = self.paths[node]
        return path[-1 - above] if above < len(path) else 0


class FeatureChain(Drafter):
    """A drafter of the kind described above.

    Args:
        info: what it says of itself.
        network: the method.
        modules: M of them, in the order of the chain.
    """

    def __init__(
        self, info: DrafterInfo, network: ChainNetwork, modules: Sequence[ChainModule]
    ) -> None:
        self.info = info
        self._network = network
        self._modules = tuple(modules)
        self._rows: dict[int, _Row] = {}

    def admit(self, row: int) -> None:
        assert row not in self._rows, row
        count = len(self._modules)
        self._rows[row] = _Row(
            [_Queue() for _ in range(count)], [PendingNodes() for _ in range(count)]
        )

    def release(self, row: int) -> None:
        if self._rows.pop(row, None) is not None:
            for module in self._modules:
                module.cache.release(row)

    @torch.inference_mode()
    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            row = self._rows[observation.row]
            self._drop_nodes(observation.row)
            row.queues[0].push(observation.tokens, self._network.enter(observation))
            for number in range(len(self._modules)):
                while len(row.queues[number].tokens) > _CHUNK:
                    self._commit(number, [observation.row], _CHUNK)

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], roots: Sequence[int], depth: int) -> DenseLaws:
        for number, root in zip(rows, roots, strict=True):
            row = self._rows[number]
            queue = row.queues[0]
            assert queue.last is not None, "propose needs an observation since the last propose"
            queue.tokens.append(root)
            queue.states.append(queue.last)
            queue.last = None
            row.paths[0] = (0,)
        outputs = self._commit(0, rows, _CHUNK + 2)
        ends = torch.cat([output[-1:] for output in outputs])  # [R, H]
        for number, state in zip(rows, self._network.hand_on(ends, 0), strict=True):
            self._rows[number].states[0] = state
        return self._laws(ends, 0)

    @torch.inference_mode()
    def expand(self, frontiers: Sequence[Frontier]) -> DenseLaws:
        depth, count = self._note_paths(frontiers), len(self._modules)
        number = depth % count
        for earlier in range(1, number + 1):
            self._catch_up(earlier, [frontier.row for frontier in frontiers])
        tokens: list[int] = []
        positions: list[int] = []
        states, segments = [], []
        for frontier in frontiers:
            row = self._rows[frontier.row]
            above = [row.ancestor(node, count) for node in frontier.nodes]
            mask = row.pending[number].add(frontier.nodes, above)
            tokens += frontier.tokens
            states += [row.states[parent] for parent in frontier.parents]
            # Of module 0 all verified pairs are committed: the root's stands at their number - 1.
            position = self._modules[0].cache.lengths[frontier.row] - 1 + depth
            positions += [position] * len(frontier.nodes)
            segments.append(Segment(frontier.row, len(frontier.nodes), mask))
        outputs = self._run(number, tokens, torch.stack(states), positions, segments)
        handed, at = self._network.hand_on(outputs, number), 0
        for frontier in frontiers:
            for node in frontier.nodes:
                self._rows[frontier.row].states[node] = handed[at]
                at += 1
        return self._laws(outputs, number)

    def _note_paths(self, frontiers: Sequence[Frontier]) -> int:
        """Remember where the nodes hang; their depth, which they all share."""
        lengths = set()
        for frontier in frontiers:
            paths = self._rows[frontier.row].paths
            for node, parent in zip(frontier.nodes, frontier.parents, strict=True):
                paths[node] = (*paths[parent], node)
                lengths.add(len(paths[node]))
        assert len(lengths) == 1, f"nodes of one depth expected, got {frontiers}"
        return lengths.pop() - 1

    def _catch_up(self, number: int, rows: Sequence[int]) -> None:
        """Commit all pairs that wait for a module."""
        while waiting := [row for row in rows if self._rows[row].queues[number].tokens]:
            self._commit(number, waiting, _CHUNK)

    def _commit(self, number: int, rows: Sequence[int], most: int) -> list[Tensor]:
        """Run up to ``most`` waiting pairs of each row through a module, for good.

        Returns:
            [n, H] outputs of each row; the next module's queue has got them too.
        """
        module = self._modules[number]
        tokens: list[int] = []
        positions: list[int] = []
        states, segments = [], []
        for index in rows:
            taken, before = self._rows[index].queues[number].take(most)
            start = module.cache.lengths[index] + number  # the cache of module m begins there
            positions += range(start, start + len(taken))
            tokens += taken
            states.append(before)
            segments.append(Segment(index, len(taken)))
        outputs = self._run(number, tokens, torch.cat(states), positions, segments)
        parts = list(torch.split(outputs, [segment.num_tokens for segment in segments]))
        at = 0
        for index, part in zip(rows, parts, strict=True):
            module.cache.commit_all(index)
            if number + 1 < len(self._modules):
                handed = self._network.hand_on(part, number)
                queue = self._rows[index].queues[number + 1]
                queue.push(tokens[at : at + len(part)], handed)
            at += len(part)
        return parts

    def _run(
        self,
        number: int,
        tokens: Sequence[int],
        states: Tensor,
        positions: Sequence[int],
        segments: Sequence[Segment],
    ) -> Tensor:
        places = torch.tensor(positions)
        embedded = self._network.embed(torch.tensor(tokens), places)
        return self._modules[number].run(embedded, states, places, segments)

    def _laws(self, outputs: Tensor, number: int) -> DenseLaws:
        logits = self._network.logits(outputs, number)
        return DenseLaws(logits[:, None], self._network.token_ids)

    def _drop_nodes(self, number: int) -> None:
        row = self._rows[number]
        for module, pending in zip(self._modules, row.pending, strict=True):
            if pending.numbers:
                module.cache.commit(number, [])
                pending.clear()
        row.paths, row.states = {}, {}
