"""Generation: equal to recomputing without a cache, drawn by the formula, compiled once."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.cache import PagedCache, RollingCache
from jattn.generation import Ending, beam_search, each_token, length_penalties
from tests.conftest import expect
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


def lively() -> Any:
    return model("llama", spread=2.0, seed=2)


@functools.cache
def gpt() -> Any:
    return model("gpt")


def recomputed(module: Any, prompt: np.ndarray, count: int) -> list[int]:
    """Returns the likeliest tokens after a prompt [T], by the whole model each time."""
    tokens = list(prompt)
    for _ in range(count):
        padded = jnp.asarray([tokens + [0] * (LENGTH - len(tokens))], jnp.int32)
        tokens.append(int(jnp.argmax(call(module, padded)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


def test_tokens_equal_recomputing_without_a_cache():
    """Rows of three lengths, padded on either side or in between, with garbage in the padding."""
    module = lively()
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
    module = lively()
    read = nnx.jit(lambda m, t, c: m.step(t, c))
    _, caches = read(module, jnp.asarray(TOKENS[:, :3]), module.start(2, 8))
    want = [recomputed(module, row[:4], 5) for row in TOKENS]
    run = functools.partial(jattn.generate, module, TOKENS[:, 3:4], caches=caches)
    for callback in (None, lambda tokens: None, None):  # the caches do not change
        assert run(max_tokens=5, callback=callback).tokens.tolist() == want
    expect(ValueError, "caches: expected room for 9 tokens, got 8", run, max_tokens=6)


TABLE = np.random.default_rng(5).normal(size=(V, V)).astype(np.float32) * 2
CHAIN = np.roll(np.eye(V, dtype=np.float32), 1, axis=1)  # after each token the next
KEY = jax.random.key(0)
DRAWN: dict[str, Any] = {"temperature": 1.0, "key": KEY}


def expected(logits: np.ndarray) -> np.ndarray:
    """The distribution at temperature 1.5, top_k 5 and top_p 0.6."""
    p = np.exp(np.asarray(logits, np.float64) / 1.5)
    likeliest = np.argsort(-p)[:5]
    earlier_sums = np.cumsum(p[likeliest]) - p[likeliest]
    chosen = np.isin(np.arange(V), likeliest[earlier_sums < 0.6 * p[likeliest].sum()])
    return chosen * p / p[chosen].sum()


def test_tokens_are_drawn_by_their_probability():
    B, options = 4000, {"temperature": 1.5, "top_k": 5, "top_p": 0.6, "key": jax.random.key(0)}
    prompt = np.full((B, 1), 3, np.int32)
    run = functools.partial(jattn.generate, Bigram(TABLE), max_tokens=2, **options)
    generated = run(prompt)
    want = expected(TABLE[3])
    second = want @ np.stack([expected(row) for row in TABLE])
    for column, p in zip(generated.tokens.T, (want, second), strict=True):
        share = np.bincount(np.asarray(column), minlength=V) / B
        assert not np.any(share[p == 0])
        assert np.all(np.abs(share - p) < 5 * np.sqrt(p * (1 - p) / B) + 1e-9)
    again, streamed = run(prompt[:7]), list[Any]()
    assert again.tokens.tolist() == generated.tokens[:7].tolist()  # no row depends on another
    run(prompt[:7], callback=streamed.append)
    assert np.stack(streamed, axis=1).tolist() == again.tokens.tolist()
    assert len(np.unique(again.tokens)) > 3


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
    for stop in ([2], iter([2]), 2, np.array(2), jnp.array([2])):
        ended = jattn.generate(Bigram(CHAIN), prompt, max_tokens=8, stop=stop)
        assert ended.lengths.tolist() == [2, 8, 8]


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
    counts = []
    for number in (1, 3):
        options: Any = {"repetition_penalty": 1 + number / 5, "min_tokens": number, "stop": 2}
        jattn.generate(module, TOKENS, max_tokens=4, beams=3, length_penalty=number / 3, **options)
        counts.append(Bigram.traced)
    assert traced < counts[0] == counts[1]


def test_inside_a_compiled_function():
    @nnx.jit
    def write(module: Any, prompt: Any, valid: Any) -> Any:
        return jattn.generate(module, prompt, max_tokens=3, valid=valid)

    module, valid = gpt(), np.array([[True, True], [True, False]])
    want = jattn.generate(module, TOKENS[:, :2], max_tokens=3, valid=valid)
    got = write(module, jnp.asarray(TOKENS[:, :2]), jnp.asarray(valid))
    assert got.tokens.tolist() == want.tokens.tolist()
    got = write(module, jnp.array([[1, 2], [V, 1]], jnp.int32), jnp.zeros((2, 2), bool))
    assert got.tokens.tolist() == [[-1] * 3] * 2  # no valid token to continue from
    with pytest.raises(ValueError, match="callback: expected None inside a compiled function"):
        jax.jit(lambda x: jattn.generate(module, x, max_tokens=2, callback=print))(TOKENS)


def test_nan_logits_give_no_token():
    """XLA's maximum of many numbers is not NaN."""
    table = np.zeros((8, 8000), np.float32)
    table[np.arange(8), np.arange(8) + 1] = 1
    table[4, 4000] = np.nan
    generated = jattn.generate(Bigram(table), np.array([[2], [5]]), max_tokens=3)
    assert generated.tokens.tolist() == [[3, 4, -1], [6, 7, 8]]


