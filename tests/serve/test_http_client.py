"""HttpClient: what holds for every client, over a real server, and what only a network can do."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from perilune.errors import UserError
from perilune.serve.api.errors import ApiError
from perilune.serve.client import (
    EngineBusyError,
    EngineClient,
    GenerationError,
    GenerationRequest,
    HttpClient,
    SampledToken,
    SamplingParams,
)
from perilune.serve.client.safetensors_stream import SafetensorsStream
from tests.serve.client_conformance import ClientConformance, Setup, events_of, plain
from tests.serve.scripted_engine import HELD, LENGTH, PATIENCE, VOCABULARY, ScriptedEngine, next_of, scripted_app, served

REQUEST = GenerationRequest((5, 6, 7), SamplingParams(max_tokens=6, seed=1))
HELD_REQUEST = GenerationRequest((HELD,))


def new_weights() -> dict[str, Tensor]:
    return {"a": torch.ones(3, 2), "b.c": torch.full((5,), 1.5, dtype=torch.bfloat16), "scalar": torch.tensor(3.0)}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[ScriptedEngine, str]]:
    """One server for all tests of this file; each starts with the engine as new."""
    engine = ScriptedEngine()
    with served(scripted_app(engine)) as address:
        yield engine, address


@pytest.fixture
def engine(server: tuple[ScriptedEngine, str]) -> ScriptedEngine:
    server[0].reset()
    return server[0]


@pytest.fixture
def address(server: tuple[ScriptedEngine, str]) -> str:
    return server[1]


class TestHttpClient(ClientConformance):
    @pytest.fixture
    def setup(self, engine: ScriptedEngine, address: str) -> Setup:
        return Setup(lambda: HttpClient(address), prompt=(5, 6, 7), held_prompt=(HELD, 1), weights=new_weights)


def with_client(address: str, scenario: Callable[[HttpClient], object], **arguments: object) -> None:
    async def run() -> None:
        client = HttpClient(address, **arguments)
        try:
            async with asyncio.timeout(60):
                await scenario(client)
        finally:
            await client.close()

    asyncio.run(run())


requests = st.builds(
    GenerationRequest,
    st.lists(st.integers(0, VOCABULARY - 2), min_size=1, max_size=20).map(tuple),
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, LENGTH - 20),
        temperature=st.floats(0, 100),
        top_p=st.floats(0, 1, exclude_min=True),
        top_k=st.integers(0, 2**63 - 1),
        seed=st.none() | st.integers(0, 2**63 - 1),
        stop_token_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=3, unique=True).map(tuple),
        top_logprobs=st.integers(0, 20),
    ),
    st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_wire_changes_neither_requests_nor_events(server: tuple[ScriptedEngine, str], data: st.DataObject) -> None:
    engine, address = server
    engine.reset()
    request = data.draw(requests)
    engine.large_expert_ids = data.draw(st.booleans())

    async def scenario(client: HttpClient) -> None:
        assert plain(await events_of(client.stream(request))) == plain(await events_of(engine.stream(request)))
        assert engine.requests == [request, request]

    with_client(address, scenario)


@settings(max_examples=25, deadline=None)
@given(logprob=st.floats(max_value=0, allow_nan=False, allow_infinity=False))
def test_every_finite_logprob_arrives_bit_for_bit(server: tuple[ScriptedEngine, str], logprob: float) -> None:
    engine, address = server
    engine.reset()
    engine.script = lambda request, place, version: SampledToken(place, logprob, version, ((1, logprob),))

    async def scenario(client: HttpClient) -> None:
        generation = await client.generate(REQUEST)
        assert [(x.hex(), y.hex()) for x, y in ((t.logprob, t.top[0][1]) for t in generation.tokens)] == [(logprob.hex(),) * 2] * 6

    with_client(address, scenario)


def test_a_busy_engine_says_so(engine: ScriptedEngine, address: str) -> None:
    engine.is_busy = True

    async def scenario(client: HttpClient) -> None:
        with pytest.raises(EngineBusyError, match="7 requests are waiting"):
            await client.generate(REQUEST)

    with_client(address, scenario)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GenerationError("the logits are not finite"), GenerationError),
        (EngineBusyError("no room"), EngineBusyError),
        (UserError("a bad request"), UserError),
        (ApiError(404, "no such thing"), UserError),
        (RuntimeError("a bug"), GenerationError),
    ],
)
def test_an_engines_error_keeps_its_type_before_and_after_the_first_token(
    engine: ScriptedEngine, address: str, place: int, error: Exception, kind: type[Exception]
) -> None:
    engine.fail_at = {place: error}

    async def scenario(client: HttpClient) -> None:
        events = client.stream(REQUEST)
        for _ in range(place):
            assert isinstance(await anext(events), SampledToken)
        with pytest.raises(kind) as raised:
            await anext(events)
        assert type(raised.value) is kind
        assert str(raised.value) == str(error) or kind is GenerationError

    with_client(address, scenario)


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), None])
def test_a_logprob_that_is_no_number_is_an_error(engine: ScriptedEngine, address: str, place: int, logprob: float) -> None:
    good = engine.script
    engine.script = lambda r, p, v: SampledToken(9, logprob, v) if p == place else good(r, p, v)

    async def scenario(client: HttpClient) -> None:
        with pytest.raises(GenerationError, match="token 9 the log-probability"):
            await client.generate(REQUEST)

    with_client(address, scenario)


def test_closing_a_stream_ends_the_request_in_the_engine(engine: ScriptedEngine, address: str) -> None:
    async def scenario(client: HttpClient) -> None:
        events = client.stream(HELD_REQUEST)
        for _ in range(3):
            await anext(events)
        await events.aclose()
        assert await next_of(engine.ended) == HELD_REQUEST.request_id

    with_client(address, scenario)


def test_cancelling_ends_the_request_in_the_engine_also_before_its_first_token(engine: ScriptedEngine, address: str) -> None:
    async def scenario(client: HttpClient) -> None:
        engine.start.clear()
        waiting = asyncio.create_task(client.generate(REQUEST))
        await next_of(engine.arrived)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        engine.start.set()
        running = asyncio.create_task(client.generate(HELD_REQUEST))
        await next_of(engine.arrived)
        running.cancel()
        await asyncio.wait([running])
        await client.generate(REQUEST)

    with_client(address, scenario)


def test_an_abort_reaches_a_request_that_the_engine_has_not_taken_on_yet(engine: ScriptedEngine, address: str) -> None:
    async def scenario(client: HttpClient) -> None:
        engine.start.clear()
        answer = asyncio.create_task(client.generate(HELD_REQUEST))
        await next_of(engine.arrived)
        await client.abort([HELD_REQUEST.request_id])
        engine.start.set()
        assert (await answer).finished.reason == "abort"

    with_client(address, scenario)


def test_bfloat16_weights_arrive_as_they_are_and_views_as_what_they_show(engine: ScriptedEngine, address: str) -> None:
    weights = new_weights() | {"a": torch.arange(12.0).view(2, 6)[:, ::2].T, "b.c": torch.randn(10).bfloat16()[::2]}

    async def scenario(client: HttpClient) -> None:
        await client.update_weights(weights, 3)

    with_client(address, scenario)
    assert engine.version == 3
    for name, tensor in weights.items():
        assert engine.weights[name].dtype == tensor.dtype
        assert torch.equal(engine.weights[name], tensor)


dtypes = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool])
shapes = st.lists(st.integers(0, 4), max_size=3)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "__metadata__"), st.tuples(shapes, dtypes), max_size=6))
def test_streamed_tensors_are_a_safetensors_file(kinds: dict[str, tuple[list[int], torch.dtype]]) -> None:
    tensors = {name: torch.randn(shape).mul(50).abs().to(dtype) for name, (shape, dtype) in kinds.items()}
    stream = SafetensorsStream(tensors)

    async def collect() -> bytes:
        return b"".join([piece async for piece in stream])

    data = asyncio.run(collect())
    assert len(data) == stream.size
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert all(entry["data_offsets"][0] % tensors[name].element_size() == 0 for name, entry in header.items())
    read = load(data)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_a_dtype_that_cannot_be_sent_is_the_users_error(engine: ScriptedEngine, address: str) -> None:
    async def scenario(client: HttpClient) -> None:
        with pytest.raises(UserError, match=r"'a' has the dtype torch\.complex64"):
            await client.update_weights({"a": torch.zeros(2, dtype=torch.complex64)}, 1)

    with_client(address, scenario)


def test_more_bytes_than_the_model_has_are_the_users_error(engine: ScriptedEngine, address: str) -> None:
    async def scenario(client: HttpClient) -> None:
        with pytest.raises(UserError, match="more than the 1048576 bytes"):
            await client.update_weights({"a": torch.zeros(300_000)}, 1)

    with_client(address, scenario)
    assert engine.version == 0


def test_the_name_of_another_model_is_the_users_error(engine: ScriptedEngine, address: str) -> None:
    async def scenario(client: HttpClient) -> None:
        with pytest.raises(UserError, match="no model 'k9' here: this server has 'scripted'"):
            await client.generate(REQUEST)

    with_client(address, scenario, model="k9")


@pytest.mark.parametrize("address", ["", "127.0.0.1:8000", "ftp://host", "http://", "http://[::1", "nonsense"])
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(UserError, match="no address of an engine"):
        HttpClient(address)


@pytest.mark.parametrize("key", ["", " ", "secret\n", "sec\nret", "sec\0ret"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(UserError, match="the API key") as raised:
        HttpClient("http://127.0.0.1:8000", api_key=key)
    assert "ret" not in str(raised.value)


def test_proxies_of_the_environment_are_not_used(engine: ScriptedEngine, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def scenario(client: HttpClient) -> None:
        assert (await client.info()).name == "scripted"

    with_client(address + "/v1/", scenario)


# A server of which the test writes every byte.


@contextmanager
def answering(*answers: bytes | None) -> Iterator[tuple[str, list[bytes]]]:
    """Accepts one connection after the other, reads a request and answers with bytes of ours; None: with silence, until the other
    side hangs up. Also gives the requests that came."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    data = b""
                    while b"\r\n\r\n" not in data:
                        data += connection.recv(65536)
                    head, _, body = data.partition(b"\r\n\r\n")
                    length = next(
                        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
                    )
                    while len(body) < length:
                        body += connection.recv(65536)
                    seen.append(head + b"\r\n\r\n" + body)
                    if answer is None:
                        connection.recv(1)
                    else:
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "http://{}:{}".format(*listening.getsockname()), seen
        finally:
            thread.join()


