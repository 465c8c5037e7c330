"""The stock OpenAI client against a real server."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager

import openai
import pytest
import torch
from openai.lib.streaming.chat import ChatCompletionStreamState

from perilune.model.chat import AssistantMessage, ToolCall, ToolMessage, UserMessage
from perilune.model.chat_format import chat_format
from perilune.serve.api.app import create_app
from perilune.serve.client.in_process import InProcessClient
from perilune.serve.engine import EngineSettings
from perilune.serve.generation import GenerationRequest, SamplingParams
from tests.model.tiny_models import k3_config, random_model
from tests.serve.api.fake_engine import NAME, TOKENIZER, FakeEngine, app_of, completion_ids, logprob, message_ids
from tests.serve.scripted_engine import served

HELLO = [{"role": "user", "content": "Hello."}]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
]
REPLY = AssistantMessage("It is sunny. ☀", "Let me think.")
CALLING = AssistantMessage("", "I must look.", (ToolCall("weather", {"city": "Zürich"}), ToolCall("weather", {"city": "Bern"})))


@contextmanager
def client_of(engine: FakeEngine, api_key: str | None = None, given_key: str = "none") -> Iterator[openai.OpenAI]:
    with (
        served(app_of(engine, api_key)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key=given_key, max_retries=0, timeout=30) as client,
    ):
        yield client


def test_models_are_listed_and_retrieved() -> None:
    with client_of(FakeEngine()) as client:
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).to_dict()["max_model_len"] == 4096
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("sun")
        assert caught.value.code == "model_not_found"


def test_a_chat_completion_is_what_the_model_said() -> None:
    with client_of(FakeEngine(message_ids(REPLY))) as client:
        answer = client.chat.completions.create(model=NAME, messages=HELLO, logprobs=True, top_logprobs=1, seed=3, user="eva")
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (REPLY.response, "stop")
    assert choice.message.to_dict()["reasoning_content"] == REPLY.thinking
    assert answer.usage is not None and answer.usage.completion_tokens == len(message_ids(REPLY))
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [logprob(token_id) for token_id in message_ids(REPLY)]
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [1] * len(message_ids(REPLY))


def test_a_streamed_chat_completion_joins_to_the_same() -> None:
    with client_of(FakeEngine(message_ids(REPLY))) as client:
        state = ChatCompletionStreamState()
        with client.chat.completions.create(model=NAME, messages=HELLO, stream=True, stream_options={"include_usage": True}) as chunks:
            for chunk in chunks:
                state.handle_chunk(chunk)
        answer = state.get_final_completion()
        whole = client.chat.completions.create(model=NAME, messages=HELLO)
    assert answer.choices[0].message.content == whole.choices[0].message.content == REPLY.response
    assert answer.choices[0].message.to_dict()["reasoning_content"] == REPLY.thinking
    assert answer.choices[0].finish_reason == "stop" and answer.usage == whole.usage


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_go_round_and_the_model_is_shown_what_it_said(is_streamed: bool) -> None:
    engine = FakeEngine(message_ids(CALLING), message_ids(REPLY))
    messages: list[object] = [*HELLO]
    with client_of(engine) as client:
        if is_streamed:
            with client.chat.completions.stream(model=NAME, messages=HELLO, tools=TOOLS) as events:
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(model=NAME, messages=HELLO, tools=TOOLS).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        assert [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls] == ["Zürich", "Bern"]
        assert [call.function.name for call in choice.message.tool_calls] == ["weather", "weather"]
        message = choice.message.to_dict()
        message.pop("parsed", None)
        for call in message.get("tool_calls", ()):  # the streaming helper adds what it parsed, and where it stood
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        messages.append(message)
        for call in reversed(choice.message.tool_calls):
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"sun in {city}"})
        answer = client.chat.completions.create(model=NAME, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == REPLY.response
    first, second = (list(request.prompt_ids) for request in engine.requests)
    sampled = message_ids(CALLING)
    results = [ToolMessage("weather", "sun in Zürich", 1), ToolMessage("weather", "sun in Bern", 2)]
    assert second == first + sampled + chat_format(TOKENIZER).continuation_ids(results, after=[UserMessage("Hello."), CALLING])


def test_completions_in_batches_and_streams() -> None:
    with client_of(FakeEngine(completion_ids("one"), completion_ids("two"), completion_ids("three"))) as client:
        answer = client.completions.create(model=NAME, prompt=["a", "b"], logprobs=0)
        assert [choice.text for choice in answer.choices] == ["one", "two"]
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["o", "n", "e", "[EOS]"]
        with client.completions.create(model=NAME, prompt=[1, 2, 3], stream=True, stop="ee") as chunks:
            assert "".join(chunk.choices[0].text for chunk in chunks) == "thr"


def test_extensions_go_through_extra_body() -> None:
    engine = FakeEngine(message_ids(REPLY))
    with client_of(engine) as client:
        extra = {"top_k": 5, "return_token_ids": True, "stop_token_ids": [3]}
        answer = client.chat.completions.create(model=NAME, messages=HELLO, reasoning_effort="low", extra_body=extra)
    assert engine.requests[0].sampling.top_k == 5
    assert answer.to_dict()["prompt_token_ids"] == list(engine.requests[0].prompt_ids)
    assert answer.choices[0].to_dict()["token_ids"] == message_ids(REPLY)


def test_errors_are_the_clients_classes_and_name_the_field() -> None:
    with client_of(FakeEngine()) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=NAME, messages=HELLO, frequency_penalty=1.5)
        assert (refused.value.param, refused.value.code) == ("frequency_penalty", "unsupported_parameter")
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=NAME, messages=HELLO, stream=True, tool_choice="required")
        assert refused.value.param == "tool_choice"
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="sun", messages=HELLO)
        assert unknown.value.code == "model_not_found" and NAME in str(unknown.value)


def test_a_wrong_key_is_an_authentication_error_and_the_right_one_is_none() -> None:
    with client_of(FakeEngine(), "key", "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    with client_of(FakeEngine(), "key", "key") as client:
        assert client.models.list().data[0].id == NAME


def test_an_async_client_streams_many_answers_at_once() -> None:
    texts = [f"answer number {number}" for number in range(8)]
    engine = FakeEngine(*(message_ids(AssistantMessage(text)) for text in texts))

    async def text_of(client: openai.AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(model=NAME, messages=HELLO, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_texts(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
            return await asyncio.gather(*(text_of(client) for _ in texts))

    with served(app_of(engine)) as url:
        assert sorted(asyncio.run(all_texts(url))) == texts


def test_a_real_engine_answers_as_its_own_client_does() -> None:
    torch.set_num_threads(1)
    engine = InProcessClient(
        random_model(k3_config(vocab_size=TOKENIZER.vocab_size), torch.float32), EngineSettings(max_length=2048), name=NAME
    )
    prompt = TOKENIZER.encode_text("Hello.")
    with served(create_app(engine, TOKENIZER)) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(
            model=NAME, prompt="Hello.", n=3, seed=5, max_tokens=30, logprobs=2, extra_body={"return_token_ids": True}
        )
        sampling = SamplingParams(30, seed=5, top_logprobs=2, stop_token_ids=(TOKENIZER.eos_id, TOKENIZER.end_of_message_id))
        wanted = asyncio.run(engine.generate(GenerationRequest(tuple(prompt), sampling)))
        assert tuple(whole.choices[0].to_dict()["token_ids"]) == wanted.token_ids
        assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.token_logprobs is not None
        assert whole.choices[0].logprobs.token_logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
        assert len({tuple(choice.to_dict()["token_ids"]) for choice in whole.choices}) == 3
        with client.chat.completions.create(model=NAME, messages=HELLO, n=2, stream=True, extra_body={"ignore_eos": True}) as chunks:
            assert next(iter(chunks)).choices[0].delta.role == "assistant"
        answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=5, reasoning_effort="none")
        assert answer.usage is not None and answer.usage.completion_tokens <= 5
    asyncio.run(engine.close())
