"""The engine from outside: what a request gets does not depend on its company, and nothing is lost or kept too long."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.bench.agreement import read_as_trainer
from perilune.errors import UserError
from perilune.serve import runner
from perilune.serve.engine import Engine, EngineSettings
from perilune.serve.generation import EngineBusyError, Finished, GenerationError, GenerationRequest, SampledToken, SamplingParams
from perilune.serve.sequence import Sequence
from tests.model.tiny_models import kimi_linear_config, random_model
from tests.serve.small_engines import LENGTH, Collected, prompt, request, run_to_end, small_engine, small_model

MODEL = small_model(torch.float64)


@st.composite
def crowds(draw):
    """Requests, and the step before which each arrives; some are aborted by the step given."""
    count = draw(st.integers(1, 7))
    requests = [
        request(
            draw(st.integers(1, 150)), seed, max_tokens=draw(st.integers(1, 12)), temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_p=draw(st.sampled_from([0.8, 1.0])), record_experts=draw(st.booleans()),
        )
        for seed in range(count)
    ]  # fmt: skip
    arrivals = draw(st.lists(st.integers(0, 10), min_size=count, max_size=count))
    aborts = draw(st.dictionaries(st.integers(0, count - 1), st.integers(0, 20), max_size=2))
    return requests, arrivals, aborts


@given(crowd=crowds(), slots=st.integers(1, 4), budget=st.sampled_from([64, 128]))
@settings(max_examples=15, deadline=None)
def test_a_request_gets_the_same_tokens_alone_and_in_any_company(crowd, slots, budget):
    requests, arrivals, aborts = crowd
    alone = [run_to_end(small_engine(MODEL), [r])[0] for r in requests]
    engine = small_engine(MODEL, max_sequences=slots, prefill_tokens=budget)
    collected = Collected(requests)
    step = 0
    while step <= 20 or engine.has_work:
        for r, arrival in zip(requests, arrivals, strict=True):
            if arrival == step:
                engine.add(r)
        collected.take(engine.abort([requests[i].request_id for i, when in aborts.items() if when == step]))
        collected.take(engine.step())
        engine.check()
        step += 1
    for i, (r, expected) in enumerate(zip(requests, alone, strict=True)):
        got = collected.generation(r)
        kept = len(got.tokens)
        assert got.token_ids == expected.token_ids[:kept]
        assert got.logprobs == pytest.approx(expected.logprobs[:kept], abs=1e-9)
        if i not in aborts:
            assert got.finished.reason == expected.finished.reason and kept == len(expected.tokens)
        else:
            assert got.finished.reason in ("abort", expected.finished.reason)
        if got.finished.experts is not None:
            assert torch.equal(got.finished.experts, expected.finished.experts[: len(got.finished.experts)])


@pytest.mark.parametrize("model", [MODEL, random_model(kimi_linear_config())], ids=["k3", "kimi-linear"])
def test_logprobs_and_experts_are_those_of_one_forward_over_the_whole_sequence(model):
    requests = [request(n, n, record_experts=True, max_tokens=20) for n in (1, 3, 63, 64, 65, 130)]
    generations = run_to_end(small_engine(model), requests)
    reading = read_as_trainer(model, generations)
    for generation, expected, routed in zip(generations, reading.logprobs, reading.experts, strict=True):
        assert generation.logprobs == pytest.approx(expected.tolist(), abs=1e-9)
        assert torch.equal(generation.finished.experts, routed[:-1])
        assert generation.finished.experts.dtype == torch.int64


def test_greedy_takes_the_likeliest_token_and_the_top_list_begins_with_it():
    (generation,) = run_to_end(small_engine(MODEL), [request(9, temperature=0.0, top_logprobs=5, max_tokens=15)])
    for token in generation.tokens:
        assert token.top[0] == (token.id, token.logprob)
        assert len(token.top) == 5
        assert sorted(token.top, key=lambda pair: -pair[1]) == list(token.top)


def test_a_continued_request_goes_on_as_if_it_had_never_been_cut():
    """Partial rollouts: what was sampled comes back as the prompt, with the same seed."""
    whole = run_to_end(small_engine(MODEL), [request(20, 3, max_tokens=30)])[0]
    first = run_to_end(small_engine(MODEL), [request(20, 3, max_tokens=11)])[0]
    rest = GenerationRequest(first.request.prompt_ids + first.token_ids, SamplingParams(max_tokens=19, seed=3))
    second = run_to_end(small_engine(MODEL), [rest])[0]
    assert first.token_ids + second.token_ids == whole.token_ids


def test_requests_without_a_seed_differ():
    generations = run_to_end(small_engine(), [request(5, seed=None, max_tokens=30) for _ in range(3)])
    assert len({g.token_ids for g in generations}) == 3


@pytest.mark.parametrize("place", [0, 4])
def test_a_stop_token_ends_the_request_and_is_part_of_it(place):
    free = run_to_end(small_engine(MODEL), [request(8, 2, max_tokens=12)])[0]
    stop = free.token_ids[place]
    (stopped,) = run_to_end(small_engine(MODEL), [request(8, 2, max_tokens=12, stop_token_ids=(stop,))])
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finished.reason == "stop"


def test_a_request_ends_at_max_tokens_or_when_the_sequence_is_full():
    limited, full = run_to_end(small_engine(), [request(10, max_tokens=7), request(LENGTH - 4, max_tokens=None)])
    assert (len(limited.tokens), limited.finished.reason) == (7, "length")
    assert (len(full.tokens), full.finished.reason) == (4, "length")


def test_an_abort_keeps_the_tokens_and_frees_the_slot_for_the_next():
    engine = small_engine(MODEL, max_sequences=1)
    first, second = request(5, 1, max_tokens=50), request(6, 2, max_tokens=4)
    collected = Collected([first, second])
    for r in (first, second):
        engine.add(r)
    for _ in range(6):
        collected.take(engine.step())
    collected.take(engine.abort([first.request_id, "unknown", first.request_id]))
    cut = collected.generation(first)
    assert cut.finished == Finished("abort") and len(cut.tokens) == 6
    while engine.has_work:
        collected.take(engine.step())
        engine.check()
    assert collected.generation(second).token_ids == run_to_end(small_engine(MODEL), [second])[0].token_ids
    assert engine.abort([first.request_id]) == []


def test_an_abort_while_waiting_or_while_the_prompt_is_read_ends_without_tokens():
    engine = small_engine(max_sequences=1)
    reading, waiting = request(200, record_experts=True), request(3, record_experts=True)
    collected = Collected([reading, waiting])
    for r in (reading, waiting):
        engine.add(r)
    engine.step()
    collected.take(engine.abort([waiting.request_id, reading.request_id]))
    assert collected.ends[waiting.request_id] == Finished("abort")
    assert collected.ends[reading.request_id].experts.shape == (64, 4, 2)
    engine.check()
    assert not engine.has_work and engine.step() == []


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GenerationRequest(()), "the prompt is empty"),
        (GenerationRequest((1, 32)), "token id 32 is outside the model's vocabulary of 32"),
        (GenerationRequest((-1,)), "token id -1 is outside"),
        (GenerationRequest((2**80,)), "token id 1208925819614629174706176 is outside"),
        (GenerationRequest((1,), SamplingParams(stop_token_ids=(99,))), "token id 99 is outside"),
        (GenerationRequest(prompt(LENGTH)), "256 tokens and max_tokens 1 are more than the 256 tokens of this engine's longest sequence"),
        (GenerationRequest(prompt(200), SamplingParams(max_tokens=57)), "200 tokens and max_tokens 57 are more than the 256"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_the_reason(bad, message):
    engine = small_engine()
    with pytest.raises(UserError, match=message):
        engine.add(bad)
    engine.check()
    assert not engine.has_work


def test_the_id_of_a_running_request_cannot_be_used_again_until_it_ends():
    engine = small_engine()
    r = request(3, max_tokens=1)
    engine.add(r)
    with pytest.raises(UserError, match="is still running"):
        engine.add(r)
    engine.step()
    engine.add(r)


def test_a_full_queue_says_that_the_engine_is_busy():
    engine = small_engine(max_sequences=1, max_waiting=2)
    engine.add(request())
    engine.step()
    engine.add(request())
    engine.add(request())
    with pytest.raises(EngineBusyError, match="2 requests are waiting"):
        engine.add(request())


def test_new_weights_take_effect_in_the_next_step_and_every_token_says_which_it_came_from():
    engine = small_engine(small_model(seed=0))
    r = request(5, max_tokens=6)
    collected = Collected([r])
    engine.add(r)
    for _ in range(3):
        collected.take(engine.step())
    engine.update_weights(small_model(seed=1).state_dict(), 7)
    while engine.has_work:
        collected.take(engine.step())
    assert [t.weight_version for t in collected.tokens[r.request_id]] == [0, 0, 0, 7, 7, 7]
    assert engine.info().weight_version == 7
    fresh = run_to_end(engine, [request(9, 4, max_tokens=12)])[0]
    expected = run_to_end(small_engine(small_model(seed=1)), [request(9, 4, max_tokens=12)])[0]
    assert (fresh.token_ids, fresh.logprobs) == (expected.token_ids, expected.logprobs)


def test_weights_are_copied_not_shared():
    engine, trained = small_engine(), small_model(seed=1)
    engine.update_weights(trained.state_dict(), 1)
    before = run_to_end(engine, [request(4, max_tokens=9)])[0]
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.zero_()
    assert run_to_end(engine, [request(4, max_tokens=9)])[0].logprobs == before.logprobs


def damaged(change) -> dict[str, torch.Tensor]:
    weights = {name: tensor.clone() for name, tensor in small_model(seed=1).state_dict().items()}
    change(weights)
    return weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("norm.weight"), "lack 'norm.weight'"),
        (lambda w: w.update(extra=torch.zeros(1)), "hold 'extra'"),
        (lambda w: w.update({"norm.weight": torch.zeros(3)}), r"'norm.weight' is torch.float32 \(3,\), this model's torch.float32 \(16,\)"),
        (lambda w: w.update({"norm.weight": torch.zeros(16, dtype=torch.int64)}), "'norm.weight' is torch.int64"),
        (lambda w: w["lm_head.weight"].view(-1)[5:6].fill_(math.nan), "'lm_head.weight' holds a number that is not finite"),
        (lambda w: w.update({"norm.weight": torch.full((16,), 1e300, dtype=torch.float64)}), "not finite in torch.float32"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change, message):
    engine = small_engine()
    before = run_to_end(engine, [request(4, max_tokens=9)])[0]
    with pytest.raises(UserError, match=message):
        engine.update_weights(damaged(change), 3)
    assert engine.info().weight_version == 0
    assert run_to_end(engine, [request(4, max_tokens=9)])[0].logprobs == before.logprobs


def test_logits_that_are_not_finite_fail_their_own_request_alone_and_leave_no_trace():
    model = small_model()
    with torch.no_grad():
        model.embed_tokens.weight[31] = math.nan
        model.lm_head.weight[31] = 0  # never the likeliest: only the one prompt meets it
    engine = small_engine(model)
    sick = GenerationRequest((*prompt(80), 31), SamplingParams(max_tokens=5))
    healthy = [GenerationRequest(tuple(i % 31 for i in range(n)), SamplingParams(max_tokens=5, temperature=0)) for n in (70, 30)]
    collected = Collected([sick, *healthy])
    for r in (sick, *healthy):
        engine.add(r)
    while engine.has_work:
        collected.take(engine.step())
        engine.check()
    assert isinstance(collected.ends[sick.request_id], GenerationError)
    assert "not finite (weight version 0)" in str(collected.ends[sick.request_id])
    for r in healthy:
        assert collected.generation(r).token_ids == run_to_end(small_engine(model), [r])[0].token_ids
    # The slot that the broken sequence had serves the next one as a fresh one does.
    again = [run_to_end(engine, [GenerationRequest(healthy[0].prompt_ids, healthy[0].sampling)])[0].token_ids for _ in range(4)]
    assert set(again) == {collected.generation(healthy[0]).token_ids}


def test_what_a_step_told_before_it_raised_is_not_lost_and_nothing_is_left_behind(monkeypatch):
    """One request ends in the step, and the next one's experts find no memory."""
    engine = small_engine()
    ending, recording, going_on = request(3, 1, max_tokens=1), request(3, 2, max_tokens=1, record_experts=True), request(3, 3)
    collected = Collected([ending, recording, going_on])
    for r in (ending, recording, going_on):
        engine.add(r)

    def no_memory(self):
        if self.request.record_experts:
            raise MemoryError("no room")

    monkeypatch.setattr(Sequence, "experts", no_memory)
    with pytest.raises(MemoryError):
        engine.step()
    for tensor in (*engine._pool.state.recurrent.values(), *engine._pool.state.latents.values()):
        tensor[1:] = math.nan  # nobody knows what it left
    collected.take(engine.fail_all("the engine failed"))
    engine.check()
    assert collected.ends[ending.request_id] == Finished("length") and len(collected.tokens[ending.request_id]) == 1
    assert all(isinstance(collected.ends[r.request_id], GenerationError) for r in (recording, going_on))
    assert not engine.has_work and engine.abort([going_on.request_id]) == []
    monkeypatch.undo()
    # Of two sequences that attend together the shorter one is computed up to the length of the longer.
    fresh, used = (run_to_end(e, [request(n, n, seed=n) for n in (50, 20)]) for e in (small_engine(), engine))
    assert [g.logprobs for g in used] == [g.logprobs for g in fresh]


