"""The engine in a thread: any number of tasks and event loops, and every way of leaving."""

import asyncio
import gc
import subprocess
import sys
import threading

import pytest
import torch

from perilune.bench.agreement import generate_all
from perilune.errors import UserError
from perilune.serve.client.in_process import InProcessClient
from perilune.serve.engine import EngineSettings
from perilune.serve.generation import Finished, GenerationError, GenerationRequest, SampledToken, SamplingParams
from perilune.serve.sequence import Sequence
from tests.serve.small_engines import LENGTH, request, small_engine, small_model

SETTINGS = EngineSettings(max_sequences=3, max_length=LENGTH, prefill_tokens=64)


@pytest.fixture
def client():
    client = InProcessClient(small_model(torch.float64), SETTINGS, name="small")
    yield client
    client._thread._engine.check()
    asyncio.run(client.close())
    client._thread._thread.join(10)
    assert not client._thread._thread.is_alive()


def is_idle(client: InProcessClient) -> bool:
    return (
        not client._thread._engine.has_work
        and not client._thread._mailboxes
        and client._thread._engine._pool.num_free == SETTINGS.max_sequences
    )


async def until_idle(client: InProcessClient) -> None:
    """Let the engine take what was posted."""
    while not is_idle(client):
        await round_trip(client)


async def round_trip(client: InProcessClient) -> None:
    """Through the engine's thread, once: what was posted before is done."""
    await client._call(lambda: None)


def test_many_tasks_at_once_each_get_their_own_answer(client):
    requests = [request(3 + 17 * i % 90, i, max_tokens=2 + i % 7, record_experts=i % 2 == 0) for i in range(20)]

    async def all_at_once():
        return await asyncio.gather(*(client.generate(r) for r in requests))

    answers = asyncio.run(all_at_once())
    expected = generate_all(small_engine(small_model(torch.float64)), requests)
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.request is wanted.request
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-9)
        assert (answer.finished.experts is None) == (wanted.finished.experts is None)
    assert is_idle(client)


def test_a_stream_gives_each_token_and_then_the_end_once(client):
    async def read():
        return [event async for event in client.stream(request(max_tokens=5))]

    *tokens, end = asyncio.run(read())
    assert len(tokens) == 5 and all(isinstance(t, SampledToken) for t in tokens) and end == Finished("length")


def test_closing_a_stream_or_cancelling_its_task_frees_the_request(client):
    endless = [GenerationRequest((1, 2, 3), SamplingParams(seed=i)) for i in range(5)]

    async def leave():
        stream = client.stream(endless[0])
        await anext(stream)
        await stream.aclose()
        tasks = [asyncio.create_task(client.generate(r)) for r in endless[1:]]
        await round_trip(client)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
        await until_idle(client)

    asyncio.run(asyncio.wait_for(leave(), 30))


def test_a_task_cancelled_before_the_engine_took_its_request_leaves_nothing_behind(client):
    """The engine's thread is kept busy while a request is posted and given up."""
    gate = threading.Event()

    async def leave():
        client._thread.post(gate.wait)
        task = asyncio.create_task(client.generate(GenerationRequest((1, 2, 3))))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.set()
        await until_idle(client)

    asyncio.run(asyncio.wait_for(leave(), 30))


def test_an_abort_gives_the_caller_what_there_is(client):
    endless = GenerationRequest((1, 2, 3), SamplingParams(seed=1), record_experts=True)

    async def cut():
        stream = client.stream(endless)
        first = [await anext(stream) for _ in range(3)]
        task = asyncio.create_task(client.generate(GenerationRequest((4,), SamplingParams(max_tokens=200, seed=2), request_id="other")))
        await client.abort([endless.request_id, "nobody"])
        rest = [event async for event in stream]
        await client.abort(["other"])
        return [*first, *rest], await task

    events, other = asyncio.run(asyncio.wait_for(cut(), 30))
    *tokens, end = events
    assert end.reason == "abort" and len(end.experts) == 3 + len(tokens) - 1
    assert other.finished.reason == "abort" and len(other.tokens) < 200
    assert is_idle(client)


def test_a_request_with_the_id_of_a_running_one_is_refused_and_does_not_disturb_it(client):
    first = GenerationRequest((1, 2), SamplingParams(max_tokens=30, seed=1), request_id="same")

    async def both():
        stream = client.stream(first)
        events = [await anext(stream)]
        with pytest.raises(UserError, match="'same' is still running"):
            await client.generate(GenerationRequest((3,), request_id="same"))
        return events + [event async for event in stream]

    assert len(asyncio.run(both())) == 31


