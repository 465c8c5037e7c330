"""Vocabularies: the one place to import them from, and `load_tokenizer`, which finds out what a directory holds.

`vocabulary.py` has the interface, `bpe_vocabulary.py` our own small vocabularies, `tiktoken_vocabulary.py` the
published one, `special_tokens.py` the names of special tokens per family.
"""

from pathlib import Path

from perilune.errors import UserError
from perilune.model.bpe_vocabulary import CONFIG_FILE, KIND_KEY, BpeTokenizer, ByteTokenizer, load_small_tokenizer
from perilune.model.special_tokens import KIMI_K2, KIMI_K3, SpecialTokenFamily
from perilune.model.tiktoken_vocabulary import RANKS_FILE, TiktokenTokenizer, load_tiktoken_tokenizer
from perilune.model.tokenizer_files import read_json_object
from perilune.model.vocabulary import Segment, StreamDecoder, Tokenizer

__all__ = [
    "KIMI_K2",
    "KIMI_K3",
    "BpeTokenizer",
    "ByteTokenizer",
    "Segment",
    "SpecialTokenFamily",
    "StreamDecoder",
    "TiktokenTokenizer",
    "Tokenizer",
    "load_tokenizer",
]


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """The tokenizer of a Hub directory: one that `Tokenizer.save` wrote, or a published `tiktoken.model`.

    Raises `UserError` if the directory holds neither, or a file of it is missing, cut short or malformed.
    """
    directory = Path(directory)
    tokenizer_config = _optional_json(directory / CONFIG_FILE)
    kind = tokenizer_config.get(KIND_KEY)
    if kind in (ByteTokenizer.kind, BpeTokenizer.kind):
        return load_small_tokenizer(directory, str(kind))
    if kind is None and (directory / RANKS_FILE).exists():
        return load_tiktoken_tokenizer(directory, tokenizer_config, _optional_json(directory / "config.json"))
    raise UserError(
        f"{directory} holds no tokenizer Perilune can read: expected {RANKS_FILE}, "
        f"or {CONFIG_FILE} with {KIND_KEY} 'byte' or 'bpe'" + (f" (found {kind!r})" if kind is not None else "")
    )


def _optional_json(path: Path) -> dict[str, object]:
    return read_json_object(path) if path.exists() else {}
