import base64
import json
import re
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import UserError
from perilune.model import tiktoken_vocabulary
from perilune.model.tiktoken_vocabulary import SPLIT_PATTERN, cut_text, read_ranks
from perilune.model.tokenizer import (
    KIMI_K2,
    KIMI_K3,
    BpeTokenizer,
    ByteTokenizer,
    Segment,
    StreamDecoder,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
)

CORPUS = [
    "def main():\n    return 42\n\n\nprint(main())  # 1234\n" * 5,
    "Das Gerät misst 12,5 Volt; it's 2026. 月の近く、漢字とかな。" * 5,
    'role="assistant" tool="read_file" index="1" type="string" the the the tool tool' * 5,
]
MERGES = [b"th", b"the", b" the", b"in", b"ing", b"12", b"123", b"\xe6\x9c", b"\xe6\x9c\x88", b"  ", b"\n\n", b"He", b"'s"]
HARNESS = [
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "[BOS]",
    "[PAD]",
    "<|im_end|>",
    "<|media_pad|>",
    "<|reserved_token_279|>",
    "<|",
]

any_text = st.lists(st.one_of(st.text(), st.sampled_from(HARNESS), st.sampled_from(["the ", "123", "漢字", "\n\n", "  "]))).map("".join)


def rank_lines() -> bytes:
    tokens = [bytes([byte]) for byte in range(256)] + MERGES
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def small_ranks() -> dict[bytes, int]:
    return {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + MERGES)}


BYTES = ByteTokenizer()
BPE = BpeTokenizer.train(CORPUS, 350)
K3 = TiktokenTokenizer(small_ranks(), KIMI_K3)
K2 = TiktokenTokenizer(small_ranks(), KIMI_K2)
ALL = [BYTES, BPE, K3, K2]
each = pytest.mark.parametrize("tokenizer", ALL, ids=["byte", "bpe", "k3", "k2"])


@each
@settings(max_examples=30, deadline=None)
@given(text=any_text)
def test_any_text_comes_back_and_never_yields_a_special_id(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert all(0 <= token_id < tokenizer.num_text_tokens for token_id in ids)


@each
def test_a_lone_surrogate_is_refused_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="character 2"):
        tokenizer.encode_text("ab\ud800c")


@each
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_streamed_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    decoder = StreamDecoder(tokenizer)
    assert "".join([*map(decoder.push, ids), decoder.finish()]) == tokenizer.decode(ids)


