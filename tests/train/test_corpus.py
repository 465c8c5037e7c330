"""Documents from each kind of source, and their split."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perilune.errors import UserError
from perilune.train import corpus
from perilune.train.corpus import (
    Corpus,
    CorpusSettings,
    Document,
    SkipCounts,
    cut_into_pieces,
    load_corpus,
    split_documents,
)


def sources(found: Corpus) -> list[str]:
    return [document.source for document in found.documents]


def directory(path: Path, **options: object) -> Corpus:
    return load_corpus(CorpusSettings.model_validate({"source": "directory", "path": path, **options}))


def test_a_directory_is_read_in_path_order_and_only_where_a_pattern_matches(tmp_path: Path) -> None:
    for name in ("b/z.py", "b/a.md", "a.py", "b.py", "c/notes.txt", "c/d/deep.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    assert sources(directory(tmp_path)) == ["a.py", "b.py", "b/a.md", "b/z.py", "c/d/deep.md", "c/notes.txt"]
    assert sources(directory(tmp_path, include=["*.py"])) == ["a.py", "b.py", "b/z.py"]
    assert sources(directory(tmp_path, include=["c/*"])) == ["c/d/deep.md", "c/notes.txt"]


def test_what_is_no_text_is_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_bytes(b"\xef\xbb\xbfgood\r\n")
    (tmp_path / "same.txt").write_bytes(b"good\r\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "blank.txt").write_bytes(b" \n")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".hidden").write_text("hidden")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "x.txt").write_text("cached")
    os.mkfifo(tmp_path / "pipe")
    found = directory(tmp_path)
    assert found.documents == (Document("good.txt", "good\r\n"),)  # byte order mark gone, line end kept
    assert found.skipped == SkipCounts(binary=1, undecodable=1, unreadable=1, empty=1, duplicate=1)


def test_a_link_loop_ends_and_nothing_is_read_twice(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file.txt").write_text("once")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "linked.txt").write_text("through a link")
    (tmp_path / "c").symlink_to(outside)
    found = directory(tmp_path)
    assert sources(found) == ["a/file.txt", "c/linked.txt"]
    assert found.skipped.duplicate == 0


def test_a_file_name_that_is_not_utf8_is_shown_escaped(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("text")
    assert sources(directory(tmp_path)) == ["caf\\xe9.txt"]


def test_a_huge_file_becomes_pieces_that_end_with_lines(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(100))
    (tmp_path / "long.txt").write_text(text)
    found = directory(tmp_path, piece_characters=100)
    assert sources(found)[:2] == ["long.txt#0", "long.txt#1"]
    assert "".join(document.text for document in found.documents) == text
    assert all(document.text.endswith("\n") and len(document.text) <= 100 for document in found.documents)


@given(st.text(alphabet="ab\n\U0001f600", max_size=60), st.integers(1, 20))
def test_pieces_join_to_the_text(text: str, size: int) -> None:
    pieces = cut_into_pieces(text, size)
    assert "".join(pieces) == text
    assert all(len(piece) <= size for piece in pieces)
    assert all(pieces) or pieces == [""]


def test_jsonl_documents_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": "two", "id": 7}\n{"body": "\\ud800"}\n')
    found = load_corpus(CorpusSettings(source="jsonl", path=path, text_field="body"))
    assert found.documents == (Document("data.jsonl#1", "one"), Document("data.jsonl#3", "two"))
    assert found.skipped.undecodable == 1


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"text": 3}', b'{"text": "\xff"}', b"[" * 100_000])
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(UserError, match=r"data\.jsonl:2: "):
        load_corpus(CorpusSettings(source="jsonl", path=path))


@pytest.mark.parametrize("source", ["directory", "jsonl"])
def test_a_missing_path_and_an_empty_one_are_user_errors(tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match="correct `path`"):
        load_corpus(CorpusSettings.model_validate({"source": source, "path": tmp_path / "nowhere"}))
    empty = tmp_path / "empty"
    _ = empty.mkdir() if source == "directory" else empty.touch()
    with pytest.raises(UserError, match="No usable text"):
        load_corpus(CorpusSettings.model_validate({"source": source, "path": empty}))


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "directory"},
        {"source": "datasets"},
        {"source": "stdlib", "path": "/somewhere"},
        {"source": "jsonl", "path": "x", "include": ["*.py"]},
        {"source": "directory", "path": "x", "include": []},
        {"held_out_fraction": 1.0},
        {"unknown": 1},
    ],
)
def test_contradictory_settings_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CorpusSettings.model_validate(fields)


def test_a_missing_datasets_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'datasets>=3'"):
        load_corpus(CorpusSettings(source="datasets", dataset="some/name"))


def test_a_data_set_is_streamed_until_enough_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        assert (name, config, split, streaming) == ("some/name", None, "train", True)
        for number in range(1000):
            read.append(number)
            yield {"text": f"row {number:03}"}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = load_corpus(CorpusSettings(source="datasets", dataset="some/name", max_bytes=20))
    assert [document.text for document in found.documents] == ["row 000", "row 001", "row 002"]
    assert len(read) == 3
    with pytest.raises(UserError, match="no text field 'body' among"):
        load_corpus(CorpusSettings(source="datasets", dataset="some/name", text_field="body"))


def test_a_data_set_that_cannot_be_loaded_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no route to the hub")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match="'some/name': no route to the hub"):
        load_corpus(CorpusSettings(source="datasets", dataset="some/name"))


@pytest.fixture(scope="module")
def standard_library() -> Corpus:
    return load_corpus(CorpusSettings())


def test_the_default_corpus_is_megabytes_of_source_and_reference_prose(standard_library: Corpus) -> None:
    names = sources(standard_library)
    assert standard_library.num_bytes > 5_000_000
    assert "json/decoder.py" in names
    assert "topics/LAMBDAS" in names or "topics/lambda" in names
    assert not [name for name in names if "site-packages" in name or "/tests/" in name or name.startswith("test/") or "__pycache__" in name]
    assert "pydoc_data/topics.py" not in names


def test_max_bytes_takes_a_stable_mixture_in_corpus_order(standard_library: Corpus) -> None:
    small = load_corpus(CorpusSettings(max_bytes=500_000))
    larger = load_corpus(CorpusSettings(max_bytes=1_000_000))
    assert 500_000 <= small.num_bytes < 2_000_000
    assert set(small.documents) < set(larger.documents) < set(standard_library.documents)
    everything = sources(standard_library)
    places = [everything.index(name) for name in sources(small)]
    assert places == sorted(places)
    assert places[-1] > len(everything) // 2  # not just the first folders
    # Sampling and holding out use independent hashes: with one hash the sample would be the held-out part.
    assert len(split_documents(larger.documents, 0.1).held_out) < 0.4 * len(larger.documents)


def test_debian_documentation_is_read_from_the_highest_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("3.9", "3.11"):
        folder = tmp_path / f"python{version}" / "html" / "_sources" / "library"
        folder.mkdir(parents=True)
        (folder / "os.rst.txt").write_text(f"os in {version}")
        (folder / "os.html").write_text("markup")
    monkeypatch.setattr(corpus, "_DEBIAN_DOCUMENTATION", tmp_path)
    found = load_corpus(CorpusSettings())
    assert [document for document in found.documents if document.source.startswith("documentation/")] == [
        Document("documentation/library/os.rst.txt", "os in 3.11")
    ]


texts = st.lists(st.text(min_size=1, max_size=8), min_size=2, max_size=30, unique=True)


@given(texts, st.floats(0.001, 0.999), st.randoms(use_true_random=False))
def test_the_split_is_a_partition_that_ignores_order_and_names(values: list[str], fraction: float, random: object) -> None:
    documents = [Document(str(number), text) for number, text in enumerate(values)]
    split = split_documents(documents, fraction)
    assert split.train and split.held_out
    assert sorted(d.source for d in split.train + split.held_out) == sorted(d.source for d in documents)
    shuffled = [Document(f"renamed {document.source}", document.text) for document in documents]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert {d.text for d in split_documents(shuffled, fraction).held_out} == {d.text for d in split.held_out}


def test_adding_documents_moves_none_to_the_other_side() -> None:
    documents = [Document(str(number), f"text {number}") for number in range(2000)]
    first = split_documents(documents[:1000], 0.1)
    both = split_documents(documents, 0.1)
    assert set(first.train) <= set(both.train)
    assert set(first.held_out) <= set(both.held_out)
    assert len(both.held_out) == pytest.approx(200, abs=50)


def test_a_split_that_cannot_be_made_says_what_to_do() -> None:
    only = [Document("a.txt", "text")]
    assert split_documents(only, 0.0).train == tuple(only)
    with pytest.raises(UserError, match="add more"):
        split_documents(only, 0.1)
    with pytest.raises(UserError, match="empty"):
        split_documents([], 0.1)


def test_settings_are_plain_toml_values() -> None:
    settings = CorpusSettings.model_validate(
        json.loads('{"source": "directory", "path": "texts", "include": ["*.md"], "cache_directory": "cache"}')
    )
    assert settings.path == Path("texts") and settings.include == ("*.md",)
