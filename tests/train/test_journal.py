"""Files that only grow: what a killed process, a full disk and a second process leave."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forespeak.errors import DataError
from forespeak.train.journal import Journal, read_lines, write_lines

RECORDS: list[dict[str, Any]] = [{"a": 1}, {"b": "é ✓\n\u2028"}, {"c": [1, 2, 3]}]


def written(path: Path) -> Path:
    with Journal(path) as journal:
        for record in RECORDS:
            journal.append(record)
    return path


@contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this, which is how a full disk looks from inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_come_back(tmp_path: Path):
    lines = list(read_lines(written(tmp_path / "new" / "j.jsonl")))
    assert [line.record for line in lines] == RECORDS
    assert lines[2].place.endswith("j.jsonl, line 3")


def test_cut_anywhere_only_the_cut_line_is_lost(tmp_path: Path):
    path = written(tmp_path / "j.jsonl")
    whole = path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends)
        if size not in (0, *ends):
            with pytest.raises(DataError, match=f"line {kept + 1} is half-written"):
                list(read_lines(path))
        with Journal(path) as journal:
            assert [line.record for line in journal.lines()] == RECORDS[:kept]
            for record in RECORDS[kept:]:
                journal.append(record)
        assert path.read_bytes() == whole


def test_a_half_written_line_longer_than_a_block(tmp_path: Path):
    path = written(tmp_path / "j.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    Journal(path).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "bad", [b"{]\n", b"\n", b"[1]\n", b"\xff\n", b"null\n", b"[" * 9999 + b"\n"]
)
def test_a_broken_line_is_named(tmp_path: Path, bad: bytes):
    path = written(tmp_path / "j.jsonl")
    path.write_bytes(path.read_bytes() + bad)
    with pytest.raises(DataError, match="line 4 is broken"):
        list(read_lines(path))


def test_a_full_disk_leaves_whole_lines(tmp_path: Path):
    path = written(tmp_path / "j.jsonl")
    whole = path.read_bytes()
    with disk_of(len(whole) + 10), Journal(path) as journal:
        with pytest.raises(DataError, match="cannot be written .*goes on where it stopped"):
            journal.append({"long": "x" * 100})
        assert path.read_bytes() == whole
    with Journal(path) as journal:
        journal.append({"d": 4})
    assert [line.record for line in read_lines(path)] == [*RECORDS, {"d": 4}]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path):
    path = written(tmp_path / "j.jsonl")
    whole = path.read_bytes()
    with disk_of(1000), pytest.raises(DataError, match="cannot be written"):
        write_lines(path, iter([b"y" * 600, b"z" * 600]))
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["j.jsonl"]


def test_one_writer_at_a_time(tmp_path: Path):
    with Journal(tmp_path / "j.jsonl"), pytest.raises(DataError, match="by another process"):
        Journal(tmp_path / "j.jsonl")
    Journal(tmp_path / "j.jsonl").close()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1], []])
def test_keep_orders_and_drops(tmp_path: Path, order: list[int]):
    path = written(tmp_path / "j.jsonl")
    with Journal(path) as journal:
        journal.keep(order)
    assert [line.record for line in read_lines(path)] == [RECORDS[number] for number in order]


def test_what_cannot_be_opened(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        Journal(tmp_path / "file" / "j.jsonl")
    with pytest.raises(DataError, match="cannot be read"):
        list(read_lines(tmp_path / "missing"))
