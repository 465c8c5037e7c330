"""Aborts, versions, and weights that arrive over the network: whole or not at all, and never left lying about."""

import asyncio
import errno
import json
import logging
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from perilune.serve.api import control
from perilune.serve.weights import largest_update
from tests.model.tiny_models import k3_config, random_model
from tests.serve.scripted_engine import HELD, LENGTH, PATIENCE, VOCABULARY, ScriptedEngine, next_of, scripted_app, served

OCTETS = {"Content-Type": "application/octet-stream"}
LIMIT = 10_000


def weights(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 2), value), "b.c": torch.full((5,), value, dtype=torch.bfloat16), "scalar": torch.tensor(value)}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where uploads are kept meanwhile; nothing may be left there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


def ask(engine: ScriptedEngine, method: str, path: str, **arguments: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(scripted_app(engine, LIMIT))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(send())


def update(engine: ScriptedEngine, body: bytes | AsyncIterator[bytes], version: object = 4, **headers: str) -> httpx.Response:
    return ask(engine, "POST", f"/update_weights?version={version}", content=body, headers=OCTETS | headers)


def message(response: httpx.Response) -> str:
    text: str = response.json()["error"]["message"]
    return text


def test_the_version_comes_with_what_a_client_must_know() -> None:
    engine = ScriptedEngine()
    engine.version = 3
    answer = ask(engine, "GET", "/get_weight_version").json()
    assert answer == {"weight_version": 3, "model": "scripted", "max_model_len": LENGTH, "vocab_size": VOCABULARY}


def test_an_update_replaces_weights_and_version_bit_for_bit() -> None:
    engine = ScriptedEngine()
    response = update(engine, save(weights(0.1)))
    assert (response.status_code, response.json()) == (200, {"weight_version": 4})
    assert engine.version == 4
    for name, tensor in weights(0.1).items():
        assert engine.weights[name].dtype == tensor.dtype
        assert torch.equal(engine.weights[name], tensor)


def test_a_body_of_unknown_length_is_taken_too() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        data = save(weights())
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    engine = ScriptedEngine()
    assert update(engine, pieces()).status_code == 200
    assert torch.equal(engine.weights["a"], weights()["a"])


def test_a_body_larger_than_what_is_written_at_once_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_WRITE_BYTES", 16)
    test_a_body_of_unknown_length_is_taken_too()


@pytest.mark.parametrize(
    "given_type", ["text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "application/json", ""]
)
def test_a_type_that_a_web_page_may_post_unasked_is_refused(given_type: str) -> None:
    engine = ScriptedEngine()
    response = ask(engine, "POST", "/update_weights?version=4", content=save(weights()), headers={"Content-Type": given_type})
    assert response.status_code == 415
    assert "application/octet-stream" in message(response)
    assert engine.version == 0
    assert ask(engine, "POST", "/update_weights?version=4", content=save(weights())).status_code == 415


def test_an_abort_must_be_declared_as_json() -> None:
    body = json.dumps({"request_ids": ["a"]}).encode()
    assert ask(ScriptedEngine(), "POST", "/abort_requests", content=body, headers={"Content-Type": "text/plain"}).status_code == 415


@pytest.mark.parametrize("body", [{}, {"request_ids": "a"}, {"request_ids": [1]}, {"request_ids": [], "all": True}, []])
def test_a_malformed_abort_is_refused(body: object) -> None:
    assert ask(ScriptedEngine(), "POST", "/abort_requests", json=body).status_code == 400


def test_ids_that_do_not_run_are_ignored() -> None:
    body = json.dumps({"request_ids": ["a", "b", "\ud800"]}).encode()
    assert ask(ScriptedEngine(), "POST", "/abort_requests", content=body, headers={"Content-Type": "application/json"}).json() == {}


@pytest.mark.parametrize("version", ["", "-1", "x", "1.5", str(2**63), "9" * 5000])
def test_a_version_that_is_no_count_is_refused(version: str) -> None:
    engine = ScriptedEngine()
    assert update(engine, save(weights()), version).status_code == 400
    assert engine.version == 0


def test_the_version_must_be_there() -> None:
    assert ask(ScriptedEngine(), "POST", "/update_weights", content=save(weights()), headers=OCTETS).status_code == 400


def test_what_the_engine_refuses_is_a_400_with_its_sentence() -> None:
    engine = ScriptedEngine()
    for wrong in (weights() | {"more": torch.zeros(1)}, weights() | {"a": torch.zeros(3)}, weights(float("nan")), {}):
        response = update(engine, save(wrong))
        assert response.status_code == 400
        assert "missing or unknown" in message(response) or "misshapen or not finite" in message(response)
    assert engine.version == 0


@settings(max_examples=40, deadline=None)
@given(
    st.binary(max_size=64)
    | st.integers(0, len(save(weights())) - 1).map(lambda cut: save(weights())[:cut])
    | st.binary(min_size=1, max_size=20).map(lambda extra: save(weights()) + extra)
)
def test_what_is_no_whole_file_of_tensors_is_a_400(body: bytes) -> None:
    engine = ScriptedEngine()
    response = update(engine, body)
    assert response.status_code == 400
    assert "not a whole safetensors file" in message(response)
    assert engine.version == 0


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [0, 8]},
        {"dtype": "C64", "shape": [1], "data_offsets": [0, 8]},
        [],
    ],
)
def test_a_header_that_lies_is_a_400(entry: object) -> None:
    header = json.dumps({"a": entry}).encode()
    engine = ScriptedEngine()
    assert update(engine, len(header).to_bytes(8, "little") + header + bytes(12)).status_code == 400
    assert engine.version == 0