# ------------------------------------------------------------------- processors, samples and beams


def probabilities_after(table: Any, text: list[int], options: Any, generated: int) -> np.ndarray:
    """Returns the log probabilities in float64 of the token after a text, by the formulas."""
    logits, penalty = table[text[-1]].astype(np.float64).tolist(), options.get("penalty", 1.0)
    for token in set(text):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits = options.get("process", lambda logits, text: logits)(logits, text)
    for token in options.get("stop", ()):
        logits[token] = -math.inf if generated < options.get("least", 0) else logits[token]
    return np.array(logits) - np.logaddexp.reduce(logits)


def every_text(table: np.ndarray, prompt: list[int], n: int, options: Any) -> Any:
    """Yields all continuations of up to n tokens with their log probabilities."""
    unfinished: list[tuple[list[int], float]] = [([], 0.0)]
    while unfinished:
        tokens, total = unfinished.pop()
        if tokens and (tokens[-1] in options.get("stop", ()) or len(tokens) == n):
            yield tokens, total
            continue
        gains = probabilities_after(table, prompt + tokens, options, len(tokens))
        unfinished += [
            ([*tokens, x], total + gain) for x, gain in enumerate(gains) if gain > -math.inf
        ]


SMALL = np.random.default_rng(8).normal(size=(4, 4)).astype(np.float32) * 3


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("alpha", "least", "penalty"), [(0.6, 0, 1.0), (0.0, 0, 1.0), (1.0, 3, 1.0), (0.6, 2, 1.7)]
)
def test_wide_beams_find_what_brute_force_finds(alpha, least, penalty):
    """Prompts of three lengths, with padding that may hold any number, and two stop tokens."""
    prompt = np.array([[1, 2, 0], [99, 99, 2], [0, 1, 99]])
    valid = prompt < 99
    rules: Any = {"beams": 64, "length_penalty": alpha, "stop": [3, 0], "pad": 7}
    rules |= {"max_tokens": 4, "min_tokens": least, "repetition_penalty": penalty}
    generated = jattn.generate(Bigram(SMALL), prompt, valid=valid, **rules)
    options = {"penalty": penalty, "least": least, "stop": (0, 3)}
    for row, text in enumerate([[1, 2, 0], [2], [0, 1]]):
        texts = every_text(SMALL, text, 4, options)
        tokens, total = max(texts, key=lambda x: x[1] / ((5 + len(x[0])) / 6) ** alpha)
        assert generated.tokens[row].tolist() == tokens + [7] * (4 - len(tokens))
        assert generated.lengths[row] == len(tokens)
        np.testing.assert_allclose(generated.log_probs[row], total, rtol=1e-5)


