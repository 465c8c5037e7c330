"""Text to train on: documents from disk, a stable train/held-out split, and their tokens in one flat array.

Four sources: a directory of text or code, a JSONL file, a Hugging Face data set (an extra), and the default that every
machine has: the source of Python's standard library with its reference topics, and Debian's Python documentation where it
is installed. A corpus is held in memory as text; its tokens can live in a memory-mapped cache file.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perilune.errors import UserError
from perilune.train.split import split_by_hash, text_hash

logger = logging.getLogger(__name__)

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})
_TOPICS_FILE = "pydoc_data/topics.py"  # the reference topics as escaped strings: read as prose instead
_DEBIAN_DOCUMENTATION = Path("/usr/share/doc")
_BINARY_PROBE_BYTES = 8192


class CorpusSettings(BaseModel):
    """The `[corpus]` table of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["stdlib", "directory", "jsonl", "datasets"] = Field("stdlib", description="where the documents come from")
    path: Path | None = Field(None, description="the directory or the JSONL file")
    include: tuple[str, ...] = Field(
        ("*",), min_length=1, description="directory: file patterns, matched on the name, or on the path below"
    )
    text_field: str = Field("text", min_length=1, description="jsonl, datasets: the field that holds the text")
    dataset: str | None = Field(None, description="datasets: name on the hub, or a local directory")
    dataset_config: str | None = Field(None, description="datasets: configuration name")
    dataset_split: str = Field("train", min_length=1, description="datasets: split")
    include_tests: bool = Field(False, description="stdlib: also read the standard library's own tests")
    piece_characters: int = Field(1 << 20, ge=1, description="a longer file becomes several documents, cut at line ends where possible")
    max_bytes: int | None = Field(
        None, ge=1, description="about how much UTF-8 text to keep: a stable sample of the documents (datasets: the first ones)"
    )
    held_out_fraction: float = Field(
        0.02, ge=0.0, lt=1.0, description="share of documents never trained on, chosen by a hash of their text"
    )
    cache_directory: Path | None = Field(None, description="where token caches are kept; none are written without it")

    @model_validator(mode="after")
    def _check_that_every_field_is_read(self) -> CorpusSettings:
        readers = {
            "path": ("directory", "jsonl"),
            "include": ("directory",),
            "text_field": ("jsonl", "datasets"),
            "dataset": ("datasets",),
            "dataset_config": ("datasets",),
            "dataset_split": ("datasets",),
            "include_tests": ("stdlib",),
        }
        for name, sources in readers.items():
            if name in self.model_fields_set and self.source not in sources:
                raise ValueError(f"{name} is read only when source is {' or '.join(sources)}, and source is {self.source}: remove it")
        if self.source in readers["path"] and self.path is None:
            raise ValueError(f"source = {self.source!r} needs a path")
        if self.source == "datasets" and self.dataset is None:
            raise ValueError("source = 'datasets' needs the name of a dataset")
        return self


@dataclass(frozen=True)
class Document:
    """One text. `source` names it for people (a path below the root, with `#n` for the n-th piece or line)."""

    source: str
    text: str


@dataclass(frozen=True)
class SkipCounts:
    """Files (or records) that were seen and not used, by reason."""

    binary: int = 0
    undecodable: int = 0
    unreadable: int = 0
    empty: int = 0
    duplicate: int = 0


