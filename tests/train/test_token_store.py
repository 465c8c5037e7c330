"""The tokens of a corpus and their cache file."""

import fcntl
import logging
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from perilune.errors import UserError
from perilune.train import token_store
from perilune.train.corpus import Document
from perilune.train.token_store import tokenize_corpus

END = 256


class ByteEncoder:
    """One token per UTF-8 byte; counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def encode_text(self, text: str) -> list[int]:
        self.calls += 1
        return list(text.encode())


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """Let no file of this process grow past a size: the kernel then refuses writes as a full disk does, after a partial write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


DOCUMENTS = [Document("a", "héllo"), Document("b", "x"), Document("c", "line\n" * 50)]


def test_tokens_are_the_documents_each_with_its_end(tmp_path: Path) -> None:
    for cache in (None, tmp_path):
        found = tokenize_corpus(DOCUMENTS, ByteEncoder(), END, cache, tokenizer_fingerprint="bytes")
        assert len(found) == 3
        assert [found.document(index).tolist() for index in range(3)] == [[*d.text.encode(), END] for d in DOCUMENTS]
        assert found.tokens.dtype == np.int32
        assert found.byte_lengths is not None and found.byte_lengths.tolist() == [6, 1, 250]
        assert found.num_bytes == 257 and found.num_tokens == 260
        assert isinstance(found.tokens, np.memmap) == (cache is not None)


def test_a_cache_is_used_again_and_only_for_the_same_text_tokenizer_and_end(tmp_path: Path) -> None:
    def encoder_calls(documents: list[Document], end: int = END, fingerprint: str = "bytes") -> int:
        encoder = ByteEncoder()
        tokenize_corpus(documents, encoder, end, tmp_path, tokenizer_fingerprint=fingerprint)
        return encoder.calls

    assert encoder_calls(DOCUMENTS) == 3
    assert encoder_calls(DOCUMENTS) == 0
    assert encoder_calls([Document("renamed", document.text) for document in DOCUMENTS]) == 0
    assert encoder_calls(DOCUMENTS, end=257) == 3
    assert encoder_calls(DOCUMENTS, fingerprint="other") == 3
    assert encoder_calls([Document("a", "ab"), Document("b", "c")]) == 2
    assert encoder_calls([Document("a", "a"), Document("b", "bc")]) == 2  # the same bytes, another border


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "header", "extend"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenize_corpus(DOCUMENTS, ByteEncoder(), END, tmp_path, tokenizer_fingerprint="bytes")
    (path,) = tmp_path.glob("*.bin")
    content = bytearray(path.read_bytes())
    match damage:
        case "truncate":
            del content[-8:]
        case "flip":
            content[100] ^= 1
        case "empty":
            content.clear()
        case "header":
            content[20:24] = b"\xff" * 4
        case "extend":
            content += b"\0" * 8
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        found = tokenize_corpus(DOCUMENTS, ByteEncoder(), END, tmp_path, tokenizer_fingerprint="bytes")
    assert "damaged" in caplog.text
    assert found.document(1).tolist() == [ord("x"), END]


def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(tmp_path: Path, file_size_limit: Callable[[int], None]) -> None:
    documents = [Document("long", "x" * 100_000)]
    file_size_limit(50_000)
    with pytest.raises(UserError, match="the disk is full"):
        tokenize_corpus(documents, ByteEncoder(), END, tmp_path, tokenizer_fingerprint="bytes")
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_cache_directory_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cache_directory"):
        tokenize_corpus(DOCUMENTS, ByteEncoder(), END, tmp_path / "file" / "below", tokenizer_fingerprint="bytes")


def test_a_cache_without_a_fingerprint_and_ids_out_of_range_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        tokenize_corpus(DOCUMENTS, ByteEncoder(), END, tmp_path)
    with pytest.raises(ValueError, match="token ids"):
        tokenize_corpus(DOCUMENTS, ByteEncoder(), -1)
    with pytest.raises(UserError, match="empty"):
        tokenize_corpus([], ByteEncoder(), END)


def test_of_two_that_want_one_cache_the_second_waits_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leader_encodes, follower_waits = threading.Event(), threading.Event()
    lock = fcntl.flock

    def watched_lock(file: IO[bytes], operation: int) -> None:
        if leader_encodes.is_set():
            follower_waits.set()
        lock(file, operation)

    class LeadingEncoder(ByteEncoder):
        def encode_text(self, text: str) -> list[int]:
            leader_encodes.set()
            assert follower_waits.wait(timeout=20)
            return super().encode_text(text)

    monkeypatch.setattr(token_store.fcntl, "flock", watched_lock)
    first, second = LeadingEncoder(), ByteEncoder()
    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(tokenize_corpus, DOCUMENTS, first, END, tmp_path, tokenizer_fingerprint="bytes")
        assert leader_encodes.wait(timeout=20)
        follower = pool.submit(tokenize_corpus, DOCUMENTS, second, END, tmp_path, tokenizer_fingerprint="bytes")
        assert leader.result().tokens.tolist() == follower.result().tokens.tolist()
    assert (first.calls, second.calls) == (3, 0)


def test_what_a_killed_writer_left_does_no_harm(tmp_path: Path) -> None:
    tokenize_corpus(DOCUMENTS, ByteEncoder(), END, tmp_path, tokenizer_fingerprint="bytes")
    (path,) = tmp_path.glob("*.bin")
    content = path.read_bytes()
    path.with_suffix(".partial").write_bytes(content[:50] + b"longer than the whole file" * 100)
    path.unlink()
    tokenize_corpus(DOCUMENTS, ByteEncoder(), END, tmp_path, tokenizer_fingerprint="bytes")
    assert path.read_bytes() == content
    assert not path.with_suffix(".partial").exists()