def test_one_client_serves_several_event_loops_at_once_and_in_turn(client):
    results = []

    def work(content: int) -> None:
        results.append(asyncio.run(client.generate(request(9, content, max_tokens=20))).token_ids)

    for _ in range(2):
        threads = [threading.Thread(target=work, args=(content,)) for content in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 4 and len(set(results)) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what Python says of a task whose loop is gone
def test_a_loop_that_was_closed_under_its_requests_frees_them(client):
    loop = asyncio.new_event_loop()
    task = loop.create_task(client.generate(GenerationRequest((1, 2, 3))))
    loop.run_until_complete(round_trip(client))
    loop.close()
    task._log_destroy_pending = False
    asyncio.run(asyncio.wait_for(until_idle(client), 30))
    del task
    gc.collect()


def test_a_step_that_raises_fails_the_requests_it_held_and_the_engine_goes_on(client, monkeypatch, caplog):
    run = client._thread._engine._runner.run
    failures = iter([True])

    def failing(plan):
        if next(failures, False):
            raise MemoryError("no room")
        return run(plan)

    monkeypatch.setattr(client._thread._engine._runner, "run", failing)

    async def both():
        return await asyncio.gather(*(client.generate(request(5, i)) for i in range(2)), return_exceptions=True)

    async def first_one_is_held_back():
        gate = threading.Event()
        client._thread.post(gate.wait)
        answers = asyncio.ensure_future(both())
        await asyncio.sleep(0)
        gate.set()
        return await answers

    for answer in asyncio.run(first_one_is_held_back()):
        assert isinstance(answer, GenerationError) and "no room" in str(answer)
    assert "an engine step failed" in caplog.text
    assert len(asyncio.run(client.generate(request(5, max_tokens=4))).tokens) == 4


def test_a_step_that_raises_after_it_ended_a_request_leaves_nobody_waiting(client, monkeypatch):
    monkeypatch.setattr(Sequence, "experts", lambda self: 1 / 0 if self.request.record_experts else None)
    requests = [request(3, i, max_tokens=1, record_experts=i == 1) for i in range(3)]

    async def all_at_once():
        gate = threading.Event()
        client._thread.post(gate.wait)
        answers = asyncio.gather(*(client.generate(r) for r in requests), return_exceptions=True)
        await asyncio.sleep(0)
        gate.set()
        return await asyncio.wait_for(answers, 30)

    first, *others = asyncio.run(all_at_once())
    assert len(first.tokens) == 1
    assert all(isinstance(answer, GenerationError) for answer in others)
    assert is_idle(client)


def test_even_a_request_that_the_engine_lost_gets_an_answer(client, monkeypatch):
    steps = iter([True])
    step, fail_all = client._thread._engine.step, client._thread._engine.fail_all
    monkeypatch.setattr(client._thread._engine, "step", lambda: 1 / 0 if next(steps, False) else step())
    monkeypatch.setattr(client._thread._engine, "fail_all", lambda reason: fail_all(reason)[:0])
    with pytest.raises(GenerationError, match="the engine failed in the step"):
        asyncio.run(asyncio.wait_for(client.generate(request(5)), 30))


def test_a_command_that_raises_does_not_end_the_engine(client):
    client._thread.post(lambda: 1 / 0)
    assert len(asyncio.run(client.generate(request(5, max_tokens=4))).tokens) == 4


def test_what_was_posted_before_close_is_still_done(client):
    gate, done = threading.Event(), threading.Event()

    async def close():
        client._thread.post(gate.wait)
        client._thread.post(done.set)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        gate.set()
        await closing

    asyncio.run(asyncio.wait_for(close(), 30))
    assert done.is_set()


def test_a_client_that_is_forgotten_stops_its_engine():
    client = InProcessClient(small_model(), SETTINGS)
    asyncio.run(client.generate(request()))
    thread = client._thread
    del client
    gc.collect()
    assert thread.is_stopped
    thread.stop().result(30)


def test_new_weights_reach_running_requests_and_bad_ones_reach_nobody(client):
    async def update():
        stream = client.stream(GenerationRequest((1, 2, 3), SamplingParams(max_tokens=100, seed=1)))
        events = [await anext(stream)]
        with pytest.raises(UserError, match="lack"):
            await client.update_weights({}, 5)
        await client.update_weights(small_model(seed=2).state_dict(), 6)
        return events + [event async for event in stream]

    *tokens, _ = asyncio.run(update())
    versions = [t.weight_version for t in tokens]
    assert set(versions) == {0, 6} and versions == sorted(versions)
    assert asyncio.run(client.info()).weight_version == 6


def test_close_ends_what_runs_and_later_calls_say_so():
    client = InProcessClient(small_model(), SETTINGS)

    async def close():
        task = asyncio.create_task(client.generate(GenerationRequest((1, 2, 3))))
        stream = client.stream(GenerationRequest((4,)))
        await anext(stream)
        await client.close()
        await client.close()
        rest = [event async for event in stream]
        with pytest.raises(GenerationError, match="the engine is closed"):
            await client.info()
        return await task, rest[-1]

    answer, end = asyncio.run(asyncio.wait_for(close(), 30))
    assert answer.finished.reason == "abort" and end == Finished("abort")


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "raise ValueError('a bug of the trainer')"])
def test_a_process_ends_as_it_would_without_an_engine_also_while_requests_run(ending):
    script = (
        "import asyncio, sys\nfrom perilune.serve.client.in_process import InProcessClient\n"
        "from perilune.serve.generation import GenerationRequest\nfrom tests.serve.test_in_process import SETTINGS, small_model\n"
        "client = InProcessClient(small_model(), SETTINGS)\n"
        "async def leave():\n    streams = [client.stream(GenerationRequest((1, 2, i))) for i in range(3)]\n"
        "    for stream in streams:\n        await anext(stream)\n    print('running')\n    return streams\n"
        f"loop = asyncio.new_event_loop()\nstreams = loop.run_until_complete(leave())\n{ending}\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout == "running\n"
    assert result.returncode == {"pass": 0, "sys.exit(3)": 3}.get(ending, 1)
    assert "terminate" not in result.stderr and ("ValueError" in result.stderr) == ("ValueError" in ending)
