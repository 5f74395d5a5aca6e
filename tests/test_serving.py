"""The server of the language experiment: its answers are those of `generate`, and it lives on."""

import contextlib
import http.client
import itertools
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from experiments.language import __main__ as cli
from experiments.language import model as models
from experiments.language import training
from experiments.language.serving import server as servers
from experiments.language.serving.engine import CHUNK, PAGE_SIZE, Engine, GenerationRequest, Refused
from experiments.language.serving.server import LanguageServer
from experiments.language.settings import LanguageSettings
from experiments.language.text import Characters
from jattn.nn import DecoderOnly
from tests.commands import start_python
from tests.conftest import plain_jax
from tests.test_language import TEXT, TINY, a_run
from tests.test_translation import assert_refused


pytestmark = pytest.mark.default_tiles  # so that all servers share their compiled programs

CHARACTERS = Characters.of(TEXT)
BAD = "ä"  # its embedding is NaN
LENGTH, ROWS, WAITING = 64, 4, 12


def lively_model() -> DecoderOnly:
    """A model with spread logits, that gives NaN after one character."""
    settings, V = LanguageSettings().changed([*TINY, "seed=3"]), len(CHARACTERS.alphabet)
    model = models.make(settings, V, tie_embeddings=False, use_bias=True)
    output: Any = model.output
    table, bad = model.tokens.embedding, CHARACTERS.alphabet.index(BAD)
    output.kernel[...] = output.kernel[...] * 20
    output.bias[...] = output.bias[...].at[bad].set(-1e4)  # and so nothing generates it
    table[...] = table[...].at[bad].set(jnp.nan)
    return model


class WatchedEngine(Engine):
    """A slow engine with the lengths of its caches and the least number of free pages."""

    delay = 0.0
    lengths: Any = np.zeros((1, ROWS))
    least_free = 10**6

    def _advance(self, inputs: Any) -> np.ndarray:
        time.sleep(self.delay)
        self.least_free = min(self.least_free, self._free_pages())
        tokens = super()._advance(inputs)
        self.lengths = np.stack([cache.lengths for cache in self._caches])
        return tokens


