"""The claims of every EngineClient, on a real engine in this process and behind a real server."""

import asyncio
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from perilune.model.tokenizer import ByteTokenizer
from perilune.serve.api.app import create_app
from perilune.serve.client import EngineSettings, GenerationRequest, HttpClient, InProcessClient, SampledToken, SamplingParams
from perilune.serve.weights import largest_update
from tests.serve.client_conformance import ClientConformance, Setup
from tests.serve.scripted_engine import served
from tests.serve.small_engines import request, small_model

SETTINGS = EngineSettings(max_sequences=4, max_length=2048, prefill_tokens=64)


def engine() -> InProcessClient:
    return InProcessClient(small_model(torch.float64), SETTINGS, name="small")


def other_weights() -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in small_model(torch.float64, seed=5).state_dict().items()}


@pytest.fixture
def address() -> Iterator[str]:
    behind = engine()
    with served(create_app(behind, ByteTokenizer(), max_update_bytes=largest_update(small_model(torch.float64)))) as address:
        yield address
    asyncio.run(behind.close())


class TestInProcess(ClientConformance):
    @pytest.fixture
    def setup(self) -> Setup:
        return Setup(engine, prompt=(5, 6, 7), held_prompt=(1, 2), weights=other_weights)


class TestOverHttp(ClientConformance):
    @pytest.fixture
    def setup(self, address: str) -> Setup:
        return Setup(lambda: HttpClient(address), prompt=(5, 6, 7), held_prompt=(1, 2), weights=other_weights)


def test_answers_in_the_process_and_over_http_are_equal_to_the_last_bit(address: str) -> None:
    requests = [request(3 + 40 * i, i, record_experts=i % 2 == 0, top_logprobs=i, max_tokens=10) for i in range(4)]

    async def ask(client: InProcessClient | HttpClient):
        answers = [await client.generate(r) for r in requests]
        await client.close()
        return [(a.tokens, a.finished.reason, None if a.finished.experts is None else a.finished.experts.tolist()) for a in answers]

    assert asyncio.run(ask(engine())) == asyncio.run(ask(HttpClient(address)))


def test_a_request_aborted_before_its_first_token_ends_at_once_though_the_engine_is_busy_with_another() -> None:
    """One slot: the second request waits behind an endless one, and its server has not begun to answer."""
    behind = InProcessClient(small_model(torch.float64), EngineSettings(max_sequences=1, max_length=2048, prefill_tokens=64), name="small")

    async def scenario(address: str) -> tuple[str, int]:
        client = HttpClient(address)
        endless = client.stream(GenerationRequest((1, 2), SamplingParams(seed=1)))
        await anext(endless)
        waiting = GenerationRequest((3, 4), SamplingParams(seed=2))
        answer = asyncio.create_task(client.generate(waiting))
        while not client._running - {r for r in client._running if r.request_id != waiting.request_id}:
            await asyncio.sleep(0)
        await client.abort([waiting.request_id])
        ended = await asyncio.wait_for(answer, 30)
        still_running = await anext(endless)
        await endless.aclose()
        await client.close()
        return ended.finished.reason, len(ended.tokens) + isinstance(still_running, SampledToken)

    with served(create_app(behind, ByteTokenizer())) as address:
        assert asyncio.run(scenario(address)) == ("abort", 1)
    asyncio.run(behind.close())
