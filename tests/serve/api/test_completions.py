import codecs
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.serve.api.completion_reader import CompletionReader, TextPiece
from perilune.serve.generation import SampledToken
from tests.serve.api.fake_engine import NAME, TOKENIZER, FakeEngine, completion_ids, logprob, post, stream, text_ids
from tests.serve.api.test_stop_text import slow_twin

PATH = "/v1/completions"


def body(**fields: object) -> dict[str, object]:
    return {"model": NAME, "prompt": "Once", **fields}


def complete(engine: FakeEngine, **fields: object) -> dict[str, Any]:
    answer = post(engine, PATH, body(**fields))
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def test_a_completion_is_the_text_up_to_the_models_end() -> None:
    engine = FakeEngine(completion_ids("upon é"))
    whole = complete(engine)
    assert whole["object"] == "text_completion" and whole["model"] == NAME and whole["id"].startswith("cmpl-")
    assert whole["choices"] == [{"index": 0, "text": "upon é", "finish_reason": "stop", "logprobs": None}]
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}


@pytest.mark.parametrize("end", [TOKENIZER.eos_id, TOKENIZER.end_of_message_id])
def test_both_ends_of_the_model_end_a_completion_and_neither_is_shown(end: int) -> None:
    assert complete(FakeEngine([*text_ids("a"), end]))["choices"][0] == {
        "index": 0,
        "text": "a",
        "finish_reason": "stop",
        "logprobs": None,
    }


def test_with_ignore_eos_the_model_goes_on_after_its_end_and_the_end_is_not_shown() -> None:
    choice = complete(FakeEngine(completion_ids("a")), ignore_eos=True, max_tokens=4)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a..", "length")


def test_special_tokens_have_no_text_and_text_that_spells_one_has() -> None:
    ids = [TOKENIZER.special_id("<|open|>"), *text_ids("<|open|>"), TOKENIZER.special_id("<|sep|>"), *completion_ids("a")]
    assert complete(FakeEngine(ids))["choices"][0]["text"] == "<|open|>a"


def test_a_text_prompt_is_plain_text_and_ids_are_taken_as_they_are() -> None:
    engine = FakeEngine(completion_ids("a"))
    complete(engine, prompt="[BOS]<|open|>é")
    assert list(engine.requests[-1].prompt_ids) == text_ids("[BOS]<|open|>é")
    assert TOKENIZER.special_id("<|open|>") not in engine.requests[-1].prompt_ids
    complete(engine, prompt=[256, 257, 5])
    assert engine.requests[-1].prompt_ids == (256, 257, 5)


@pytest.mark.parametrize("prompts", [["a", "bcd"], [[1], [2, 3, 4]]])
def test_a_batch_has_n_choices_per_prompt_in_the_order_of_the_prompts(prompts: list[object]) -> None:
    engine = FakeEngine(*(completion_ids(text) for text in ("a0", "a1", "b0", "b1")))
    whole = complete(engine, prompt=prompts, n=2, seed=3, return_token_ids=True)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert [len(request.prompt_ids) for request in engine.requests] == [1, 1, 3, 3]
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [list(request.prompt_ids) for request in engine.requests]
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == seeds[2] == 3 and seeds[1] == seeds[3] != 3  # an answer does not depend on what else is in the batch
    assert whole["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


def test_bytes_of_a_character_that_the_limit_cuts_off_are_dropped() -> None:
    ids = text_ids("a🤔")
    for limit in range(1, 5):
        assert complete(FakeEngine(ids), max_tokens=limit)["choices"][0]["text"] == "a"
    assert complete(FakeEngine(ids), max_tokens=5)["choices"][0]["text"] == "a🤔"


def test_a_stop_token_of_the_request_ends_the_completion_unseen() -> None:
    whole = complete(FakeEngine(text_ids("abc")), stop_token_ids=[ord("c")], return_token_ids=True)
    assert whole["choices"][0]["text"] == "ab" and whole["choices"][0]["finish_reason"] == "stop"
    assert whole["choices"][0]["token_ids"] == text_ids("abc")


def test_ids_that_the_tokenizer_does_not_have_are_tokens_without_text() -> None:
    whole = complete(FakeEngine([ord("a"), 999, *completion_ids("b")]), logprobs=0)
    assert whole["choices"][0]["text"] == "ab"
    assert whole["choices"][0]["logprobs"]["tokens"] == ["a", "", "b", "[EOS]"]


def test_after_a_stop_string_the_engine_is_let_go_and_later_tokens_do_not_count() -> None:
    engine = FakeEngine(text_ids("one two three"))
    whole = complete(engine, stop=["two"], logprobs=1, return_token_ids=True, max_tokens=100)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
    assert choice["token_ids"] == text_ids("one two")
    assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == 7
    assert engine.left == [engine.requests[0].request_id]


def test_logprobs_have_the_form_of_completions() -> None:
    logprobs = complete(FakeEngine(completion_ids("aé")), logprobs=2)["choices"][0]["logprobs"]
    ids = completion_ids("aé")
    zero, one = logprob(0), logprob(1)
    assert logprobs == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "[EOS]"],
        "token_logprobs": [logprob(token_id) for token_id in ids],
        "top_logprobs": [
            {"\x00": zero, "\x01": one, "a": logprob(97)},
            {"\x00": zero, "\x01": one, "bytes:\\xc3": logprob(0xC3)},
            {"\x00": zero, "\x01": one, "bytes:\\xa9": logprob(0xA9)},
            {"\x00": zero, "\x01": one, "[EOS]": logprob(257)},
        ],
        "text_offset": [0, 1, 1, 2],
    }
    alone = complete(FakeEngine(completion_ids("a")), logprobs=0)["choices"][0]["logprobs"]
    assert alone["top_logprobs"] == [{"a": logprob(97)}, {"[EOS]": logprob(257)}]