def test_there_are_always_as_many_beams():
    """Also if the likeliest continuations of all beams are stop tokens, of which there are two."""
    table = np.log(np.tile(np.array([0.41, 0.11, 0.1, 0.38], np.float32), (4, 1)))
    options: dict[str, Any] = {"max_tokens": 4, "stop": [0, 3], "length_penalty": 8.0}
    generated = jattn.generate(Bigram(table), np.array([[1]]), beams=2, **options)
    assert generated.tokens.tolist() == [[1, 1, 1, 0]]  # ln(0.41 * 0.11^3) / 1.5^8 = -0.29


@pytest.mark.one_in(2)
@pytest.mark.parametrize("callback", [None, len])
def test_processors_change_the_logits_in_order(callback):
    """The penalty is first, then the processors, then the minimum length."""
    prompt: list[int] = [3, 5, 1]
    seen: list[Any] = []
    options: dict[str, Any] = {"max_tokens": 6, "min_tokens": 4, "repetition_penalty": 1.8}
    options["processors"] = [
        lambda logits, tokens, lengths: logits.at[:, 4].add(3.0),
        # twice the logit of the second-to-last token of the text
        lambda logits, tokens, lengths: logits.at[0, tokens[0, lengths[0] - 2]].multiply(2),
        lambda logits, tokens, lengths: logits.at[:, 9].set(30.0),
    ]
    options |= {"stop": [2, 9], "callback": callback and seen.append}
    generated = jattn.generate(Bigram(TABLE), np.array([prompt]), **options)

    def process(logits: list[float], text: list[int]) -> list[float]:
        logits[4] += 3
        logits[text[-2]] *= 2
        logits[9] = 30
        return logits

    text, total = list(prompt), 0.0
    rules: dict[str, Any] = {"penalty": 1.8, "process": process, "stop": (2, 9), "least": 4}
    while len(text) < len(prompt) + 6 and text[-1] not in (2, 9):
        gains = probabilities_after(TABLE, text, rules, len(text) - len(prompt))
        text.append(int(np.argmax(gains)))
        total += gains[text[-1]]
    assert len(text) == 8 and text[-1] == 9
    assert generated.tokens[0, :5].tolist() == text[3:] and generated.lengths.tolist() == [5]
    np.testing.assert_allclose(generated.log_probs, total, rtol=1e-5)
    assert not callback or len(seen) == 5


def test_a_processor_counts_by_value():
    """Changed numbers are seen; equal ones, and arrays of a Partial, share a compiled program."""
    box, module = [4], Bigram(TABLE)

    def forced(processor: Any, rows: int = 1) -> Any:
        options: dict[str, Any] = {"max_tokens": 1, "processors": [processor]}
        return jattn.generate(module, jnp.ones((rows, 1), int), **options).tokens[:, 0]

    read_box = lambda logits, tokens, lengths: logits.at[:, box[0]].set(99)  # noqa: E731
    write = lambda token, logits, tokens, lengths: logits.at[:, token].set(99)  # noqa: E731

    def write_row_numbers(logits: Any, tokens: Any, lengths: Any) -> Any:
        rows = jnp.arange(logits.shape[0])
        return logits.at[rows, rows].set(99)

    assert forced(read_box) == 4
    box[0] = 6
    assert forced(read_box) == 6
    assert forced(jax.tree_util.Partial(write, jnp.int32(5))) == 5
    traced = Bigram.traced
    assert forced(jax.tree_util.Partial(write, jnp.int32(8))) == 8
    box[0] = 4
    assert forced(read_box) == 4
    assert Bigram.traced == traced
    for rows in (2, 3):  # the same function for other shapes
        assert forced(write_row_numbers, rows).tolist() == list(range(rows))
    inside = jax.jit(lambda token: forced(functools.partial(write, token)))
    assert [int(inside(jnp.int32(token))[0]) for token in (3, 7)] == [3, 7]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [PagedCache, None])
