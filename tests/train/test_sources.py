"""From a recipe to tokenizer, tokens and network."""

from pathlib import Path

import pytest

from perilune.errors import UserError
from perilune.model.tokenizer import BpeTokenizer, ByteTokenizer, load_tokenizer
from perilune.train import token_store
from perilune.train.sources import bytes_per_token, prepare
from tests.train.tiny_runs import recipe_tables, recipe_with

SPECIALS = ByteTokenizer().vocab_size - 256


def test_a_corpus_becomes_two_parts_that_spell_all_its_text(tmp_path: Path) -> None:
    found = prepare(recipe_with(tmp_path), None)
    assert isinstance(found.tokenizer, ByteTokenizer) and found.cut
    texts = [
        found.tokenizer.decode(part.document(index)[:-1].tolist()) for part in (found.train, found.held_out) for index in range(len(part))
    ]
    assert sorted(texts) == sorted(path.read_text() for path in (tmp_path / "corpus").iterdir())
    assert {int(part.document(index)[-1]) for part in (found.train, found.held_out) for index in range(len(part))} == {
        found.tokenizer.eos_id
    }
    assert f"{found.train.num_tokens:,} tokens to train on, {found.held_out.num_tokens:,} held out" in found.summary


def test_a_bpe_is_trained_on_the_corpus_and_is_the_same_each_time(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, tokenizer={"kind": "bpe", "vocab_size": 300})
    found, again = prepare(recipe, None), prepare(recipe, None)
    assert isinstance(found.tokenizer, BpeTokenizer) and 256 + SPECIALS < found.tokenizer.vocab_size <= 300
    assert found.train.tokens.tolist() == again.train.tokens.tolist()
    assert found.train.num_tokens < prepare(recipe_with(tmp_path), None).train.num_tokens


def test_a_resumed_run_takes_the_tokenizer_it_is_given(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, tokenizer={"kind": "bpe", "vocab_size": 300})
    first = prepare(recipe, None)
    first.tokenizer.save(tmp_path / "kept")
    for path in (tmp_path / "corpus").iterdir():
        path.write_text(path.read_text() + "zyzzyva " * 40)  # a tokenizer trained on this would be another
    resumed = prepare(recipe, tmp_path / "kept")
    assert bytes_per_token(resumed.tokenizer) == bytes_per_token(first.tokenizer)
    assert bytes_per_token(resumed.tokenizer) != bytes_per_token(prepare(recipe, None).tokenizer)


def test_a_tokenizer_may_come_from_a_directory(tmp_path: Path) -> None:
    BpeTokenizer.train(["banana banana banana"], 300).save(tmp_path / "tokenizer")
    found = prepare(recipe_with(tmp_path, tokenizer={"kind": "directory", "directory": str(tmp_path / "tokenizer")}), None)
    assert bytes_per_token(found.tokenizer) == bytes_per_token(load_tokenizer(tmp_path / "tokenizer"))
    with pytest.raises(UserError, match="holds no tokenizer"):
        prepare(recipe_with(tmp_path, tokenizer={"kind": "directory", "directory": str(tmp_path)}), None)


def test_tokens_are_cached_for_one_tokenizer_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = {**recipe_tables(tmp_path)["corpus"], "cache_directory": str(tmp_path / "cache")}
    prepare(recipe_with(tmp_path, corpus=corpus), None)
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 2
    prepare(recipe_with(tmp_path, corpus=corpus, tokenizer={"kind": "bpe", "vocab_size": 300}), None)
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 4
    monkeypatch.setattr(token_store, "_encode_all", pytest.fail)
    prepare(recipe_with(tmp_path, corpus=corpus), None)


def test_special_tokens_spell_no_bytes() -> None:
    lengths = bytes_per_token(ByteTokenizer())
    assert lengths == [1] * 256 + [0] * SPECIALS
    bpe = BpeTokenizer.train(["banana banana banana"], 300)
    assert bytes_per_token(bpe)[: bpe.num_text_tokens] == [len(bpe.token_bytes(token)) for token in range(bpe.num_text_tokens)]


def test_conversations_are_never_cut_and_some_must_be_held_out(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(
        "".join(f'{{"messages": [{{"role": "user", "content": "{n}"}}, {{"role": "assistant", "content": "yes"}}]}}\n' for n in range(30))
    )
    found = prepare(recipe_with(tmp_path, corpus=None, chat={"path": str(path), "held_out_fraction": 0.2}), None)
    assert not found.cut and found.train.target_mask is not None and found.held_out.target_mask is not None
    assert len(found.train) + len(found.held_out) == 30 and len(found.held_out) > 0
    assert found.summary == f"{len(found.train)} conversations, {len(found.held_out)} held out"
    with pytest.raises(UserError, match=r"chat\.held_out_fraction is 0"):
        prepare(recipe_with(tmp_path, corpus=None, chat={"path": str(path), "held_out_fraction": 0.0}), None)