def reply(*pieces: bytes, status: bytes = b"200 OK", length: int | None = None) -> bytes:
    body = b"".join(pieces)
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body) if length is None else length, body)


def event(tokens: tuple[int, ...] = (), reason: str | None = None, **changes: object) -> bytes:
    content = [{"token": f"token_id:{token}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for token in tokens]
    choice = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": reason,
        "logprobs": {"content": content},
        "routed_experts": None,
        "weight_versions": [0] * len(tokens),
    }
    body = {"request_id": "r", "model": "a\u2028b", "choices": [choice | changes]}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def outcome(answer: bytes | None, **arguments: object) -> object:
    """What generate returns or raises, given the server's bytes."""
    result: list[object] = []

    async def scenario(client: HttpClient) -> None:
        try:
            result.append((await client.generate(REQUEST)).token_ids)
        except (GenerationError, UserError) as error:
            result.append(error)

    with answering(answer) as (address, _):
        with_client(address, scenario, **arguments)
    return result[0]


@pytest.mark.parametrize(
    "answer",
    [
        reply(event((1, 2)), event((3,)), event(reason="length"), DONE),
        reply(b": a comment\n", b"event: x\n", event((1, 2, 3), "length").replace(b"data: ", b"data:"), DONE),
        reply(event((1, 2, 3), "stop").replace(b"\n", b"\r\n"), DONE),
        reply(event((1, 2, 3), "stop"), length=10_000),  # breaks off when all is said
    ],
)
def test_events_are_read_however_they_are_cut_and_spaced(answer: bytes) -> None:
    assert outcome(answer) == (1, 2, 3)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"", "no answer came from the engine at http://127.0.0.1:"),
        (b"nonsense\r\n\r\n", "no answer came from the engine at http://127.0.0.1:"),
        (reply(event((1,)), length=10_000), "the answer broke off from the engine at http://127.0.0.1:"),
        (reply(event((1, 2, 3)), b"data:[DONE]\n"), "ended its answer before it was finished"),
        (reply(event((1, 2, 3)), DONE), "ended its answer before it was finished"),
        (reply(), "ended its answer before it was finished"),
        (reply(b"<html>hello</html>"), "ended its answer before it was finished"),
        (reply(b"data: {}\n"), "no Perilune server of this version"),
        (reply(b"data: {\n"), "no Perilune server of this version"),
        (reply(event((1,), "length", token_ids=[1, 2])), "no Perilune server of this version"),
        (reply(event((1,), "tired")), "no Perilune server of this version"),
        (reply(event((1,)).replace(b"-0.5", b"NaN")), "no Perilune server of this version"),
        (reply(event((1,)).replace(b"-0.5", b"null")), "no Perilune server of this version"),
        (reply(event((1,), "stop", routed_experts="AAAA")), "no Perilune server of this version"),
        (reply(event((1,), "stop", routed_experts="not base64")), "no Perilune server of this version"),
        (reply(b"oh", status=b"500 Bad"), r"status 500 \(oh\)"),
        (reply(status=b"302 Found"), "status 302"),
    ],
)
def test_a_broken_answer_is_an_error_and_never_a_result(answer: bytes, sentence: str) -> None:
    error = outcome(answer)
    assert type(error) is GenerationError
    with pytest.raises(GenerationError, match=sentence):
        raise error