def test_samples_and_beams_share_a_prompt(kind):
    """Copies of a prompt equal forked caches; the pool is too small for copies of the prompt."""
    module = model("llama", spread=2.0, seed=2, num_layers=1)
    drawn: Any = {"temperature": 1.3, "key": jax.random.key(2)}
    prompt = TOKENS[:, :7]
    valid = np.arange(7)[None] >= [[0], [2]]
    forked = None
    if kind is not None:  # 2 x 3 pages for the prompts, and for each row its last page and one more
        forked = module.start(2, 9, kind, page_size=2, num_pages=2 * 3 + 6 * 2)
    copied = np.repeat(prompt, 3, axis=0), np.repeat(valid, 3, axis=0)
    want = jattn.generate(module, copied[0], valid=copied[1], max_tokens=3, **drawn)
    options: dict[str, Any] = {"max_tokens": 3, "valid": valid, "caches": forked}
    got = jattn.generate(module, prompt, samples=3, **drawn, **options)
    assert got.tokens.tolist() == want.tokens.tolist()
    assert len(np.unique(got.tokens, axis=0)) >= 5
    np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=1e-4)
    count = 3 if kind else 8
    options["max_tokens"] = count
    best = jattn.generate(module, prompt, beams=3, **options)
    for row in range(2):
        text, total = [*prompt[row, valid[row]]], 0.0
        for token in best.tokens[row].tolist():
            padded = jnp.asarray([text + [0] * (15 - len(text))], jnp.int32)
            logits = np.asarray(call(module, padded)[0, len(text) - 1], np.float64)
            total += logits[token] - np.logaddexp.reduce(logits)
            text.append(token)
        np.testing.assert_allclose(best.log_probs[row], total, rtol=1e-4)


@pytest.mark.one_in(10, slow=True)
@pytest.mark.parametrize("kind", [RollingCache, None])
@pytest.mark.parametrize("chunk", [3, 1, 4, 6, 50])
def test_a_prompt_read_in_chunks_gives_the_same_tokens(chunk, kind):
    module, prompt = lively(), np.concatenate([TOKENS, TOKENS[:, :2]], axis=1)
    for valid in (np.arange(9)[None] < [[9], [4]], None):
        options: Any = {"max_tokens": 3, "valid": valid}
        want = jattn.generate(module, prompt, **options)
        options["caches"] = kind and module.start(2, 64, kind, chunk=3)
        got = jattn.generate(module, prompt, prefill_chunk=chunk, **options)
        assert got.tokens.tolist() == want.tokens.tolist()


def test_no_possible_token():
    """A row gets -1 if all tokens are forbidden, or if a logit is infinite or NaN."""
    table = np.array(SMALL)
    table[2] = np.nan

    def only_1(logits: Any, tokens: Any, lengths: Any) -> Any:
        allowed = jnp.arange(logits.shape[1])[None, :] == 1
        return jnp.where(allowed | jnp.isnan(logits), logits, -jnp.inf)

    forbid = lambda logits, tokens, lengths: jnp.full_like(logits, -jnp.inf)  # noqa: E731
    force = lambda logits, tokens, lengths: logits.at[:, 3].set(jnp.inf)  # noqa: E731
    prompt = np.array([[2], [1]])
    for processor, beams in ((forbid, 1), (force, 1), (force, 2)):
        options: Any = {"max_tokens": 2, "processors": [processor], "beams": beams}
        generated = jattn.generate(Bigram(SMALL), prompt, **options)
        assert generated.tokens.tolist() == [[-1, -1]] * 2
        assert not np.isfinite(generated.log_probs).any()
    searched = jattn.generate(Bigram(table), prompt, max_tokens=2, beams=2, processors=[only_1])
    assert searched.tokens.tolist() == [[-1, -1], [1, 1]]
    assert not np.isfinite(searched.log_probs[0]) and abs(searched.log_probs[1]) < 1e-6


