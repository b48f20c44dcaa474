"""Blocks are cut where plain decoding would have ended, whatever the borders."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from forespeak.sampling import SamplingParams
from forespeak.spec.stopping import KeptBlock, Stopper

EOS = 0
VOCABULARY = ["<eos>", "a", "b", "ab", "aab", "ba", "c", "", "aba"]


class ListDecoder:
    """Tokens are entries of a list."""

    def push(self, token_id: int) -> str:
        return VOCABULARY[token_id]


class ByteDecoder:
    """Tokens are bytes; a character comes out when its last byte is in."""

    def __init__(self) -> None:
        self._bytes = b""

    def push(self, token_id: int) -> str:
        self._bytes += bytes([token_id])
        try:
            text = self._bytes.decode()
        except UnicodeDecodeError:
            return ""
        self._bytes = b""
        return text


def stopper(controls: SamplingParams) -> Stopper:
    return Stopper(controls, eos_ids=(EOS,), decoder=ListDecoder())


def obvious(
    controls: SamplingParams, tokens: list[int]
) -> tuple[int, str, str | None, str | int | None]:
    """Plain decoding: grow the text by one token, look at all of it."""
    text = ""
    for number, token in enumerate(tokens, start=1):
        if token == EOS and not controls.ignore_eos:
            return number, text, "stop", None
        if token in controls.stop_token_ids:
            tail = VOCABULARY[token] if controls.include_stop_str else ""
            return number, text + tail, "stop", token
        known = len(text)
        text += VOCABULARY[token]
        ends = [
            (end, -len(stop), stop)
            for stop in controls.stop
            for end in range(known + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends and number > controls.min_tokens:
            end, _, stop = min(ends)
            return (
                number,
                text[: end if controls.include_stop_str else end - len(stop)],
                "stop",
                stop,
            )
        if number == controls.max_new_tokens:
            return number, text, "length", None
    return len(tokens), text, None, None


@settings(max_examples=400, deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=5), min_size=1, max_size=8),
    stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(1, 8), max_size=1),
    include=st.booleans(),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 10),
    max_new_tokens=st.integers(10, 30),
)
def test_blocks_equal_plain_decoding(
    blocks, stop, stop_token_ids, include, ignore_eos, min_tokens, max_new_tokens
):
    controls = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_tokens=min_tokens,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_token_ids),
        include_stop_str=include and bool(stop or stop_token_ids),
        ignore_eos=ignore_eos,
    )
    num_kept, text, finish, reason = obvious(controls, [t for block in blocks for t in block])
    watched = stopper(controls)
    sent = ""
    last = KeptBlock(0, "")
    for block in blocks:
        last = watched.push(block)
        sent += last.text
        assert text.startswith(sent)  # nothing that was sent has to be taken back
        if last.finish_reason is not None:
            break
        assert last.num_kept == len(block)
    assert watched.num_tokens == num_kept
    assert watched.num_left == max_new_tokens - num_kept
    assert (last.finish_reason, last.stop_reason) == (finish, reason)
    assert watched.is_finished == (finish is not None)
    if finish is not None:
        assert sent == text
    else:  # what is held back is the beginning of a stop string
        held = text[len(sent) :]
        assert not held or any(s.startswith(held) for s in stop)


def test_end_of_sequence_inside_a_block():
    assert stopper(SamplingParams()).push([1, 2, EOS, 3]) == KeptBlock(3, "ab", "stop")
    going_on = stopper(SamplingParams(ignore_eos=True)).push([1, EOS, 2])
    assert going_on == KeptBlock(3, "a<eos>b")


def test_stop_string_over_the_border_of_rounds():
    watched = stopper(SamplingParams(stop=("abac",)))
    assert watched.push([6, 3]) == KeptBlock(2, "c")  # "ab" may begin it
    assert watched.push([1]) == KeptBlock(1, "")
    assert watched.push([2]) == KeptBlock(1, "ab")  # "abab": its end may begin it anew
    assert watched.push([1, 6, 1]) == KeptBlock(2, "", "stop", "abac")


def test_length_limit_inside_a_block_and_stop_before_length():
    assert stopper(SamplingParams(max_new_tokens=2)).push([1, 2, 6]) == KeptBlock(2, "ab", "length")
    limit = SamplingParams(max_new_tokens=2, stop=("b",))
    assert stopper(limit).push([1, 2, 6]) == KeptBlock(2, "a", "stop", "b")
    assert stopper(SamplingParams(max_new_tokens=2)).push([1, EOS]) == KeptBlock(2, "a", "stop")


def test_held_text_comes_out_at_the_end():
    held = SamplingParams(max_new_tokens=2, stop=("abc",))
    assert stopper(held).push([1, 2]) == KeptBlock(2, "ab", "length")
    assert stopper(SamplingParams(stop=("abc",))).push([1, EOS]) == KeptBlock(2, "a", "stop")


def test_stop_string_before_min_tokens_does_not_count():
    controls = SamplingParams(min_tokens=2, stop=("b",))
    assert stopper(controls).push([2, 2, 1, 2]) == KeptBlock(4, "bba", "stop", "b")


def test_characters_of_several_tokens():
    controls = SamplingParams(stop=("ß→",), include_stop_str=True)
    watched = Stopper(controls, eos_ids=(), decoder=ByteDecoder())
    kept = watched.push(list("groß→!".encode()))
    assert kept == KeptBlock(len("groß→".encode()), "groß→", "stop", "ß→")
