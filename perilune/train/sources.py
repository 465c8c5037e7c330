"""From a recipe to what training reads: the tokenizer and the tokens of both splits."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.errors import UserError
from perilune.model.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer
from perilune.train.chat_data import read_conversations, split_conversations, tokenize_conversations
from perilune.train.corpus import CorpusSettings, Document, load_corpus, split_documents
from perilune.train.packing import TokenDocuments
from perilune.train.recipe import Recipe, TokenizerSettings
from perilune.train.token_store import tokenize_corpus


@dataclass(frozen=True)
class Sources:
    """What a run reads. `cut`: documents may be cut to pieces (text), or not (conversations)."""

    tokenizer: Tokenizer
    train: TokenDocuments
    held_out: TokenDocuments
    cut: bool
    summary: str


def prepare(recipe: Recipe, tokenizer_directory: Path | None) -> Sources:
    """Read the recipe's data. With `tokenizer_directory` (a resumed run) the tokenizer is loaded from there instead of made."""
    if recipe.corpus is not None:
        return _from_corpus(recipe, recipe.corpus, tokenizer_directory)
    assert recipe.chat is not None
    tokenizer = load_tokenizer(tokenizer_directory) if tokenizer_directory else _tokenizer(recipe, ())
    train, held_out = split_conversations(read_conversations(recipe.chat.path), recipe.chat.held_out_fraction)
    if not held_out:
        raise UserError("chat.held_out_fraction is 0: training reports bits per byte on held-out conversations, so keep a part")
    summary = f"{len(train)} conversations, {len(held_out)} held out"
    return Sources(tokenizer, tokenize_conversations(train, tokenizer), tokenize_conversations(held_out, tokenizer), False, summary)


def _from_corpus(recipe: Recipe, settings: CorpusSettings, tokenizer_directory: Path | None) -> Sources:
    corpus = load_corpus(settings)
    split = split_documents(corpus.documents, settings.held_out_fraction)
    if not split.held_out:
        raise UserError("corpus.held_out_fraction is 0: training reports bits per byte on held-out text, so keep a part")
    tokenizer = load_tokenizer(tokenizer_directory) if tokenizer_directory else _tokenizer(recipe, split.train)
    cache = settings.cache_directory
    fingerprint = _fingerprint(tokenizer) if cache else ""
    train, held_out = (
        tokenize_corpus(part, tokenizer, tokenizer.eos_id, cache, tokenizer_fingerprint=fingerprint)
        for part in (split.train, split.held_out)
    )
    text = f"{len(corpus.documents)} documents, {corpus.num_bytes / 1e6:.1f} MB"
    summary = f"{text}: {train.num_tokens:,} tokens to train on, {held_out.num_tokens:,} held out"
    return Sources(tokenizer, train, held_out, True, summary)


def _tokenizer(recipe: Recipe, documents: Sequence[Document]) -> Tokenizer:
    if recipe.model.init_from is not None:
        return load_tokenizer(recipe.model.init_from)
    settings = recipe.tokenizer
    assert settings is not None
    if settings.kind == "byte":
        return ByteTokenizer()
    if settings.kind == "directory":
        assert settings.directory is not None
        return load_tokenizer(settings.directory)
    return BpeTokenizer.train(_sample(documents, settings), settings.vocab_size)


def _sample(documents: Sequence[Document], settings: TokenizerSettings) -> list[str]:
    """Texts for the BPE, evenly spread over the documents."""
    total = sum(len(d.text) for d in documents)
    stride = max(1, total // settings.sample_bytes)
    return [d.text for d in documents[::stride]]


def _fingerprint(tokenizer: Tokenizer) -> str:
    """A digest of the vocabulary."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    for token in range(tokenizer.num_text_tokens):
        piece = tokenizer.token_bytes(token)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    digest.update("\0".join(tokenizer.special_names).encode())
    return digest.hexdigest()


def bytes_per_token(tokenizer: Tokenizer) -> list[int]:
    """UTF-8 bytes that each id of the vocabulary spells; 0 for special tokens."""
    special = [0] * (tokenizer.vocab_size - tokenizer.num_text_tokens)
    return [len(tokenizer.token_bytes(i)) for i in range(tokenizer.num_text_tokens)] + special