@pytest.mark.parametrize("stop", [0, V - 1])
def test_nan_after_a_finished_hypothesis(stop):
    table = np.zeros((V, V), np.float32)
    table[:, 2], table[:, stop], table[2, 3], table[3, :] = 3.0, 2.0, 9.0, np.nan
    model, prompt = Bigram(table), np.array([[1], [2]])
    generated = jattn.generate(model, prompt, max_tokens=4, stop=stop, beams=2, length_penalty=0)
    assert generated.tokens.tolist() == [[-1] * 4] * 2 and np.isnan(generated.log_probs).all()
    best = beam_search(
        lambda state, tokens: (jnp.asarray(table)[tokens], state),
        (),
        jnp.array([1, stop]),
        Ending(4, (stop,)),
        beams=2,
        penalties=length_penalties(4, 0.0),
        reorder=lambda state, rows: state,
        n_best=3,
        active=jnp.array([True, False]),
    )
    assert np.isnan(best.scores[0]).all() and np.isneginf(best.scores[1]).all()


def test_explicit_mesh():
    mesh = jax.make_mesh((2,), ("data",))
    module = Bigram(TABLE)
    lift = lambda logits, tokens, lengths: logits.at[:, tokens[0, 0]].add(1.0)  # noqa: E731
    cases: Any = ({"beams": 3}, {"samples": 2, **DRAWN})
    for options in cases:
        options |= {"max_tokens": 4, "repetition_penalty": 1.3, "processors": [lift]}
        options |= {"min_tokens": 2, "stop": 3, "prefill_chunk": 1}
        want = jattn.generate(module, TOKENS[:, :3], **options)
        with jax.set_mesh(mesh):
            spread = jax.NamedSharding(mesh, jax.P("data", None))
            got = jattn.generate(module, jax.device_put(TOKENS[:, :3], spread), **options)
            assert jax.typeof(got.tokens).sharding.spec[0] == "data"
        assert got.tokens.tolist() == want.tokens.tolist()


