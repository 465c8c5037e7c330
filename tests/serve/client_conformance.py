"""What holds for every EngineClient, wherever its engine is: a class of tests to derive from, with a fixture `setup` of one's own."""

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from perilune.errors import UserError
from perilune.serve.client.collect import collect
from perilune.serve.client.protocol import EngineClient
from perilune.serve.generation import Finished, Generation, GenerationError, GenerationRequest, SampledToken, SamplingParams, new_request_id

PATIENCE = 60.0
Scenario = Callable[["ClientConformance", EngineClient, "Setup"], Awaitable[None]]


@dataclass(frozen=True)
class Setup:
    """A way to a fresh engine, and what fits it.

    `prompt`: a few ids; there is room for 16 more. `held_prompt`: one that goes on until it is aborted (or long enough for that),
    after three tokens at least. `weights`: others than the engine has.
    """

    open: Callable[[], EngineClient]
    prompt: tuple[int, ...]
    held_prompt: tuple[int, ...]
    weights: Callable[[], dict[str, Tensor]]

    def request(self, seed: int = 1, *, record_experts: bool = False, **sampling: object) -> GenerationRequest:
        return GenerationRequest(self.prompt, SamplingParams(**{"max_tokens": 8, "seed": seed} | sampling), record_experts)

    def held(self) -> GenerationRequest:
        return GenerationRequest(self.held_prompt, SamplingParams(seed=1))

    def run(self, *scenarios: Callable[[EngineClient], Awaitable[None]]) -> None:
        """The scenarios with one client, each in an event loop of its own; the last loop closes it."""
        client = self.open()

        async def bounded(scenario: Callable[[EngineClient], Awaitable[None]], is_last: bool) -> None:
            try:
                async with asyncio.timeout(PATIENCE):
                    await scenario(client)
            finally:
                if is_last:
                    await client.close()

        for scenario in scenarios:
            asyncio.run(bounded(scenario, scenario is scenarios[-1]))


def claim(scenario: Scenario) -> Callable[["ClientConformance", Setup], None]:
    def test(self: "ClientConformance", setup: Setup) -> None:
        setup.run(lambda client: scenario(self, client, setup))

    test.__name__ = scenario.__name__
    return test


async def events_of(events: AsyncIterator[SampledToken | Finished]) -> list[SampledToken | Finished]:
    return [event async for event in events]


def plain(events: list[SampledToken | Finished]) -> list[object]:
    """Events that compare: tensors as lists."""
    return [
        (event.reason, event.experts.tolist() if event.experts is not None else None) if isinstance(event, Finished) else event
        for event in events
    ]


def again(request: GenerationRequest, **changes: object) -> GenerationRequest:
    return dataclasses.replace(request, **{"request_id": new_request_id()} | changes)


async def until_free(client: EngineClient, request: GenerationRequest) -> None:
    """Ask until the request's id is free. The protocol offers nothing to wait for, so each try is a request."""
    while True:
        try:
            await client.generate(request)
        except UserError:
            continue
        return