def test_the_stream_holds_back_an_unfinished_character() -> None:
    decoder = StreamDecoder(BYTES)
    assert [decoder.push(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    decoder.push("€".encode()[0])
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


@each
def test_only_segments_that_allow_it_yield_special_ids(tokenizer: Tokenizer) -> None:
    name = tokenizer.special_names[2]
    allowed, forbidden = Segment(f"a{name}b", allow_special=True, is_target=True), Segment(name)
    expected = [*tokenizer.encode_text("a"), tokenizer.special_id(name), *tokenizer.encode_text("b")]
    assert tokenizer.encode([allowed]) == expected
    spelled = tokenizer.encode([forbidden])
    assert max(spelled) < tokenizer.num_text_tokens
    assert tokenizer.encode_with_targets([allowed, forbidden]) == (
        expected + spelled,
        [True] * len(expected) + [False] * len(spelled),
    )


@each
def test_names_and_ids_of_special_tokens_agree(tokenizer: Tokenizer) -> None:
    for name in tokenizer.special_names:
        assert tokenizer.special_name(tokenizer.special_id(name)) == name
        assert tokenizer.token_bytes(tokenizer.special_id(name)) == name.encode()
    assert tokenizer.special_name(0) is None
    assert tokenizer.vocab_size == tokenizer.num_text_tokens + len(tokenizer.special_names)


@each
def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    for bad in (-1, tokenizer.vocab_size, 1 << 40):
        with pytest.raises(UserError, match="outside this vocabulary"):
            tokenizer.special_name(bad)
        with pytest.raises(UserError, match="outside this vocabulary"):
            tokenizer.decode([0, bad])
        with pytest.raises(UserError, match="outside this vocabulary"):
            StreamDecoder(tokenizer).push(bad)


def test_the_small_vocabularies_end_with_the_k3_names() -> None:
    names = ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>")
    media = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
    assert BYTES.special_names == BPE.special_names == (*names, *media, "[UNK]", "[PAD]")
    assert (BYTES.vocab_size, BYTES.bos_id, BYTES.eos_id, BYTES.end_of_message_id, BYTES.pad_id) == (268, 256, 257, 258, 267)
    assert BYTES.encode_text("Aé") == [65, 0xC3, 0xA9]


def test_bpe_training_is_deterministic_and_reaches_its_size() -> None:
    again = BpeTokenizer.train(CORPUS, 350)
    assert again.text_vocabulary.to_str() == BPE.text_vocabulary.to_str()
    assert BPE.vocab_size == 350
    assert len(BPE.encode_text(CORPUS[2])) < len(CORPUS[2]) / 3
    assert BpeTokenizer.train([], 350).vocab_size == 268
    with pytest.raises(UserError, match="at least 268"):
        BpeTokenizer.train(CORPUS, 267)


def test_bpe_keeps_digits_single_and_adds_no_space() -> None:
    assert [BPE.token_bytes(token_id) for token_id in BPE.encode_text("12 345")] == [b"1", b"2", b" ", b"3", b"4", b"5"]
    assert not any(re.search(rb"\d", BPE.token_bytes(token_id)) for token_id in range(256, BPE.num_text_tokens))
    assert BPE.decode(BPE.encode_text("tool")) == "tool"


@pytest.mark.parametrize("tokenizer", [BYTES, BPE, K3, K2], ids=["byte", "bpe", "k3", "k2"])
def test_a_saved_tokenizer_loads_as_it_was(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "new")
    loaded = load_tokenizer(tmp_path / "new")
    assert type(loaded) is type(tokenizer)
    assert loaded.special_names == tokenizer.special_names
    assert [loaded.token_bytes(i) for i in range(loaded.vocab_size)] == [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    text = "".join(CORPUS) + "<|open|>"
    assert loaded.encode_text(text) == tokenizer.encode_text(text)
    assert not list((tmp_path / "new").glob("*tmp*"))


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
def test_transformers_reads_the_saved_file(tokenizer: Tokenizer, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "".join(CORPUS)
    assert theirs(text).input_ids == tokenizer.encode_text(text)
    assert theirs("<|open|>a<|sep|>").input_ids == tokenizer.encode([Segment("<|open|>a<|sep|>", allow_special=True)])
    assert theirs.decode(tokenizer.encode_text(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tokenizer.end_of_message_id, tokenizer.pad_id)


def test_special_ids_follow_the_ranks_as_in_the_published_files() -> None:
    for ids, names in (
        ({0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 21: "<|media_pad|>"}, KIMI_K3),
        ({0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>"}, KIMI_K2),
    ):
        published = names.names(163584)
        assert len(published) == 256
        assert {place: published[place] for place in ids} == ids
        assert published[254:] == ("[UNK]", "[PAD]")
        assert published[30] == "<|reserved_token_163614|>"
    assert K3.num_text_tokens == len(small_ranks())
    assert (K3.bos_id, K3.end_of_message_id) == (K3.num_text_tokens, K3.num_text_tokens + 2)
    assert K2.end_of_message_id == K2.special_id("<|im_end|>") == K3.end_of_message_id


def test_the_families_share_no_control_tokens() -> None:
    with pytest.raises(UserError, match="family"):
        K2.special_id("<|open|>")
    with pytest.raises(UserError, match="family"):
        K3.special_id("<|im_user|>")


@settings(max_examples=30, deadline=None)
@given(text=any_text)
def test_tiktoken_vocabulary_encodes_as_tiktoken(text: str) -> None:
    theirs = tiktoken.Encoding("t", pat_str=SPLIT_PATTERN, mergeable_ranks=small_ranks(), special_tokens={})
    assert K3.encode_text(text) == theirs.encode_ordinary(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("漢字kana漢", ["漢字", "kana", "漢"]),
        ("It's HTTPServer", ["It's", " HTTPServer"]),
        ("1234567", ["123", "456", "7"]),
        ("a  b", ["a", " ", " b"]),
        ("x = (1)\n\ny", ["x", " =", " (", "1", ")\n\n", "y"]),
        ("end  \n  next", ["end", "  \n", " ", " next"]),
        ("かな漢字", ["かな", "漢字"]),
    ],
)
def test_kimi_splits_words_in_the_published_order(text: str, words: list[str]) -> None:
    # Every word, and every run of words, is a token of its own: two words come out apart only if the split parts them.
    ranks = small_ranks()
    runs = ["".join(words[i:j]).encode() for i in range(len(words)) for j in range(i + 1, len(words) + 1)]
    for run in sorted(runs, key=len):
        for end in range(2, len(run) + 1):
            ranks.setdefault(run[:end], len(ranks))
    tokenizer = TiktokenTokenizer(ranks, KIMI_K3)
    assert [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode_text(text)] == words


def cut_one_by_one(text: str, max_piece: int, max_run: int) -> list[str]:
    """The slow twin of `cut_text`: character by character."""
    pieces = []
    for start in range(0, len(text), max_piece):
        current, run = "", 0
        for character in text[start : start + max_piece]:
            same = current != "" and character.isspace() == current[-1].isspace()
            run = run + 1 if same else 1
            if run > max_run:
                pieces.append(current)
                current, run = "", 1
            current += character
        pieces.append(current)
    return pieces


@given(text=st.text(alphabet="ab \n\x1c\u3000\u200b", max_size=60), max_piece=st.integers(1, 40), max_run=st.integers(1, 9))
def test_cuts_are_those_of_the_slow_twin(text: str, max_piece: int, max_run: int) -> None:
    assert cut_text(text, max_piece, max_run) == cut_one_by_one(text, max_piece, max_run)


def test_long_runs_are_cut_where_the_published_tokenizer_cuts() -> None:
    # 25,000 is even: cut there, "inin…" gives whole pairs; the odd "x" in front shifts the pair across the cut.
    text = "x" + "in" * 12_500
    assert len(text) == 25_001
    ids = K3.encode_text(text)
    assert K3.decode(ids) == text
    assert [K3.token_bytes(i) for i in ids[-2:]] == [b"i", b"n"]
    assert K3.encode_text(" " * 900_000)
    assert tiktoken_vocabulary.MAX_PIECE_CHARACTERS == 400_000


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"config.json": {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear"}}}, KIMI_K3),
        ({"config.json": {"model_type": "kimi_linear"}}, KIMI_K2),
        ({"config.json": {"model_type": "kimi_linear", "bos_token_id": 269}}, KIMI_K2),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"271": {"content": "<|end_of_msg|>"}}}}, KIMI_K3),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"271": {"content": "<|im_end|>"}}}}, KIMI_K2),
        # A K3 text model exported alone: its own tokenizer file knows better than the model type.
        (
            {
                "tokenizer_config.json": {"added_tokens_decoder": {"271": {"content": "<|end_of_msg|>"}}},
                "config.json": {"model_type": "kimi_linear"},
            },
            KIMI_K3,
        ),
    ],
)
def test_a_published_directory_tells_its_family(files: dict[str, object], names: object, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes(rank_lines())
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, TiktokenTokenizer)
    assert loaded.family is names


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, "holds no tokenizer"),
        ({"tiktoken.model": rank_lines()}, "does not say which special tokens"),
        ({"tiktoken.model": rank_lines(), "config.json": b'{"model_type": "kimi_k3"'}, "not valid JSON"),
        ({"tiktoken.model": rank_lines(), "config.json": b'["kimi_k3"]'}, "should hold a JSON object"),
        ({"tiktoken.model": rank_lines()[:-5], "config.json": b'{"model_type": "kimi_k3"}'}, "line 269"),
        ({"tiktoken.model": b"QQ== 0\nQQ== 1\n", "config.json": b'{"model_type": "kimi_k3"}'}, "one rank"),
        ({"tiktoken.model": b"QQ== 0\nQg== 2\n", "config.json": b'{"model_type": "kimi_k3"}'}, "one rank"),
        ({"tiktoken.model": b"QQ== 0\n", "config.json": b'{"model_type": "kimi_k3"}'}, "single bytes"),
        ({"tiktoken.model": b"", "config.json": b'{"model_type": "kimi_k3"}'}, "single bytes"),
        ({"tiktoken.model": rank_lines(), "config.json": b'{"model_type": "kimi_k3", "bos_token_id": 163584}'}, "cut short"),
        (
            {"tiktoken.model": rank_lines(), "tokenizer_config.json": b'{"added_tokens_decoder": {"999": {"content": "[BOS]"}}}'},
            "cut short",
        ),
        ({"tokenizer_config.json": b'{"perilune_kind": "bpe"}'}, "cannot read"),
        ({"tokenizer_config.json": b'{"perilune_kind": "wordpiece"}'}, "found 'wordpiece'"),
        ({"tokenizer_config.json": b'{"perilune_kind": "bpe"}', "tokenizer.json": b"{}"}, "not a tokenizer file"),
        ({"tokenizer_config.json": b'{"perilune_kind": "bpe"}', "tokenizer.json": b"\xff\xfe\x00"}, "not valid JSON"),
    ],
)
def test_a_bad_directory_is_refused_in_one_sentence(files: dict[str, bytes], complaint: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint) as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refusal.value)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_tokenizer_file_is_refused_or_whole(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    BPE.save(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    place = data.draw(st.sampled_from(["cut", "added", "token", "byte", "model", "kind"]))
    if place == "cut":
        whole = (directory / "tokenizer.json").read_bytes()
        (directory / "tokenizer.json").write_bytes(whole[: data.draw(st.integers(0, len(whole) - 3))])
    elif place == "kind":
        (directory / "tokenizer_config.json").write_text('{"perilune_kind": "byte"}')
    else:
        if place == "added":
            content["added_tokens"] = data.draw(st.sampled_from([None, [], [1], content["added_tokens"][1:]]))
        elif place == "token":
            content["model"]["vocab"]["漢"] = len(content["model"]["vocab"])
        elif place == "byte":
            del content["model"]["vocab"]["A"]
        else:
            content["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
        (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError):
        load_tokenizer(directory)


def test_ranks_are_read_from_a_missing_file_with_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_ranks(tmp_path / "tiktoken.model")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BYTES.save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        BPE.save(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