class Served:
    def __init__(self, **sizes: Any):
        self.model, self.lines = lively_model(), list[str]()
        sizes = {"rows": ROWS, "length": LENGTH, "waiting": WAITING} | sizes
        self.engine = WatchedEngine(self.model, **sizes)
        self.engine.start()
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.server = LanguageServer(self.engine, CHARACTERS, self.lines.append)
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()

    def end(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def send(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        content = body if isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, content, {"Connection": "close"})
        return connection.getresponse()

    def ask(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Returns the status and the answer, the lines of a stream as one."""
        response = self.send("POST", "/generate", fields)
        lines = [json.loads(line) for line in response.read().splitlines()]
        text = {"text": "".join(line.get("text", "") for line in lines)} if lines[1:] else {}
        return response.status, lines[-1] | text

    def health(self) -> dict[str, int]:
        return json.loads(self.send("GET", "/health").read())

    def wait_until(self, holds: Callable[[dict[str, int]], bool]) -> None:
        end = time.monotonic() + 20
        while not holds(self.health()):
            assert time.monotonic() < end, self.health()
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Waits until no request is left, whose pages are then free in the caches, too."""
        self.wait_until(lambda health: health["active"] + health["waiting"] == 0)
        assert self.health()["free_pages"] == self.engine.pages
        self.wait_until(lambda _: not self.engine.lengths.any())


@pytest.fixture(scope="module")
def served(forget_compiled_programs) -> Iterator[Served]:
    """A server for all tests of this module: whatever they ask, it compiles two programs."""
    shapes, uncounted = list[tuple[int, ...]](), DecoderOnly.step

    def counted(self: Any, tokens: Any, *args: Any, **options: Any) -> Any:
        shapes.append(tokens.shape)
        return uncounted(self, tokens, *args, **options)

    forget_compiled_programs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderOnly, "step", counted)
        served = Served()
        yield served
        served.end()
    assert [shape for shape in shapes if shape[0] == ROWS] == [(ROWS, CHUNK), (ROWS, 1)]


def generated(model: DecoderOnly, fields: dict[str, Any]) -> tuple[str, str]:
    stop = CHARACTERS.encode("".join(fields.get("stop", ())))
    prompt, key = CHARACTERS.encode(fields["prompt"])[None], jax.random.key(fields["seed"])
    names = ("max_tokens", "temperature", "top_k", "top_p")
    options: Any = {name: fields[name] for name in names if name in fields}
    answer = jattn.generate(model, prompt, key=key, stop=stop.tolist(), **options)
    row = np.asarray(answer.tokens[0, : answer.lengths[0]])
    return CHARACTERS.decode(row), "stop" if row[-1] in stop else "length"


def requests(count: int, kinds: list[dict[str, Any]], rng: np.random.Generator) -> list[Any]:
    """Requests of these kinds in turn, with random prompts of their `length` and random seeds."""
    letters, bodies = [x for x in CHARACTERS.alphabet if x != BAD], list[Any]()
    for kind in itertools.islice(itertools.cycle(kinds), count):
        fields = dict(kind)
        prompt = "".join(rng.choice(letters, fields.pop("length")))
        bodies.append({**fields, "prompt": prompt, "seed": int(rng.integers(2**32))})
    return bodies


KINDS: list[dict[str, Any]] = [
    {"length": 1, "max_tokens": 30, "temperature": 1.0, "stop": ["e", "\n"]},
    {"length": 40, "max_tokens": 24, "temperature": 0.7, "top_p": 0.9},
    {"length": 33, "max_tokens": 7, "temperature": 4.0, "top_k": 3},
    {"length": 12, "max_tokens": 20, "temperature": 0},
    {"length": 12, "max_tokens": 20, "temperature": 2.0, "top_k": 50, "top_p": 0.8, "stop": ["r"]},
    {"length": 12, "max_tokens": 20, "temperature": 0.3, "top_k": 1, "top_p": 1.0, "stop": ["r"]},
]


def assert_equal_generate(served: Served, bodies: list[Any]) -> None:
    """Requests that are sent together are answered as each alone, whether streamed or not."""
    with ThreadPoolExecutor(WAITING) as pool:  # so that all may wait for a busy engine
        answers = pool.map(lambda x: served.ask(**x[1], stream=x[0] % 3 == 0), enumerate(bodies))
        for (status, answer), fields in zip(answers, bodies, strict=True):
            want, finish = generated(served.model, fields)
            assert status == 200, answer
            assert (answer["text"], answer["finish"]) == (want, finish)
    served.wait_until_idle()


def test_many_requests_at_once_equal_generate(served):
    bodies = requests(16, KINDS, np.random.default_rng(0))
    assert len({fields["prompt"] for fields in bodies}) > 12
    assert_equal_generate(served, bodies)


LONG = {"prompt": "the dog", "max_tokens": 50, "temperature": 1, "stream": True}


@contextlib.contextmanager
def slow_steps(served: Served, seconds: float = 0.05) -> Iterator[None]:
    served.engine.delay = seconds
    yield
    served.engine.delay = 0.0


@pytest.mark.slow
def test_characters_come_one_by_one(served):
    with slow_steps(served):
        response = served.send("POST", "/generate", LONG)
        assert response.getheader("content-type") == "application/x-ndjson"
        first = json.loads(response.readline())
        assert set(first) == {"text"} and served.health()["active"] == 1
    lines = [first, *map(json.loads, response)]
    assert len(lines) == 50 and all(len(line["text"]) == 1 for line in lines)
    assert lines[-1]["finish"] == "length" and "finish" not in lines[-2]


@pytest.mark.parametrize("stream", [False, True])
def test_abandoned_requests_free_their_pages(served, stream):
    """Four that are served, and two that wait."""
    with slow_steps(served):
        connections = []
        for _ in range(ROWS + 2):
            connection = http.client.HTTPConnection("127.0.0.1", served.port)
            connection.request("POST", "/generate", json.dumps({**LONG, "stream": stream}))
            connections.append(connection)
        served.wait_until(lambda health: (health["active"], health["waiting"]) == (ROWS, 2))
        assert served.health()["free_pages"] == 0
        num_served, steps = served.health()["tokens_served"], 3
        for connection in connections:
            assert connection.sock is not None
            connection.sock.close()
        served.wait_until_idle()
        assert served.health()["tokens_served"] - num_served <= steps * ROWS
    served.wait_until(lambda _: [" abandoned, " in x for x in served.lines[-6:]] == [True] * 6)


FIELDS = "prompt, max_tokens, temperature, top_k, top_p, seed, stop, stream"


def test_wrong_requests_have_one_clear_answer(served):
    for body, message in (
        (b"", "body: not valid JSON: EOF"),
        (b'{"prompt": "the"', "body: not valid JSON: EOF"),
        (b"\xff\xfe", "body: not valid JSON: "),
        (b"[" * 2000, "body: not valid JSON: recursion"),
        (b"3", "body: expected "),
        (b"{}", "prompt: expected with every request, got none"),
        ({"prompt": ""}, "prompt: expected at least 1 character, got ''"),
        ({"prompt": 3}, "prompt: expected a valid string, got 3"),
        ({"prompt": "dog X é"}, "prompt: characters that the model does not know: 'X é'"),
        ({"prompt": "the", "max_token": 3}, f"max_token: expected one of the fields {FIELDS}; nea"),
        ({"prompt": "the", "max_tokens": 0}, "max_tokens: expected greater than or equal to 1, go"),
        ({"prompt": "the", "max_tokens": "9"}, "max_tokens: expected a valid integer, got '9'"),
        ({"prompt": "the", "max_tokens": 62}, "max_tokens: expected at most 64 tokens with the "),
        ({"prompt": "e" * 64, "max_tokens": 1}, "got 65, 64 of the prompt and 1 to generate"),
        ({"prompt": "the", "temperature": -1}, "temperature: expected greater than or equal to 0"),
        (b'{"prompt": "the", "temperature": NaN}', "temperature: expected a finite number, got na"),
        ({"prompt": "the", "top_k": 0}, "top_k: expected greater than or equal to 1, got 0"),
        ({"prompt": "the", "top_p": 1.5}, "top_p: expected less than or equal to 1, got 1.5"),
        ({"prompt": "the", "seed": 2**32}, "seed: expected less than 4294967296, got 4294967296"),
        ({"prompt": "the", "stop": ["the"]}, "stop: expected texts of one character, got 'the'"),
        ({"prompt": "the", "stop": ["X"]}, "stop: characters that the model does not know: 'X'"),
        ({"prompt": "the", "stop": [3]}, "stop.0: expected a valid string, got 3"),
        ({"prompt": "the", "stream": 1}, "stream: expected a valid boolean, got 1"),
    ):
        response = served.send("POST", "/generate", body)
        answer = json.loads(response.read())
        assert (response.status, set(answer)) == (400, {"error"}) and message in answer["error"]
        assert "\n" not in answer["error"] and served.health()["free_pages"] == served.engine.pages


def test_other_errors_are_json_too(served, monkeypatch):
    monkeypatch.setattr(servers, "_BODY_SECONDS", 0.4)
    for request, status, size, message in (
        ("GET /nothing", 404, 0, "GET /nothing: expected POST /generate or GET /health"),
        ("GET /generate", 405, 0, "GET /generate: expected POST /generate or GET /health"),
        ("POST /health", 405, 0, "POST /health: expected POST /generate or GET /health"),
        ("POST /generate", 413, 10_000, "body: expected at most 4864 bytes, got more"),
        ("POST /generate", 408, 10, "body: expected within 0 s"),
    ):
        head = f"{request} HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.port), timeout=20) as client:
            client.sendall(head.encode() + b" " * (size if status == 413 else 0))
            response = http.client.HTTPResponse(client)
            response.begin()
            assert response.status == status
            assert json.loads(response.read()) == {"error": message}


def test_a_full_queue_refuses_more(served):
    with ThreadPoolExecutor(ROWS + WAITING) as pool, slow_steps(served):
        fields = {**LONG, "max_tokens": 20, "stream": False}
        busy = [pool.submit(served.ask, **fields) for _ in range(ROWS)]
        served.wait_until(lambda health: health["active"] == ROWS)
        busy += [pool.submit(served.ask, **fields) for _ in range(WAITING)]
        served.wait_until(lambda health: health["waiting"] == WAITING)
        status, answer = served.ask(**LONG)
        message = "12 requests are waiting already; try again later"
        assert (status, answer) == (503, {"error": message})
    assert [future.result()[0] for future in busy] == [200] * (ROWS + WAITING)


def test_a_model_without_probabilities_fails_that_request_only(served):
    (good,) = requests(1, KINDS, np.random.default_rng(2))
    with ThreadPoolExecutor(1) as pool, slow_steps(served, 0.02):
        answer = pool.submit(served.ask, **good)
        for stream in (False, True):
            status, error = served.ask(prompt=f"hund{BAD}", max_tokens=9, stream=stream)
            assert status == 500 and "the model gives no probabilities (NaN)" in error["error"]
    assert answer.result()[1]["text"] == generated(served.model, good)[0]
    served.wait_until_idle()


def test_requests_wait_for_pages(served, monkeypatch):
    monkeypatch.setattr(served.engine, "pages", LENGTH // PAGE_SIZE)  # of one long request
    monkeypatch.setattr(served.engine, "least_free", LENGTH)
    assert_equal_generate(served, requests(8, KINDS, np.random.default_rng(3)))
    assert served.engine.least_free == 0
    with pytest.raises(ValueError, match="pages: expected at least 4, as a request of 64 tokens"):
        Engine(served.model, rows=ROWS, length=LENGTH, pages=3)


def last_lines(served: Served, end: Callable[[], object]) -> list[dict[str, str]]:
    """Returns the last line of a stream that `end` interrupts, and the answer to one that waits."""
    rows = served.engine.rows
    with ThreadPoolExecutor(rows + 1) as pool, slow_steps(served):
        streams = [served.send("POST", "/generate", LONG) for _ in range(rows)]
        for stream in streams:
            assert "text" in json.loads(stream.readline())
        waiting = pool.submit(served.ask, **LONG)
        served.wait_until(lambda health: health["waiting"] == 1)
        end()
        lines = [json.loads(stream.read().splitlines()[-1]) for stream in streams]
        status, answer = waiting.result()
        assert status == 503
    served.thread.join(20)
    assert not served.thread.is_alive() and not served.engine._thread.is_alive()
    with pytest.raises(Refused):
        served.engine.submit(GenerationRequest((0,), 1), print)
    return [*lines, answer]


def test_a_server_that_stops_ends_all_requests():
    served = Served()
    lines = last_lines(served, lambda: setattr(served.server, "should_exit", True))
    assert lines == [{"error": "the server is stopping"}] * (ROWS + 1)


def test_a_failure_of_the_engine_ends_all_requests():
    served = Served()

    def fail() -> None:
        served.engine._step = lambda *_: 1 / 0

    error = "the engine failed: division by zero"
    assert last_lines(served, fail) == [{"error": error}] * (ROWS + 1)
    assert served.engine.failure == error


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("serving")
    text = directory / "text.txt"
    text.write_text(TEXT, "utf-8")
    with plain_jax():
        run = a_run(directory / "run", text)
        run.save(training.init_state(run)[1], 1)
    return run.directory


def test_wrong_options_are_one_clear_line(trained, as_users_run_it, capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        for option, value, message in (
            ("--pages", 3, "pages: expected at least 32, as a request of 512 tokens needs, got 3"),
            ("--port", 70000, "argument --port: expected at most 65535, got 70000"),
            ("--host", "nowhere.invalid", "error: "),
            ("--rows", 0, "argument --rows: expected at least 1, got 0"),
            ("--port", other.getsockname()[1], "in use"),
        ):
            command = ("serve", "--run", trained, "--port", 0, option, value)
            assert_refused(command, message, capsys, cli.main)


@pytest.mark.one_in(2, slow=True)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_command_serves_until_a_signal(number, status, trained):
    command = ("-m", "experiments.language", "serve", "--run", trained, "--port", "0")
    with start_python(*command, "--cache-dtype", "int8") as server:
        assert server.stdout is not None
        line, address = server.stdout.readline(), r"http://127\.0\.0\.1:(\d+)"
        match = re.fullmatch(rf"serving {trained} at {address}; Ctrl-C ends\n", line)
        assert match, line
        connection = http.client.HTTPConnection("127.0.0.1", int(match[1]), timeout=60)
        fields = {"prompt": "der hund", "max_tokens": 500, "stream": True}
        connection.request("POST", "/generate", json.dumps(fields), {"Connection": "close"})
        stream = connection.getresponse()
        assert "text" in json.loads(stream.readline())
        server.send_signal(number)
        assert {"error": "the server is stopping"} == json.loads(stream.read().splitlines()[-1])
        out, error = server.communicate(timeout=60)
    assert (server.returncode, error) == (status, "interrupted\n")
    assert re.fullmatch(r"8 \+ \d+ characters, the server is stopping, [\d.]+ s\n", out)