class ClientConformance:
    @pytest.fixture
    def setup(self) -> Iterator[Setup]:
        raise NotImplementedError

    @claim
    async def test_the_same_request_gives_the_same_events(self, client: EngineClient, setup: Setup) -> None:
        request = setup.request(record_experts=True, top_logprobs=3)
        first = await events_of(client.stream(request))
        second = await events_of(client.stream(again(request)))
        assert plain(first) == plain(second)

    @claim
    async def test_generate_gives_what_stream_gives(self, client: EngineClient, setup: Setup) -> None:
        request = setup.request(record_experts=True, top_logprobs=2)
        *tokens, finished = await events_of(client.stream(request))
        generation = await client.generate(again(request))
        assert list(generation.tokens) == tokens
        assert plain([generation.finished]) == plain([finished])
        assert generation.token_ids == tuple(token.id for token in tokens)

    @claim
    async def test_tokens_come_first_and_one_finish_ends_them(self, client: EngineClient, setup: Setup) -> None:
        *tokens, finished = await events_of(client.stream(setup.request(max_tokens=5)))
        assert isinstance(finished, Finished)
        assert all(isinstance(token, SampledToken) for token in tokens)
        assert (len(tokens), finished.reason, finished.experts) == (5, "length", None)

    @claim
    async def test_a_stop_token_ends_the_answer_and_is_part_of_it(self, client: EngineClient, setup: Setup) -> None:
        whole = await client.generate(setup.request())
        stop = whole.token_ids[3]
        cut = await client.generate(setup.request(stop_token_ids=(stop,)))
        assert cut.tokens == whole.tokens[: whole.token_ids.index(stop) + 1]
        assert cut.finished.reason == "stop"

    @claim
    async def test_every_token_has_a_finite_logprob_and_as_many_others_as_asked_for(self, client: EngineClient, setup: Setup) -> None:
        for count in (0, 1, 4):
            generation = await client.generate(setup.request(top_logprobs=count))
            for token in generation.tokens:
                assert math.isfinite(token.logprob)
                assert token.logprob <= 0
                assert len(token.top) == count
                assert [logprob for _, logprob in token.top] == sorted((logprob for _, logprob in token.top), reverse=True)

    @claim
    async def test_experts_are_those_of_all_but_the_last_token(self, client: EngineClient, setup: Setup) -> None:
        generation = await client.generate(setup.request(record_experts=True))
        experts = generation.finished.experts
        assert experts is not None
        assert experts.dtype == torch.int64
        assert experts.ndim == 3
        assert len(experts) == len(setup.prompt) + len(generation.tokens) - 1

    @claim
    async def test_requests_at_once_get_each_their_own_answer(self, client: EngineClient, setup: Setup) -> None:
        requests = [setup.request(seed) for seed in range(20)]
        alone = [await client.generate(request) for request in requests]
        together = await asyncio.gather(*(client.generate(again(request)) for request in requests))
        # A batch may round otherwise than one row does.
        assert [generation.token_ids for generation in together] == [generation.token_ids for generation in alone]
        for one, other in zip(together, alone, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)

    @claim
    async def test_an_abort_keeps_the_tokens_so_far(self, client: EngineClient, setup: Setup) -> None:
        request = setup.held()
        events = client.stream(request)
        first = [await anext(events), await anext(events)]
        await client.abort([request.request_id, "unknown"])
        *more, finished = await events_of(events)
        assert isinstance(finished, Finished)
        assert finished.reason == "abort"
        assert all(isinstance(token, SampledToken) for token in first + more)

    @claim
    async def test_generate_returns_what_there_is_when_another_aborts_it(self, client: EngineClient, setup: Setup) -> None:
        requests = [setup.held() for _ in range(3)]
        watched = client.stream(again(requests[0]))
        answers = [asyncio.create_task(client.generate(request)) for request in requests]
        await anext(watched)
        while not all(answer.done() for answer in answers):
            await client.abort([request.request_id for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            generation: Generation = answer.result()
            assert generation.finished.reason == "abort"
            assert generation.request is request
        await watched.aclose()

    @claim
    async def test_closing_a_stream_ends_its_request(self, client: EngineClient, setup: Setup) -> None:
        request = setup.held()
        events = client.stream(request)
        await anext(events)
        await events.aclose()
        await until_free(client, again(setup.request(), request_id=request.request_id))

    @claim
    async def test_cancelling_the_task_of_a_stream_ends_its_request(self, client: EngineClient, setup: Setup) -> None:
        request = setup.held()
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.stream(request):
                has_begun.set()

        reading = asyncio.create_task(read())
        await has_begun.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until_free(client, again(setup.request(), request_id=request.request_id))

    @claim
    async def test_cancelling_generate_ends_its_request(self, client: EngineClient, setup: Setup) -> None:
        request = setup.held()
        answer = asyncio.create_task(client.generate(request))
        await client.generate(setup.request())  # time for the other to begin
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        await until_free(client, again(setup.request(), request_id=request.request_id))

    @claim
    async def test_the_id_of_a_running_request_is_refused_and_the_request_goes_on(self, client: EngineClient, setup: Setup) -> None:
        request = setup.held()
        events = client.stream(request)
        await anext(events)
        with pytest.raises(UserError, match=request.request_id):
            await client.generate(request)
        await client.abort([request.request_id])
        assert plain(await events_of(events))[-1][0] == "abort"

    @claim
    async def test_what_is_wrong_with_a_request_is_the_users_error(self, client: EngineClient, setup: Setup) -> None:
        info = await client.info()
        good = setup.request()
        for prompt in ((), (info.vocab_size,), (-1,), (2**70,), setup.prompt[:1] * (info.max_length + 1)):
            with pytest.raises(UserError):
                await client.generate(again(good, prompt_ids=prompt))
        for change in ({"stop_token_ids": (info.vocab_size,)}, {"max_tokens": info.max_length}):
            with pytest.raises(UserError):
                await client.generate(again(good, sampling=dataclasses.replace(good.sampling, **change)))
        assert (await client.generate(good)).finished.reason == "length"

    @claim
    async def test_new_weights_give_other_tokens_which_say_so(self, client: EngineClient, setup: Setup) -> None:
        before = await client.generate(setup.request())
        await client.update_weights(setup.weights(), 7)
        after = await client.generate(setup.request())
        assert {token.weight_version for token in before.tokens} == {0}
        assert {token.weight_version for token in after.tokens} == {7}
        assert (await client.info()).weight_version == 7
        assert before.logprobs != after.logprobs

    @claim
    async def test_wrong_weights_change_nothing(self, client: EngineClient, setup: Setup) -> None:
        before = await client.generate(setup.request())
        name = min(setup.weights())

        def changed(change: Callable[[dict[str, Tensor]], object]) -> dict[str, Tensor]:
            weights = setup.weights()
            change(weights)
            return weights

        wrong = {
            "missing": changed(lambda weights: weights.pop(name)),
            "unknown": changed(lambda weights: weights.update(other=torch.zeros(1))),
            "misshapen": changed(lambda weights: weights.update({name: weights[name][None]})),
            "not a number": changed(lambda weights: weights[name].view(-1)[-1:].fill_(math.nan)),
            "none": {},
        }
        for weights in wrong.values():
            with pytest.raises(UserError):
                await client.update_weights(weights, 9)
        assert (await client.info()).weight_version == 0
        assert (await client.generate(setup.request())).tokens == before.tokens

    @claim
    async def test_weights_may_change_under_a_running_request(self, client: EngineClient, setup: Setup) -> None:
        request = setup.held()
        events = client.stream(request)
        await anext(events)
        await client.update_weights(setup.weights(), 5)
        await client.abort([request.request_id])
        assert plain(await events_of(events))[-1][0] == "abort"

    @claim
    async def test_close_ends_what_runs_and_takes_nothing_more(self, client: EngineClient, setup: Setup) -> None:
        request = setup.held()
        events = client.stream(request)
        await anext(events)
        await client.close()
        assert (await collect(request, events)).finished.reason == "abort"
        with pytest.raises(GenerationError):
            await client.generate(setup.request())
        with pytest.raises(GenerationError):
            await client.info()
        await client.close()

    def test_a_client_serves_one_event_loop_after_the_other(self, setup: Setup) -> None:
        answers: list[Generation] = []

        async def ask(client: EngineClient) -> None:
            answers.append(await client.generate(setup.request()))

        setup.run(ask, lambda client: ask(client))
        assert answers[0].tokens == answers[1].tokens
