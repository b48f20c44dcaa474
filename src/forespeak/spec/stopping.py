"""Where a text ends: end-of-sequence, stop tokens, stop strings and the length limit.

A round yields a block of tokens and any of them may be the last, so a block is read token by token
and cut. What decides is the same as in plain decoding, one token at a time:

1. end-of-sequence (unless ignored), then stop token ids: the token is kept, its text is not;
2. stop strings, found in the text as decoded, whatever the borders of tokens and rounds; the token
   that completes one is kept, the text ends before the string;
3. the length limit.

Text that may be the beginning of a stop string is held back until that is settled. Work per
character and stop string is constant (Knuth, Morris, Pratt).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forespeak.sampling import SamplingParams
from forespeak.types import FinishReason


class Decoder(Protocol):
    """Turns ids into text one by one."""

    def push(self, token_id: int) -> str:
        """Text that this token completes; empty while a character is unfinished."""


@dataclass(frozen=True)
class KeptBlock:
    """What is left of a round's tokens.

    Attributes:
        num_kept: tokens that belong to the output, counted from the block's start.
        text: new text that nothing can take back, ready to be sent.
        finish_reason: None while the text goes on.
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence and
            for the length limit.
    """

    num_kept: int
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Stopper:
    """Watches one text. ``decoder`` sees each kept token once, in order.

    With ``min_tokens`` a stop string counts only when its last character comes with a later token.
    End-of-sequence and stop tokens always end the text: the masks keep them away before that.
    """

    def __init__(
        self, controls: SamplingParams, *, eos_ids: Iterable[int], decoder: Decoder
    ) -> None:
        self._controls = controls
        self._eos_ids = frozenset() if controls.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(controls.stop_token_ids)
        self._decoder = decoder
        self._finders = [_Finder(stop) for stop in dict.fromkeys(controls.stop)]
        self._held = ""  # may be the beginning of a stop string
        self._num_tokens = 0
        self._is_finished = False

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end the text: end-of-sequence unless ignored, and stop tokens."""
        return self._eos_ids | self._stop_ids

    @property
    def num_tokens(self) -> int:
        """Kept tokens so far."""
        return self._num_tokens

    @property
    def num_left(self) -> int:
        """Tokens that the length limit still allows; no tree need be deeper."""
        return self._controls.max_new_tokens - self._num_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the text has ended."""
        return self._is_finished

    def push(self, tokens: Sequence[int]) -> KeptBlock:
        """Read a round's tokens (accepted and bonus) up to the end of the text."""
        assert not self._is_finished, "tokens after the end of the text"
        sent: list[str] = []
        for number, token in enumerate(tokens, start=1):
            text, finish_reason, stop_reason = self._read(token)
            sent.append(text)
            if finish_reason is not None:
                self._is_finished = True
                return KeptBlock(number, "".join(sent), finish_reason, stop_reason)
        return KeptBlock(len(tokens), "".join(sent))

    def _read(self, token: int) -> tuple[str, FinishReason | None, str | int | None]:
        self._num_tokens += 1
        if token in self._eos_ids:
            return self._release(), "stop", None
        if token in self._stop_ids:
            tail = self._decoder.push(token) if self._controls.include_stop_str else ""
            return self._release() + tail, "stop", token
        piece = self._decoder.push(token)
        found = self._find(piece) if self._finders else None
        self._held += piece
        if found is not None:
            stop, unread = found
            end = len(self._held) - unread
            cut = end if self._controls.include_stop_str else end - len(stop)
            return self._held[:cut], "stop", stop
        if self._num_tokens == self._controls.max_new_tokens:
            return self._release(), "length", None
        return self._release(max((f.num_matched for f in self._finders), default=0)), None, None

    def _release(self, num_held: int = 0) -> str:
        border = len(self._held) - num_held
        text, self._held = self._held[:border], self._held[border:]
        return text

    def _find(self, piece: str) -> tuple[str, int] | None:
        """The stop string that ends first in this piece, of those the longest, and how many
        characters follow it."""
        counts = self._num_tokens > self._controls.min_tokens
        for place, character in enumerate(piece, start=1):
            ended = [f.stop for f in self._finders if f.push(character)]
            if ended and counts:
                return max(ended, key=len), len(piece) - place
        return None


class _Finder:
    """Looks for one string in a stream of characters.

    ``num_matched`` is the length of the longest end of the stream that begins the string.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._shorter = [0] * (len(stop) + 1)  # next shorter beginning that ends the same way
        length = 0
        for place in range(1, len(stop)):
            while length and stop[place] != stop[length]:
                length = self._shorter[length]
            length += stop[place] == stop[length]
            self._shorter[place + 1] = length

    def push(self, character: str) -> bool:
        """Whether the string ends with this character."""
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._shorter[self.num_matched]
        self.num_matched += self.stop[self.num_matched] == character
        if self.num_matched < len(self.stop):
            return False
        self.num_matched = self._shorter[self.num_matched]
        return True