def test_a_body_declared_too_large_is_refused_before_it_is_read() -> None:
    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    response = update(ScriptedEngine(), unread(), **{"Content-Length": str(LIMIT + 1)})
    assert response.status_code == 413
    assert str(LIMIT) in message(response)


def test_a_body_that_grows_too_large_is_cut_off() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1000
            yield bytes(1000)

    assert update(ScriptedEngine(), endless()).status_code == 413
    assert sent == LIMIT + 1000


def test_the_limit_has_room_for_what_the_model_can_be_sent_as() -> None:
    model = random_model(k3_config(), torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    size = len(save(tensors, {"format": "pt"}))
    assert size <= largest_update(model) < size + 64_000
    assert largest_update(model.bfloat16()) == largest_update(model.float())
    assert largest_update(model.double()) > largest_update(model.float())


@pytest.mark.parametrize(
    ("number", "status", "words"), [(errno.ENOSPC, 507, "TMPDIR"), (errno.EDQUOT, 507, "TMPDIR"), (errno.EIO, 500, "Input/output error")]
)
def test_a_full_disk_is_said(monkeypatch: pytest.MonkeyPatch, temporary: Path, number: int, status: int, words: str) -> None:
    real = Path.open

    def open_full(path: Path, mode: str = "r") -> object:
        file = real(path, mode)
        monkeypatch.setattr(type(path), "open", real)

        class Full:
            def __enter__(self) -> object:
                return self

            def write(self, data: bytes) -> int:
                raise OSError(number, os.strerror(number))

            def __exit__(self, *_: object) -> None:
                file.close()

        return Full()

    monkeypatch.setattr(Path, "open", open_full)
    engine = ScriptedEngine()
    response = update(engine, save(weights()))
    assert response.status_code == status
    assert words in message(response)
    assert str(temporary) in message(response)
    assert engine.version == 0


def test_updates_at_once_are_applied_one_after_the_other() -> None:
    engine = ScriptedEngine()

    async def all_at_once() -> list[httpx.Response]:
        transport = httpx.ASGITransport(scripted_app(engine, LIMIT))
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
            return await asyncio.gather(
                *(client.post(f"/update_weights?version={n}", content=save(weights(n)), headers=OCTETS) for n in range(1, 6))
            )

    assert [response.status_code for response in asyncio.run(all_at_once())] == [200] * 5
    assert engine.most_updates_at_once == 1
    assert torch.equal(engine.weights["a"], weights(engine.version)["a"])


@pytest.mark.parametrize("declared", [True, False])
def test_a_sender_that_hangs_up_half_way_changes_nothing_and_leaves_nothing(
    declared: bool, temporary: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    length = b"Content-Length: %d" % LIMIT if declared else b"Transfer-Encoding: chunked"
    body = bytes(9000) if declared else b"%x\r\n%s\r\n" % (9000, bytes(9000))
    head = b"POST /update_weights?version=4 HTTP/1.1\r\nHost: engine\r\nContent-Type: application/octet-stream\r\n" + length + b"\r\n\r\n"
    monkeypatch.setattr(control, "_WRITE_BYTES", 16)
    with caplog.at_level(logging.WARNING), served(scripted_app(engine, LIMIT)) as address:
        host, _, port = address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head + body)
            while not any(path.stat().st_size for path in temporary.glob("*/*")):  # until the upload has begun
                httpx.get(address + "/get_weight_version", timeout=PATIENCE, trust_env=False)
        while list(temporary.iterdir()):  # until it is given up
            httpx.get(address + "/get_weight_version", timeout=PATIENCE, trust_env=False)
    assert engine.version == 0
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_the_answer_to_an_abort_does_not_wait_for_anything() -> None:
    engine = ScriptedEngine()
    with served(scripted_app(engine, LIMIT)) as address:

        async def scenario() -> None:
            async with httpx.AsyncClient(base_url=address, timeout=PATIENCE, trust_env=False) as client:
                body = {"token_ids": [HELD], "request_id": "one"}
                answers = [asyncio.create_task(client.post("/inference/v1/generate", json=body | {"request_id": id})) for id in "ab"]
                for _ in answers:
                    await next_of(engine.held)
                assert (await client.post("/abort_requests", json={"request_ids": ["a", "b", "c"]})).json() == {}
                for answer in answers:
                    assert (await answer).json()["choices"][0]["finish_reason"] == "abort"

        asyncio.run(scenario())