@dataclass(frozen=True)
class Corpus:
    """Documents in a deterministic order, no two with the same text, and what was left out on the way."""

    documents: tuple[Document, ...]
    skipped: SkipCounts

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of all documents together."""
        return sum(len(document.text.encode()) for document in self.documents)


@dataclass(frozen=True)
class CorpusSplit:
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


# ---------------------------------------------------------------------------------------------------------------- reading


def load_corpus(settings: CorpusSettings) -> Corpus:
    """Read what `settings` names. Raises UserError when nothing usable is found or a file is not what it should be."""
    skips: Counter[str] = Counter()
    match settings.source:
        case "stdlib":
            raw = _read_standard_library(settings.include_tests, skips)
        case "directory":
            raw = _read_directory(_existing(settings.path, Path.is_dir, "a directory"), settings.include, skips)
        case "jsonl":
            raw = _read_jsonl(_existing(settings.path, Path.is_file, "a file"), settings.text_field, skips)
        case "datasets":
            raw = _read_datasets(settings)
    documents = _clean(raw, settings.piece_characters, skips)
    # A data set may be an endless stream: it must be cut while it is read.
    choose = _first if settings.source == "datasets" else _sample
    kept = choose(documents, settings.max_bytes)
    corpus = Corpus(kept, SkipCounts(**skips))
    if not corpus.documents:
        where = settings.path or settings.dataset or "the standard library"
        raise UserError(f"No usable text in {where} (skipped: {corpus.skipped}): check the path, `include` and `text_field`.")
    return corpus


def _existing(path: Path | None, is_kind: Any, kind: str) -> Path:
    assert path is not None  # CorpusSettings refuses these sources without a path
    if not is_kind(path):
        raise UserError(f"The corpus path {path} is not {kind}: correct `path` in the recipe.")
    return path


def _clean(raw: Iterable[Document], piece_characters: int, skips: Counter[str]) -> Iterator[Document]:
    """Cut long texts, drop blank and repeated ones (a training text must not come back as a held-out one)."""
    seen: set[bytes] = set()
    for document in raw:
        pieces = cut_into_pieces(document.text, piece_characters)
        for number, text in enumerate(pieces):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if not text.strip():
                skips["empty"] += 1
            elif digest in seen:
                skips["duplicate"] += 1
            else:
                seen.add(digest)
                yield Document(document.source if len(pieces) == 1 else f"{document.source}#{number}", text)


def cut_into_pieces(text: str, piece_characters: int) -> list[str]:
    """Pieces of at most `piece_characters` that join to `text`; each ends with a line when its second half has a line end."""
    pieces = []
    start = 0
    while len(text) - start > piece_characters:
        line_end = text.rfind("\n", start + piece_characters // 2, start + piece_characters) + 1
        end = line_end if line_end > start else start + piece_characters
        pieces.append(text[start:end])
        start = end
    pieces.append(text[start:])
    return pieces


def _sample(raw: Iterable[Document], max_bytes: int | None) -> tuple[Document, ...]:
    """Documents in the order of a hash until `max_bytes` is reached, given back in corpus order: a mixture, not the first folders."""
    documents = tuple(raw)
    if max_bytes is None:
        return documents
    ranked = sorted(range(len(documents)), key=lambda index: text_hash(documents[index].text, b"sample"))
    kept = []
    total = 0
    for index in ranked:
        if total >= max_bytes:
            break
        kept.append(index)
        total += len(documents[index].text.encode())
    return tuple(documents[index] for index in sorted(kept))


def _first(documents: Iterable[Document], max_bytes: int | None) -> tuple[Document, ...]:
    kept = []
    total = 0
    for document in documents:
        kept.append(document)
        total += len(document.text.encode())
        if max_bytes is not None and total >= max_bytes:
            break
    return tuple(kept)


def _read_directory(root: Path, include: Sequence[str], skips: Counter[str], leave_out: frozenset[str] = frozenset()) -> Iterator[Document]:
    """Files below `root` whose name (for a pattern with a slash: whose path below root) matches, in the order of their paths.

    Hidden files and folders, `__pycache__` and folders named in `leave_out` are not entered. Links are followed, and whatever
    can be reached by two paths is read once.
    """
    for name, path in _files_below(root, leave_out, skips):
        if not any(fnmatchcase(name if "/" in pattern else path.name, pattern) for pattern in include):
            continue
        text = _read_text(path, skips)
        if text is not None:
            yield Document(name, text)


def _files_below(root: Path, leave_out: frozenset[str], skips: Counter[str]) -> list[tuple[str, Path]]:
    """(path below root with slashes, path) of every regular file, sorted by the former."""

    def count_unreadable(_: OSError) -> None:
        skips["unreadable"] += 1

    seen: set[tuple[int, int]] = set()

    def identify(path: Path) -> int | None:
        """The file's mode at the first visit; None for a repeated visit and for what cannot be looked at."""
        try:
            status = path.stat()
        except OSError:  # a dangling link, a link to itself, a folder without permission
            skips["unreadable"] += 1
            return None
        identity = (status.st_dev, status.st_ino)
        if identity in seen:
            return None
        seen.add(identity)
        return status.st_mode

    identify(root)
    found = []
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=count_unreadable):
        here = Path(folder)
        wanted = sorted(name for name in subfolders if not name.startswith(".") and name != "__pycache__" and name not in leave_out)
        subfolders[:] = [name for name in wanted if identify(here / name) is not None]
        for name in sorted(names):
            path = here / name
            mode = None if name.startswith(".") else identify(path)
            if mode is not None and stat.S_ISREG(mode):  # opening a fifo or a device could block for ever
                below = os.fsencode(path.relative_to(root).as_posix()).decode("utf-8", "backslashreplace")
                found.append((below, path))
    return sorted(found)