def test_a_probability_of_zero_has_a_logprob_that_json_can_say() -> None:
    class Certain(FakeEngine):
        def _top(self, token_id: int, number: int) -> tuple[tuple[int, float], ...]:
            return ((token_id, 0.0), (1, float("-inf")))

    logprobs = complete(Certain(completion_ids("a")), logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {"a": 0.0, "\x01": -9999.0}


def test_a_stream_joins_to_the_whole_completion() -> None:
    fields = {"prompt": ["a", "b"], "n": 2, "logprobs": 1, "return_token_ids": True, "stop": "!", "max_tokens": 50}
    texts = ["one é", "two!", "three", "four🤔! five"]
    whole = complete(FakeEngine(*map(completion_ids, texts)), **fields)
    events = stream(FakeEngine(*map(completion_ids, texts)), PATH, body(**fields, stream_options={"include_usage": True}))
    *events, last = events
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all("usage" not in event and event["object"] == "text_completion" for event in events)
    for wanted in whole["choices"]:
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == wanted["index"]]
        assert len(choices) > 3
        assert "".join(choice["text"] for choice in choices) == wanted["text"]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [wanted["finish_reason"]]
        assert [token_id for choice in choices for token_id in choice["token_ids"]] == wanted["token_ids"]
        for name, values in wanted["logprobs"].items():
            assert [value for choice in choices for value in choice["logprobs"][name]] == values
        assert [choice.get("prompt_token_ids") for choice in choices] == [wanted["prompt_token_ids"]] + [None] * (len(choices) - 1)
    assert [choice["text"] for choice in whole["choices"]] == ["one é", "two", "three", "four🤔"]


def read(ids: Sequence[int], stop: list[str]) -> list[TextPiece]:
    reader = CompletionReader(TOKENIZER, stop, ())
    pieces = []
    for token_id in ids:
        pieces.append(reader.push(SampledToken(token_id, 0.0, 0)))
        if reader.is_over:
            break
    return [*pieces, reader.finish("stop")]


@settings(max_examples=200, deadline=None)
@given(st.text("ab🤔é", max_size=8), st.lists(st.text("ab🤔é", min_size=1, max_size=3), max_size=3), st.integers(0, 3))
def test_stop_strings_are_met_across_tokens_and_no_character_is_cut(text: str, stop: list[str], missing: int) -> None:
    ids = text_ids(text)
    ids = ids[: len(ids) - missing] if missing else ids
    decoded = bytes(ids).decode(errors="ignore")
    pieces = read(ids, stop)
    wanted, is_met = slow_twin(decoded, stop)
    assert "".join(piece.text for piece in pieces) == wanted
    if is_met:
        completed = min(end for end in range(len(ids) + 1) if slow_twin(bytes(ids[:end]).decode(errors="ignore"), stop)[1])
        ids = ids[:completed]
    assert [piece.token.id for piece in pieces if piece.token is not None] == ids
    lengths = [len(bytes(ids[:place]).decode(errors="ignore")) for place in range(len(ids))]
    assert [piece.offset for piece in pieces[:-1]] == lengths


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 2), max_size=12))
def test_without_stop_strings_the_text_is_that_of_all_text_tokens(ids: list[int]) -> None:
    shown = "".join(piece.text for piece in read([token_id for token_id in ids if token_id < 256], []))
    unfinished_dropped = codecs.getincrementaldecoder("utf-8")(errors="replace")
    assert shown == unfinished_dropped.decode(bytes(token_id for token_id in ids if token_id < 256))
    read(ids, ["a"])
