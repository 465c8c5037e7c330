"""`perilune serve` and `perilune chat` as processes, as a user starts them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.serve.small_engines import save_small_model

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("command") / "tiny", vocab_size=268, max_length=1024)


def perilune(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "perilune", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=60)


class Server:
    """A served directory; `address` as the process printed it."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "perilune", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**ENVIRONMENT, **environment}
        )
        assert self.process.stdout is not None
        greeting = self.process.stdout.readline()
        assert " at http://127.0.0.1:" in greeting, self.process.communicate()[1]
        self.address = greeting.split(" at ")[1].split(" ")[0]

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self, number: int) -> tuple[int, str]:
        """Exit status and standard error after the signal."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_served_directory_answers_the_openai_client_until_it_is_told_to_stop(directory, number):
    with Server(directory) as server:
        client = openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny"]
        answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=12, seed=3)
        assert answer.usage.completion_tokens == 12 and answer.choices[0].finish_reason == "length"
        again = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=12, seed=3)
        assert again.choices == answer.choices
        # An endless answer is open when the signal comes.
        stream = client.completions.create(model="tiny", prompt="a", stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        status, errors = server.stop(number)
    assert status == 0
    assert errors.startswith("tiny: 28.63K parameters in float32") and errors.count("\n") == 1


def test_a_key_from_the_environment_is_demanded(directory):
    with Server(directory, PERILUNE_API_KEY="secret") as server:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.address}/v1", api_key="wrong", max_retries=0).models.list()
        assert openai.OpenAI(base_url=f"{server.address}/v1", api_key="secret", max_retries=0).models.list().data


def test_a_port_in_use_is_said_in_a_sentence_before_the_model_is_read(directory):
    with Server(directory) as server:
        port = server.address.rsplit(":", 1)[1]
        result = perilune("serve", "/no/such/model", "--port", port)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"perilune: port {port} on 127.0.0.1 is in use: choose another with --port\n"


@pytest.mark.parametrize("command", ["serve", "chat"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such/model"], "perilune: /no/such/model"),
        (["DIR", "--dtype", "int3"], "perilune: dtype 'int3' is not one"),
        (["DIR", "--max-length", "0"], "perilune: max_length is 0: it must be at least 1"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(directory, command, arguments, message):
    extra = ["--port", "0"] if command == "serve" else []
    result = perilune(command, *(str(directory) if a == "DIR" else a for a in arguments), *extra)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_chat_answers_the_lines_it_is_given(directory):
    result = perilune("chat", directory, "--max-tokens", "5", "--seed", "1", "--effort", "none", stdin="Hello\n/reset\nHello\n")
    assert result.returncode == 0 and result.stderr == ""
    first, second = result.stdout.split("~ a new conversation\n")
    assert "~ cut off after max_tokens, 5\n" in first
    answer = first.split("~ cut off")[0]
    assert answer and second.startswith(answer), "the same seed gives the same answer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--effort", "medium"], "perilune: effort 'medium' is not one of low, high, max, none: choose one with --effort\n"),
        (["--temperature", "-1"], "perilune: temperature is -1.0: it must be a finite number from 0 on\n"),
    ],
)
def test_chat_refuses_what_it_cannot_do(directory, arguments, message):
    result = perilune("chat", directory, *arguments)
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
