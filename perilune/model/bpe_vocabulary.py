"""Our own small vocabularies: bytes, and byte-level BPE trained with the `tokenizers` library.

Both are saved as the `tokenizer.json` that `tokenizers` and `PreTrainedTokenizerFast` read (bytes are a BPE without
merges), with the special tokens as added tokens. In memory the text vocabulary is held *without* them, so encoding text
cannot produce one. Note that other readers of the file do turn spelled specials into ids: that is their choice.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HfTokenizer

from perilune.errors import UserError
from perilune.model.special_tokens import END_OF_MESSAGE, SMALL_SPECIALS
from perilune.model.tokenizer_files import read_json_object, write_json
from perilune.model.vocabulary import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
KIND_KEY = "perilune_kind"

# A word with at most one character (a space, say) before it; one digit; punctuation; line breaks; other space. Every
# character falls into one of them, so nothing is lost, and a digit is always a token of its own.
_SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE files write for each byte value (the GPT-2 convention)."""
    kept = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(stand_ins)) for byte in range(256)]


_BYTE_TO_CHARACTER = _byte_characters()
_CHARACTER_TO_BYTE = {character: byte for byte, character in enumerate(_BYTE_TO_CHARACTER)}


def _text_vocabulary(vocab: dict[str, int], merges: list[tuple[str, str]]) -> HfTokenizer:
    text_vocabulary = HfTokenizer(models.BPE(vocab=vocab, merges=merges))
    _set_byte_level(text_vocabulary)
    return text_vocabulary


def _set_byte_level(text_vocabulary: HfTokenizer) -> None:
    """Split into words, then write bytes as characters: no normaliser, no prefix space, so decoding gives the text back."""
    text_vocabulary.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    text_vocabulary.decoder = decoders.ByteLevel()


class _SmallTokenizer(Tokenizer):
    """What the byte and the BPE vocabulary share: K3's special names at the end of the range, and the file format."""

    kind: str

    def __init__(self, text_vocabulary: HfTokenizer) -> None:
        self.text_vocabulary = text_vocabulary
        vocab = text_vocabulary.get_vocab(with_added_tokens=False)
        if sorted(vocab.values()) != list(range(len(vocab))):
            raise UserError(f"the vocabulary's ids are not 0 to {len(vocab) - 1} without gaps: the file is damaged, save it again")
        if missing := [byte for byte, character in enumerate(_BYTE_TO_CHARACTER) if character not in vocab]:
            raise UserError(f"the vocabulary lacks {len(missing)} of the 256 single bytes (first: {missing[0]}): save it again")
        if foreign := next((token for token in vocab if not _CHARACTER_TO_BYTE.keys() >= set(token)), None):
            raise UserError(f"the vocabulary's token {foreign!r} is not byte-level: use a tokenizer that Perilune saved")
        self._bytes = [b""] * len(vocab)
        for token, token_id in vocab.items():
            self._bytes[token_id] = bytes(_CHARACTER_TO_BYTE[character] for character in token)
        super().__init__(len(vocab), SMALL_SPECIALS, END_OF_MESSAGE)

    def _encode_utf8_text(self, text: str) -> list[int]:
        return self.text_vocabulary.encode(text, add_special_tokens=False).ids

    def _text_token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def save(self, directory: Path | str) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        content = json.loads(self.text_vocabulary.to_str())
        content["added_tokens"] = [
            {
                "id": self.num_text_tokens + place,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for place, name in enumerate(self.special_names)
        ]
        write_json(directory / TOKENIZER_FILE, content)
        write_json(
            directory / CONFIG_FILE,
            {
                KIND_KEY: self.kind,
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "[BOS]",
                "eos_token": END_OF_MESSAGE,
                "unk_token": "[UNK]",
                "pad_token": "[PAD]",
                "clean_up_tokenization_spaces": False,
            },
        )


class ByteTokenizer(_SmallTokenizer):
    """256 bytes and the special tokens: id `b` is the byte `b`."""

    kind = "byte"

    def __init__(self) -> None:
        super().__init__(_text_vocabulary({character: byte for byte, character in enumerate(_BYTE_TO_CHARACTER)}, []))

    def _encode_utf8_text(self, text: str) -> list[int]:
        return list(text.encode())


class BpeTokenizer(_SmallTokenizer):
    """Byte-level BPE: digits are single tokens, no normaliser, no prefix space, lossless for every text UTF-8 can carry."""

    kind = "bpe"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        """Learn a vocabulary of `vocab_size` tokens, special tokens included, from `texts`; the same texts give the same one.

        Texts too short to learn that many pairs (each seen twice or more) give a smaller vocabulary: read `vocab_size` of the result.
        Raises `UserError` if `vocab_size` cannot hold the 256 bytes and the special tokens.
        """
        smallest = 256 + len(SMALL_SPECIALS)
        if vocab_size < smallest:
            raise UserError(
                f"vocab_size {vocab_size} is too small: 256 bytes and {len(SMALL_SPECIALS)} special tokens need at least {smallest}"
            )
        text_vocabulary = HfTokenizer(models.BPE())
        _set_byte_level(text_vocabulary)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(SMALL_SPECIALS),
            min_frequency=2,
            show_progress=False,
            initial_alphabet=_BYTE_TO_CHARACTER,
        )
        text_vocabulary.train_from_iterator(texts, trainer=trainer)
        return cls(text_vocabulary)


def load_small_tokenizer(directory: Path, kind: str) -> Tokenizer:
    """Read the byte or BPE vocabulary that `save` wrote.

    Raises `UserError` if `tokenizer.json` is missing, cut short, not a byte-level BPE, or has other special tokens than ours.
    """
    path = directory / TOKENIZER_FILE
    content = read_json_object(path)
    added = content.get("added_tokens")
    try:
        text_vocabulary = HfTokenizer.from_str(json.dumps({**content, "added_tokens": []}))
    except Exception as error:  # the library raises bare Exception for every kind of malformed content
        raise UserError(f"{path} is not a tokenizer file ({error}): save the tokenizer again") from None
    if not isinstance(text_vocabulary.model, models.BPE):
        raise UserError(f"{path} holds a {type(text_vocabulary.model).__name__} model, not byte-level BPE: save the tokenizer again")
    tokenizer = ByteTokenizer() if kind == ByteTokenizer.kind else BpeTokenizer(text_vocabulary)
    if text_vocabulary.get_vocab() != tokenizer.text_vocabulary.get_vocab():
        raise UserError(f"{path} does not hold the byte vocabulary that {CONFIG_FILE} announces: save the tokenizer again")
    if _added_ids(added) != {name: tokenizer.special_id(name) for name in SMALL_SPECIALS}:
        raise UserError(f"{path} lacks the {len(SMALL_SPECIALS)} special tokens at the end of its id range: save the tokenizer again")
    return tokenizer


def _added_ids(added: Any) -> dict[Any, Any]:
    tokens = added if isinstance(added, list) else []
    return {token.get("content"): token.get("id") for token in tokens if isinstance(token, dict)}