def test_recorded_experts_do_not_hold_on_to_those_of_the_batch():
    engine = small_engine()
    for r in (request(60, 1, record_experts=True, max_tokens=50), request(60, 2, max_tokens=50)):
        engine.add(r)
    for _ in range(5):
        engine.step()
    (recording,) = (s for s in engine._sequences.values() if s.request.record_experts)
    assert sum(t.untyped_storage().nbytes() for t in recording._experts) == recording.num_seen * 4 * 2 * 2


def test_experts_are_recorded_for_those_who_ask_only(monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(runner, "_ExpertRecorder", lambda top_k: asked.append(top_k))
    run_to_end(small_engine(), [request(4, max_tokens=3)])
    assert asked == []


@pytest.mark.parametrize("name", ["max_sequences", "max_length", "max_waiting", "num_ids"])
def test_settings_without_room_are_refused(name):
    with pytest.raises(UserError, match=f"{name} is 0: it must be at least 1"):
        EngineSettings(**{name: 0})


def test_settings_for_a_prefill_off_the_grid_are_refused():
    with pytest.raises(ValueError, match="multiple of 64"):
        Engine(small_model(), EngineSettings(prefill_tokens=100))


def test_events_of_a_step_end_with_the_finish_of_their_request():
    engine = small_engine()
    r = request(3, max_tokens=1)
    engine.add(r)
    token, end = engine.step()
    assert isinstance(token.content, SampledToken) and end.content == Finished("length")