def test_a_silent_server_is_given_up() -> None:
    assert "no answer came" in str(outcome(None, timeout=0.05))


def test_no_connection_is_kept_for_the_next_request() -> None:
    hung_up = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply(b'{"weight_version": 0, "model": "m", "max_model_len": 1, "vocab_size": 1}'))
                connection.settimeout(PATIENCE)
                if connection.recv(1) == b"":
                    hung_up.set()

        async def scenario(client: HttpClient) -> None:
            assert (await client.info()).name == "m"
            assert await asyncio.to_thread(hung_up.wait, PATIENCE)

        thread = threading.Thread(target=serve)
        thread.start()
        with_client("http://{}:{}".format(*listening.getsockname()), scenario)
        thread.join()


def test_a_server_without_our_endpoints_is_the_users_error() -> None:
    error = outcome(reply(b'{"detail":"Not Found"}', status=b"404 Not Found"))
    assert type(error) is UserError
    assert "status 404" in str(error)


def test_without_a_server_the_error_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = "http://{}:{}".format(*listening.getsockname())

    async def scenario(client: EngineClient) -> None:
        for ask in (client.generate(REQUEST), client.info(), client.abort(["a"]), client.update_weights(new_weights(), 1)):
            with pytest.raises(GenerationError, match=f"no answer came from the engine at {address} "):
                await ask

    with_client(address, scenario)


def test_key_and_model_are_sent_and_a_refused_key_is_the_users_error() -> None:
    refusal = json.dumps({"error": {"message": "a key is needed", "type": "authentication_error", "param": None, "code": None}}).encode()

    async def scenario(client: HttpClient) -> None:
        with pytest.raises(UserError, match="a key is needed"):
            await client.generate(REQUEST)
        with pytest.raises(UserError, match="a key is needed"):
            await client.update_weights(new_weights(), 1)

    with answering(*[reply(refusal, status=b"401 Unauthorized")] * 2) as (address, seen):
        with_client(address, scenario, api_key="secret-é", model="k3")
    assert all("Authorization: Bearer secret-é\r\n".encode() in request for request in seen)
    assert json.loads(seen[0].partition(b"\r\n\r\n")[2])["model"] == "k3"
