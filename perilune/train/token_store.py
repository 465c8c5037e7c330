"""Documents to one flat array of token ids, in memory or in a memory-mapped cache file that processes share."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from perilune.errors import UserError
from perilune.train.corpus import Document
from perilune.train.packing import TokenDocuments, as_token_ids, buffer

logger = logging.getLogger(__name__)


class TextEncoder(Protocol):
    """What this file needs of a tokenizer."""

    def encode_text(self, text: str) -> list[int]: ...


def tokenize_corpus(
    documents: Sequence[Document],
    encoder: TextEncoder,
    end_id: int,
    cache_directory: Path | None = None,
    *,
    tokenizer_fingerprint: str = "",
) -> TokenDocuments:
    """Encode every document and end it with `end_id`.

    With `cache_directory` the result is a memory-mapped file there, named by a hash of the texts, `end_id` and
    `tokenizer_fingerprint` (which must then change whenever the tokenizer's behaviour does). A damaged file is rebuilt. Processes
    that ask for the same file at once wait for the first, so every rank of a job may call this.

    Raises ValueError for a cache without a fingerprint; UserError for an empty corpus and when the cache cannot be written.
    """
    if not documents:
        raise UserError("The corpus is empty: there is nothing to tokenise.")
    if cache_directory is None:
        tokens, offsets = _encode_all(documents, encoder, end_id)
        return TokenDocuments(tokens, offsets, _byte_lengths(documents))
    if not tokenizer_fingerprint:
        raise ValueError("a token cache needs the tokenizer's fingerprint, or another tokenizer's tokens could be found in it")
    key = _cache_key(documents, end_id, tokenizer_fingerprint)
    path = cache_directory / f"tokens-{key}.bin"
    try:
        cache_directory.mkdir(parents=True, exist_ok=True)
        # A lock that dies with its holder: whatever lies at the partial name is nobody's work in progress.
        with path.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            cached = _open_cache(path)
            if cached is None:
                tokens, offsets = _encode_all(documents, encoder, end_id)
                _write_cache(path, TokenDocuments(tokens, offsets, _byte_lengths(documents)))
                cached = _open_cache(path)
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else error.strerror
        raise UserError(f"Cannot write the token cache {path}: {reason}; free space or set another `cache_directory`.") from error
    if cached is None:
        raise UserError(
            f"The token cache {path} reads back differently from what was written: check the disk or set another `cache_directory`."
        )
    return cached


def _encode_all(documents: Sequence[Document], encoder: TextEncoder, end_id: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    parts = [as_token_ids([*encoder.encode_text(document.text), end_id]) for document in documents]
    offsets = np.cumsum([0] + [len(part) for part in parts], dtype=np.int64)
    return np.concatenate(parts), offsets


def _byte_lengths(documents: Sequence[Document]) -> NDArray[np.int64]:
    return np.array([len(document.text.encode()) for document in documents], np.int64)


def _cache_key(documents: Sequence[Document], end_id: int, tokenizer_fingerprint: str) -> str:
    digest = hashlib.blake2b(f"1\0{end_id}\0{tokenizer_fingerprint}\0".encode(), digest_size=16)
    for document in documents:
        text = document.text.encode()
        digest.update(len(text).to_bytes(8, "little"))  # so that moving a border between documents changes the key
        digest.update(text)
    return digest.hexdigest()


# The cache file: header, then tokens <i4 (padded to 8 bytes), offsets <i8, byte lengths <i8.
_CACHE_HEADER = struct.Struct("<16sQQQ")  # magic, documents, tokens, CRC-32 of everything after the header
_CACHE_MAGIC = b"perilune-tokens\1"


def _write_cache(path: Path, documents: TokenDocuments) -> None:
    """Written aside, flushed to the disk and renamed: under its final name the file is whole."""
    assert documents.byte_lengths is not None
    partial = path.with_suffix(".partial")
    padding = b"\0" * (-documents.tokens.nbytes % 8)
    parts: list[bytes | memoryview] = [buffer(documents.tokens), padding, buffer(documents.offsets), buffer(documents.byte_lengths)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    try:
        with partial.open("wb") as file:
            file.write(_CACHE_HEADER.pack(_CACHE_MAGIC, len(documents), documents.num_tokens, checksum))
            for part in parts:
                file.write(part)
            _flush_to_disk(file)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _open_cache(path: Path) -> TokenDocuments | None:
    """The cached documents, or None when there is no file or it is damaged (which is logged)."""
    try:
        with path.open("rb") as file:
            header = file.read(_CACHE_HEADER.size)
    except FileNotFoundError:
        return None
    if len(header) == _CACHE_HEADER.size:
        magic, num_documents, num_tokens, checksum = _CACHE_HEADER.unpack(header)
        token_bytes = -(-num_tokens * 4 // 8) * 8
        size = _CACHE_HEADER.size + token_bytes + 8 * (2 * num_documents + 1)
        if magic == _CACHE_MAGIC and path.stat().st_size == size:
            whole = np.memmap(path, np.uint8, "r")[_CACHE_HEADER.size :]
            if zlib.crc32(buffer(whole)) == checksum:
                tokens = whole[: num_tokens * 4].view("<i4")
                numbers = whole[token_bytes:].view("<i8")
                return TokenDocuments(tokens, np.array(numbers[: num_documents + 1]), np.array(numbers[num_documents + 1 :]))
    logger.warning("the token cache %s is damaged and will be rebuilt", path)
    return None