def test_errors():
    without_start = type("Steps", (nnx.Module,), {"step": len})()
    right: dict[str, Any] = {"prompt": TOKENS[:, :1], "max_tokens": 2, "model": gpt()}
    wrong: Any = (
        ({"prompt": np.zeros((2, 0), int)}, ValueError, r"prompt: .* B, T >= 1, got \[2, 0\]"),
        ({"prompt": np.zeros((0, 2), int)}, ValueError, r"prompt: .* B, T >= 1, got \[0, 2\]"),
        ({"prompt": np.zeros(3, int)}, ValueError, r"prompt: expected \[B, T\].* got \[3\]"),
        ({"valid": np.array([[1], [0]], bool)}, ValueError, "valid: expected a token in every row"),
        ({"temperature": 1.0}, ValueError, "key: needed for temperature = 1.0, got None"),
        ({"temperature": -1.0}, ValueError, "temperature: expected temperature >= 0, got -1.0"),
        ({"top_k": 3, "key": KEY}, ValueError, "top_k: expected None at temperature 0, .* got 3"),
        ({"top_p": 0.5}, ValueError, "top_p: expected None at temperature 0, .* got 0.5"),
        ({"stop": (3, 11)}, ValueError, r"stop: expected tokens 0\.\.10 of the vocabulary, got 11"),
        ({"top_p": 1.5}, ValueError, "top_p: expected 0 < top_p <= 1, got 1.5"),
        ({"samples": 2}, ValueError, "samples: 2 samples at temperature 0 .* pass temperature > 0"),
        ({"beams": 2, **DRAWN}, ValueError, "beams: a search with 2 beams draws no tokens; pass "),
        ({"beams": 2, "callback": len}, ValueError, "callback: expected None with beams > 1"),
        ({"repetition_penalty": 1e-46}, ValueError, "repetition_penalty: .* fits float32, got 1e-"),
        (DRAWN | {"temperature": 1e300}, ValueError, r"temperature: .* fits float32, got 1e\+300"),
        ({"stop": ""}, TypeError, "stop: expected a token or several, got ''"),
        ({"min_tokens": 3}, ValueError, "min_tokens: expected at most max_tokens=2, got 3"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty: expected a finite number > 0"),
        ({"length_penalty": 9}, ValueError, r"length_penalty: expected -8\.\.8, got 9"),
        ({"prefill_chunk": 0}, ValueError, "prefill_chunk: expected prefill_chunk >= 1, got 0"),
        ({"processors": len}, TypeError, "processors: expected a list or tuple of functions, got"),
        ({"processors": [lambda x: x]}, TypeError, "processors: expected a function of .logits, "),
        (
            {"processors": [lambda logits, tokens, lengths: tokens]},
            TypeError,
            r"processors: <lambda> must return float logits .* = \[2, 11\], got int32 \[2, 3\]",
        ),
        ({"prompt": np.array([[3], [11]])}, ValueError, r"prompt: .* tokens 0\.\.10 .* got 11"),
        ({"samples": 2, "beams": 2, **DRAWN}, ValueError, "samples: expected 1 with beams > 1"),
        ({"caches": jnp.int8}, TypeError, "caches: expected what model.step gives, got"),
        ({"model": len}, TypeError, "model: expected an nnx.Module with methods start and step"),
        ({"model": nnx.Module()}, TypeError, "and step, got Module without start and step$"),
        ({"model": without_start}, TypeError, "start and step, got Steps without start$"),
        ({"max_tokens": 10}, ValueError, "length: expected length <= max_length=9, got 10"),
    )
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            jattn.generate(**right | options)


def test_a_pool_without_enough_pages_is_refused():
    """The first 4 tokens of a prompt are read, 2 pages of 2. At the end there are 7, on 4 pages."""
    module = model("gpt", num_layers=1)
    start = functools.partial(module.start, 2, 7, PagedCache, page_size=2)
    run: Any = functools.partial(jattn.generate, module, TOKENS[:, :5], max_tokens=3)
    samples: Any = {"samples": 3, **DRAWN}
    for options, needed in ((samples, 2 * (2 + 3 * 2)), ({"beams": 3}, 2 * (3 + 3))):
        says = f"caches: expected num_pages >= {needed} for 3 | of each prompt, got num_pages=8"
        expect(ValueError, says, run, caches=start(), **options)
        enough = start(num_pages=2 * (2 + 3 * 2))
        assert run(caches=enough, **options).tokens.min() >= 0
    lacking = start(num_pages=2 * (2 + 3 * 2) - 1)  # samples need exactly these
    expect(ValueError, "caches: expected num_pages", run, caches=lacking, **samples)


def test_padding_takes_no_room():
    module, valid = gpt(), np.arange(5)[None] < np.array([[2], [2]])
    options: Any = {"max_tokens": 4, "valid": valid}
    write = functools.partial(jattn.generate, module, TOKENS[:, :5], **options)
    assert write(caches=module.start(2, 5)).tokens.min() >= 0
    expect(ValueError, "caches: expected B = 2 | got 3", write, caches=module.start(3, 5))


def test_a_limit_of_no_tokens_gives_none():
    next_logits = lambda state, tokens: (jax.nn.one_hot(tokens + 1, 9), state)  # noqa: E731
    ending = Ending(4, limits=jnp.array([0, 2]))
    likeliest = lambda logits, _: jnp.argmax(logits, axis=-1)  # noqa: E731
    first = jnp.array([0, 5])
    assert each_token(next_logits, (), first, likeliest, ending).lengths.tolist() == [0, 2]
    penalties = length_penalties(4, 1.0)
    options: Any = {"beams": 2, "penalties": penalties, "reorder": lambda state, rows: state}
    found = beam_search(next_logits, (), first, ending, **options)
    assert found.lengths[:, 0].tolist() == [0, 2] and found.scores[0, 0] == -jnp.inf
