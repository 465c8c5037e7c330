"""The published Kimi vocabulary: a local `tiktoken.model` rank file, Kimi's word split, and one of two special-token families.

The rank file is the same for Kimi K2, Kimi Linear and Kimi K3; what the 256 ids after the ranks mean is not, so the
family is always said (`special_tokens.py`). Nothing here uses the network.
"""

import base64
import binascii
import re
from pathlib import Path

import tiktoken

from perilune.errors import UserError
from perilune.model.special_tokens import FAMILIES, SpecialTokenFamily
from perilune.model.tokenizer_files import read_bytes, write_atomically, write_json
from perilune.model.vocabulary import Tokenizer

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
FAMILY_KEY = "perilune_special_tokens"

MAX_PIECE_CHARACTERS = 400_000
"""Text is cut into pieces of at most this many characters before it is encoded: longer ones overflow tiktoken's stack."""

MAX_RUN_CHARACTERS = 25_000
"""Within a piece, runs of space or of non-space characters are cut after this many: the split pattern backtracks over them."""

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        _BEFORE_WORD + _UPPER + "*" + _LOWER + "+" + _CONTRACTION,
        _BEFORE_WORD + _UPPER + "+" + _LOWER + "*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Kimi's split of text into words, tried in this order: it decides the ids, so it must be exactly that of the published tokenizer."""

_RUNS = re.compile(r"\s+|\S+")


class TiktokenTokenizer(Tokenizer):
    """A `tiktoken.model` rank file with the special tokens of `family` at the 256 ids after its ranks."""

    def __init__(self, ranks: dict[bytes, int], family: SpecialTokenFamily) -> None:
        """`ranks`: token bytes to id, 0 … n - 1 without gaps, all 256 single bytes among them (as `read_ranks` checks)."""
        self.family = family
        self._bytes = sorted(ranks, key=ranks.__getitem__)
        # Without special tokens: the text encoder cannot produce what it does not know.
        self._text_encoding = tiktoken.Encoding(family.name, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
        super().__init__(len(ranks), family.names(len(ranks)), family.end_of_message)

    @classmethod
    def from_file(cls, path: Path | str, family: SpecialTokenFamily) -> "TiktokenTokenizer":
        """Read a rank file. Raises `UserError` if it is missing, cut short or malformed."""
        return cls(read_ranks(Path(path)), family)

    def _encode_utf8_text(self, text: str) -> list[int]:
        if len(text) <= MAX_RUN_CHARACTERS:
            return self._text_encoding.encode_ordinary(text)
        pieces = cut_text(text, MAX_PIECE_CHARACTERS, MAX_RUN_CHARACTERS)
        return [token_id for piece in pieces for token_id in self._text_encoding.encode_ordinary(piece)]

    def _text_token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def save(self, directory: Path | str) -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(self._bytes))
        write_atomically(directory / RANKS_FILE, b"".join(lines))
        write_json(
            directory / CONFIG_FILE,
            {
                FAMILY_KEY: self.family.name,
                "bos_token": "[BOS]",
                "eos_token": self.family.end_of_message,
                "unk_token": "[UNK]",
                "pad_token": "[PAD]",
                "added_tokens_decoder": {
                    str(self.num_text_tokens + offset): {"content": name, "special": True} for name, offset in self.family.offsets.items()
                },
            },
        )


def cut_text(text: str, max_piece: int, max_run: int) -> list[str]:
    """Cut `text` as the published tokenizer does before it splits words; the cuts can decide ids, so they are part of the format.

    First into pieces of `max_piece` characters; within each, a run of space characters or of other characters longer
    than `max_run` is cut after every `max_run` of them.
    """
    pieces = []
    for start in range(0, len(text), max_piece):
        piece = text[start : start + max_piece]
        begin = 0
        for run in _RUNS.finditer(piece):
            for cut in range(run.start() + max_run, run.end(), max_run):
                pieces.append(piece[begin:cut])
                begin = cut
        pieces.append(piece[begin:])
    return pieces


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to rank, from a file of lines `base64 rank`.

    Raises `UserError` if the file is missing, a line is malformed, ranks have gaps, or a single byte has no rank.
    """
    ranks: dict[bytes, int] = {}
    lines = read_bytes(path).splitlines()
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            ranks[base64.b64decode(encoded, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise UserError(f"{path} line {number} is not a token in base64 and its rank: the file is damaged, fetch it again") from None
    if sorted(ranks.values()) != list(range(sum(map(bool, lines)))):
        raise UserError(f"{path} does not give each of its {len(lines)} tokens one rank, from 0 without gaps: fetch it again")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise UserError(f"{path} lacks {len(missing)} of the 256 single bytes (first: {missing[0]}); it may be cut short: fetch it again")
    return ranks


def load_tiktoken_tokenizer(directory: Path, tokenizer_config: dict[str, object], model_config: dict[str, object]) -> TiktokenTokenizer:
    """The `tiktoken.model` in a Hub directory, with the family its other files say.

    `tokenizer_config`, `model_config`: the directory's tokenizer_config.json and config.json, empty where it has none.
    Raises `UserError` if neither says which family of special tokens the directory uses.
    """
    ranks = read_ranks(directory / RANKS_FILE)
    bos_id = _announced_bos_id(tokenizer_config, model_config)
    if bos_id not in (None, len(ranks)):
        raise UserError(
            f"{directory / RANKS_FILE} holds {len(ranks)} tokens where the model's files say {bos_id} (its [BOS] id); "
            "it is cut short or another model's: fetch it again"
        )
    family = _family_of(len(ranks), tokenizer_config, model_config)
    if family is None:
        raise UserError(
            f"{directory} does not say which special tokens its {RANKS_FILE} goes with: "
            "put the model's config.json (model_type kimi_k3 or kimi_linear) or its tokenizer_config.json beside it"
        )
    return TiktokenTokenizer(ranks, family)


def _announced_bos_id(tokenizer_config: dict[str, object], model_config: dict[str, object]) -> int | None:
    """The first id after the ranks, by the model's other files: a rank file cut at a line's end looks whole otherwise."""
    named = tokenizer_config.get("added_tokens_decoder")
    if isinstance(named, dict):
        for token_id, entry in named.items():
            if isinstance(entry, dict) and entry.get("content") == "[BOS]" and token_id.isdecimal():
                return int(token_id)
    text_config = model_config.get("text_config")
    for config in (model_config, text_config if isinstance(text_config, dict) else {}):
        bos_id = config.get("bos_token_id")
        if isinstance(bos_id, int):
            return bos_id
    return None


def _family_of(num_ranks: int, tokenizer_config: dict[str, object], model_config: dict[str, object]) -> SpecialTokenFamily | None:
    """The tokenizer's own word first: a K3 text model alone has the model_type of Kimi Linear."""
    if isinstance(said := tokenizer_config.get(FAMILY_KEY), str):
        return FAMILIES.get(said)
    named = tokenizer_config.get("added_tokens_decoder")
    if isinstance(named, dict):
        for family in FAMILIES.values():
            entry = named.get(str(num_ranks + family.offsets[family.end_of_message]))
            if isinstance(entry, dict) and entry.get("content") == family.end_of_message:
                return family
    by_model_type = {"kimi_k3": "kimi_k3", "kimi_linear": "kimi_k2", "kimi_k2": "kimi_k2"}
    return FAMILIES.get(by_model_type.get(str(model_config.get("model_type")), ""))