def _read_text(path: Path, skips: Counter[str]) -> str | None:
    """The file's text, or None with the reason counted. UTF-8 only; line ends are kept as they are."""
    try:
        with path.open("rb") as file:
            head = file.read(_BINARY_PROBE_BYTES)
            if b"\0" in head:
                skips["binary"] += 1
                return None
            return (head + file.read()).decode("utf-8-sig")
    except UnicodeDecodeError:
        skips["undecodable"] += 1
    except OSError:
        skips["unreadable"] += 1
    return None


def _read_standard_library(include_tests: bool, skips: Counter[str]) -> Iterator[Document]:
    """Source files, then reference topics, then Debian's documentation. Text differs between Python versions, order does not."""
    root = Path(sysconfig.get_paths()["stdlib"])
    leave_out = _PACKAGE_FOLDERS if include_tests else _PACKAGE_FOLDERS | _TEST_FOLDERS
    for document in _read_directory(root, ("*.py",), skips, leave_out):
        if document.source != _TOPICS_FILE:
            yield document
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:  # some distributions package it apart
        topics = {}
    for name in sorted(topics):
        yield Document(f"topics/{name}", topics[name])
    documentation = _debian_documentation()
    if documentation is not None:
        for document in _read_directory(documentation, ("*.rst.txt",), skips):
            yield Document(f"documentation/{document.source}", document.text)


def _debian_documentation() -> Path | None:
    """Folder of the documentation's reStructuredText sources (Debian's python3.N-doc), the highest version installed."""

    def version(folder: Path) -> tuple[int, ...]:
        return tuple(int(part) for part in folder.parent.parent.name.removeprefix("python").split(".") if part.isdigit())

    return max(_DEBIAN_DOCUMENTATION.glob("python3.*/html/_sources"), key=version, default=None)


def _read_jsonl(path: Path, text_field: str, skips: Counter[str]) -> Iterator[Document]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    text = _text_of_record(line, f"{path}:{number}", text_field)
                    if _is_encodable(text):
                        yield Document(f"{path.name}#{number}", text)
                    else:
                        skips["undecodable"] += 1
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error


def _text_of_record(line: bytes, place: str, text_field: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not valid JSON ({error}): each line must be an object like {{{text_field!r}: '...'}}.") from error
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        raise UserError(f"{place}: no text field {text_field!r}: each line must be an object that holds it, or set `text_field`.")
    return str(record[text_field])


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        return False
    return True


def _read_datasets(settings: CorpusSettings) -> Iterator[Document]:
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            "Reading a Hugging Face data set needs the extra `datasets`: run `pip install 'datasets>=3'` in this environment."
        ) from error
    try:
        rows = library.load_dataset(settings.dataset, settings.dataset_config, split=settings.dataset_split, streaming=True)
        for number, row in enumerate(rows):
            text = row.get(settings.text_field)
            if not isinstance(text, str):
                raise UserError(f"Data set {settings.dataset}, row {number}: no text field {settings.text_field!r} among {sorted(row)}.")
            if _is_encodable(text):
                yield Document(f"{settings.dataset}#{number}", text)
    except UserError:
        raise
    except Exception as error:  # whatever the library raises (network, names, formats) is about the user's choice of data
        raise UserError(f"Cannot read data set {settings.dataset!r}: {error}") from error


# -------------------------------------------------------------------------------------------------------------- splitting


def split_documents(documents: Sequence[Document], held_out_fraction: float) -> CorpusSplit:
    """Hold out documents by a hash of their text (`split_by_hash`)."""
    if not documents:
        raise UserError("The corpus is empty: there is nothing to train on.")
    hashes = [text_hash(document.text, b"held-out") for document in documents]
    train, held_out = split_by_hash(documents, hashes, held_out_fraction, documents[0].source)
    return CorpusSplit(tuple(train), tuple(held_out))
