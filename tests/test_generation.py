"""Generation: equal to recomputing without a cache, drawn by the formula, compiled once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.cache import RollingCache
from tests.test_decoder_only import TOKENS, V, call, model


pytestmark = pytest.mark.usefixtures("quick_compilation")

LENGTH = 9


class Bigram(nnx.Module):
    """A model whose logits depend on the last token alone; caches count the tokens read."""

    traced = 0

    def __init__(self, table: np.ndarray):
        self.table = nnx.Param(jnp.asarray(table, jnp.float32))

    def start(self, batch: int, length: int) -> Any:
        return jnp.zeros(batch, jnp.int32)

    def step(self, tokens, caches, *, valid=None, deterministic=None):
        assert deterministic is True
        Bigram.traced += 1
        read = tokens.shape[1] if valid is None else valid.sum(axis=1, dtype=jnp.int32)
        return self.table[...][tokens], caches + read


def lively(kind: str) -> Any:
    """A model that does not repeat itself."""
    return model(kind, spread=3.5, seed=24) if kind == "gpt" else model(kind, spread=2.0, seed=2)


def recomputed(module: Any, prompt: np.ndarray, count: int) -> list[int]:
    """Returns the likeliest tokens after a prompt [T], by the whole model each time."""
    tokens = list(prompt)
    for _ in range(count):
        padded = jnp.asarray([tokens + [0] * (LENGTH - len(tokens))], jnp.int32)
        tokens.append(int(jnp.argmax(call(module, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
def test_tokens_equal_recomputing_without_a_cache(kind):
    """Rows of three lengths, padded on either side or in between, with garbage in the padding."""
    module = lively(kind)
    rows = [TOKENS[0, :4], TOKENS[1, :1], TOKENS[1, 2:5]]
    places = [[0, 1, 2, 3], [3], [0, 2, 3]]
    prompt, valid = np.full((3, 4), 10**6, np.int32), np.zeros((3, 4), bool)
    for i, (row, indices) in enumerate(zip(rows, places, strict=True)):
        prompt[i, indices], valid[i, indices] = row, True
    generated = jattn.generate(module, prompt, max_tokens=5, valid=valid)
    assert generated.tokens.tolist() == [recomputed(module, row, 5) for row in rows]
    assert len(set(generated.tokens.ravel().tolist())) >= 4
    assert generated.lengths.tolist() == [5, 5, 5]


def test_continues_from_caches():
    module = lively("llama")
    read = nnx.jit(lambda m, t, c: m.step(t, c))
    _, caches = read(module, jnp.asarray(TOKENS[:, :3]), module.start(2, 8))
    want = [recomputed(module, row[:4], 5) for row in TOKENS]
    for callback in (None, lambda tokens: None, None):  # the caches do not change
        generated = jattn.generate(
            module, TOKENS[:, 3:4], max_tokens=5, caches=caches, callback=callback
        )
        assert generated.tokens.tolist() == want
    with pytest.raises(ValueError, match="caches: expected room for 9 tokens, got 8"):
        jattn.generate(module, TOKENS[:, 3:4], max_tokens=6, caches=caches)


@pytest.mark.slow
def test_writes_on_a_rolling_cache():
    module = lively("llama")
    whole = jattn.generate(module, TOKENS, max_tokens=4)
    rolling = module.start(2, 64, RollingCache, chunk=8)
    generated = jattn.generate(module, TOKENS, max_tokens=4, caches=rolling)
    assert generated.tokens.tolist() == whole.tokens.tolist()


TABLE = np.random.default_rng(5).normal(size=(V, V)).astype(np.float32) * 2
CHAIN = np.roll(np.eye(V, dtype=np.float32), 1, axis=1)  # after each token the next


def expected(logits: np.ndarray, temperature: float, top_k: int | None, top_p: float | None) -> Any:
    """Returns the distribution of the next token, computed from the likeliest token on."""
    p = np.exp(np.asarray(logits, np.float64) / temperature)
    chosen, total, order = np.zeros_like(p), 0.0, np.argsort(-p)[:top_k]
    share = p / p[order].sum()
    for token in order:
        if top_p is None or total < top_p:
            chosen[token] = p[token]
        total += share[token]
    return chosen / chosen.sum()


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.5, 5, 0.6), (1.0, None, None), (0.5, None, 1.0), (1.5, 4, None), (1.0, None, 0.7)],
)
def test_tokens_are_drawn_by_their_probability(temperature, top_k, top_p):
    B = 4000
    options: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    prompt = np.full((B, 1), 3, np.int32)
    generated = jattn.generate(
        Bigram(TABLE), prompt, max_tokens=2, key=jax.random.key(0), **options
    )
    want = expected(TABLE[3], **options)
    second = want @ np.stack([expected(row, **options) for row in TABLE])
    for column, p in zip(generated.tokens.T, (want, second), strict=True):
        share = np.bincount(np.asarray(column), minlength=V) / B
        assert not np.any(share[p == 0])
        assert np.all(np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / B) + 1e-9)
    options["key"] = jax.random.key(0)
    again = jattn.generate(Bigram(TABLE), prompt[:7], max_tokens=2, **options)
    assert again.tokens.tolist() == generated.tokens[:7].tolist()  # no row depends on another


def test_rows_end_after_stop_tokens():
    prompt, seen = np.array([[0], [4], [5]]), []
    options = {"max_tokens": 8, "stop": [6, 9], "pad": 1}
    generated = jattn.generate(Bigram(CHAIN), prompt, **options)
    assert generated.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 1, 1], [5, 6] + [1] * 6, [6] + [1] * 7]
    assert generated.lengths.tolist() == [6, 2, 1]
    streamed = jattn.generate(Bigram(CHAIN), prompt, callback=seen.append, **options)
    assert streamed.tokens.tolist() == generated.tokens.tolist()
    assert streamed.lengths.tolist() == generated.lengths.tolist()
    assert np.stack(seen, axis=1).tolist() == generated.tokens[:, :6].tolist()  # and no step more
    single_stop = jattn.generate(Bigram(CHAIN), prompt, max_tokens=8, stop=2)
    assert single_stop.lengths.tolist() == [2, 8, 8]


@pytest.mark.slow
def test_streaming_draws_the_same():
    module, options = model("gpt"), {"temperature": 1.2, "top_p": 0.9, "key": jax.random.key(1)}
    seen: list[Any] = []
    whole = jattn.generate(module, TOKENS[:, :3], max_tokens=5, **options)
    jattn.generate(module, TOKENS[:, :3], max_tokens=5, callback=seen.append, **options)
    assert np.stack(seen, axis=1).tolist() == whole.tokens.tolist()


def test_compiled_once():
    module, earlier = Bigram(TABLE), Bigram.traced

    def write(seed: int, **options: Any) -> None:
        prompt, key = np.full((2, 3), seed, np.int32), jax.random.key(seed)
        jattn.generate(module, prompt, max_tokens=4, key=key, **options)

    write(0, temperature=1.0, top_p=0.5)
    traced = Bigram.traced - earlier
    assert traced <= 4  # the prompt and the loop, and what the loop's types take
    write(1, temperature=0.3, top_p=0.9)
    nnx.update(module, jax.tree.map(lambda x: 2 * x, nnx.state(module)))
    write(2, temperature=0.3, top_p=0.9)
    assert Bigram.traced == earlier + traced
    seen: list[Any] = []
    write(3, temperature=1.0, callback=seen.append)
    traced = Bigram.traced
    write(4, temperature=2.0, callback=seen.append)
    assert Bigram.traced == traced and len(seen) == 8


def test_inside_a_compiled_function():
    @nnx.jit
    def write(module: Any, prompt: Any, valid: Any) -> Any:
        return jattn.generate(module, prompt, max_tokens=3, valid=valid)

    module, valid = model("gpt"), np.array([[True, True], [True, False]])
    want = jattn.generate(module, TOKENS[:, :2], max_tokens=3, valid=valid)
    got = write(module, jnp.asarray(TOKENS[:, :2]), jnp.asarray(valid))
    assert got.tokens.tolist() == want.tokens.tolist()
    got = write(module, jnp.array([[1, 2], [V, 1]], jnp.int32), jnp.zeros((2, 2), bool))
    assert got.tokens.tolist() == [[-1] * 3] * 2  # no valid token to continue from


def test_nan_logits_give_no_token():
    table = np.array(CHAIN)
    table[4] = np.nan
    generated = jattn.generate(Bigram(table), np.array([[2], [5]]), max_tokens=3)
    assert generated.tokens[:, :3].tolist() == [[3, 4, -1], [6, 7, 8]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": np.zeros((2, 0), int)}, ValueError, r"prompt: .* T >= 1, got \[2, 0\]"),
        ({"prompt": np.zeros(3, int)}, ValueError, r"prompt: expected \[B, T\].* got \[3\]"),
        ({"valid": np.array([[1], [0]], bool)}, ValueError, "valid: expected a token in every row"),
        ({"temperature": 1.0}, ValueError, "key: needed for temperature = 1.0, got None"),
        ({"temperature": -1.0}, ValueError, "temperature: expected temperature >= 0, got -1.0"),
        ({"top_p": 1.5}, ValueError, "top_p: expected 0 < top_p <= 1, got 1.5"),
        ({"model": len}, TypeError, "model: expected an nnx.Module with methods start and step"),
        ({"max_tokens": 10}, ValueError, "length: expected length <= max_length=9, got 10"),
    ],
)
def test_errors(options, error, message):
    right: dict[str, Any] = {"prompt": TOKENS[:, :1], "max_tokens": 2, "model": model("gpt")}
    with pytest.raises(error, match=message):
        jattn.generate(**right | options)


def test_no_callback_inside_a_compiled_function():
    with pytest.raises(ValueError, match="callback: expected None inside a compiled function"):
        jax.jit(lambda x: jattn.generate(Bigram(CHAIN), x, max_tokens=2, callback=print))(TOKENS)
