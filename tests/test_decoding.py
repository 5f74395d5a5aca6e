"""The searches on models that are tables, against plain Python; and translations by them."""

import collections
import functools
import io
import itertools
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.translation import __main__ as cli
from experiments.translation import decoding, searches
from experiments.translation.decoding import Search
from experiments.translation.vocabulary import BOS, EOS, PAD, UNK
from jattn.generation import Hypotheses
from tests.arrays import assert_equal
from tests.conftest import assert_trees_close, expect, plain_jax, quick_jit
from tests.test_console import Terminal
from tests.test_translation import bench, decided_params, padded


V = 6  # <pad>, <unk>, <bos>, <eos> and two words: of these three symbols and <eos> can be generated
ALLOWED = (UNK, EOS, 4, 5)
CODES = 997  # a prefix is known by a number below this: its own up to four tokens, hashed beyond


class TableState(NamedTuple):
    """A prefix in each row, the sentence of the row, and the number of tokens read."""

    code: jax.Array
    sentence: jax.Array
    place: jax.Array


def longer(code: Any, token: Any) -> Any:
    return (code * V + token) % CODES


def first_state(sentences: int, copies: int = 1) -> TableState:
    rows = jnp.repeat(jnp.arange(sentences, dtype=jnp.int32), copies)
    return TableState(jnp.zeros_like(rows), rows, jnp.zeros((), jnp.int32))


def table_step(tables, traced: Any = None, record: Any = None):
    """Returns a model that looks up logits in `[B, CODES, V]`. `traced` gets the shape of tokens of
    each trace, `record` tokens and place of each step."""

    def model(state, tokens):
        if traced is not None:
            traced.append(tokens.shape)
        if record is not None:
            jax.debug.callback(record, tokens, state.place, ordered=True)
        code = longer(state.code, tokens)
        return tables[state.sentence, code], TableState(code, state.sentence, state.place + 1)

    return model


def recorded(tables) -> tuple[Any, list[tuple[list[int], int]]]:
    """Returns `table_step`, and the tokens and the place of each step that has run."""
    seen: list[tuple[list[int], int]] = []
    record = lambda tokens, place: seen.append((tokens.tolist(), int(place)))  # noqa: E731
    return table_step(jnp.asarray(tables), record=record), seen


def reorder(state: TableState, rows: jax.Array) -> TableState:
    return TableState(state.code[rows], state.sentence[rows], state.place)


def random_tables(sentences: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (2 * random.standard_normal((sentences, CODES, V))).astype(np.float32)


@functools.partial(quick_jit, static_argnames=("length", "beams", "n_best", "length_penalty"))
def run_search(tables, active, *, length, beams, **options):
    begin = table_step(tables), first_state(len(tables), max(beams, 1)), active, length
    if beams:
        return searches.beam(*begin, beams=beams, reorder=reorder, **options)
    return searches.greedy(*begin, **options)


def searched(tables, active=None, *, length=8, beams=0, **options) -> Any:
    """The result of a beam search, or of a greedy one with 0 beams."""
    active = np.ones(len(tables), bool) if active is None else np.array(active)
    return jax.device_get(run_search(tables, active, length=length, beams=beams, **options))


def log_probs_after(table: np.ndarray, prefix: tuple[int, ...]) -> dict[int, float]:
    """Log probabilities of the tokens that can be generated, by a table `[CODES, V]`."""
    row = table[functools.reduce(longer, (BOS, *prefix), 0)].astype(np.float64)
    total = math.log(sum(math.exp(row[token]) for token in ALLOWED))
    return {token: row[token] - total for token in ALLOWED}


def plain_beam(table, length, beams, alpha):
    """Beam search as its docstring says, but always up to the last place."""
    alive: list[Any] = [((), 0.0)]
    finished: list[Any] = []
    for _ in range(length):
        continued = [
            ((*tokens, token), log_prob + gain)
            for tokens, log_prob in alive
            for token, gain in log_probs_after(table, tokens).items()
        ]
        continued = sorted(continued, key=lambda pair: -pair[1])[: 2 * beams]
        finished += [pair for pair in continued if pair[0][-1] == EOS]
        alive = [pair for pair in continued if pair[0][-1] != EOS][:beams]
    scored = [(x / ((5 + len(tokens)) / 6) ** alpha, tokens, x) for tokens, x in finished + alive]
    return sorted(scored, key=lambda hypothesis: -hypothesis[0])


def path_table(*generated: int) -> np.ndarray:
    """`[1, CODES, V]`: after each beginning of this sequence the next of its tokens has the
    probability 3/4; after any other prefix all are equal."""
    table = np.zeros((1, CODES, V), np.float32)
    for place, token in enumerate(generated):
        row = np.full(V, -np.inf)
        row[[token, ALLOWED[ALLOWED.index(token) - 1]]] = np.log([0.75, 0.25])
        row[[PAD, BOS]] = 7.0  # likely, but not to be generated
        table[0, functools.reduce(longer, (BOS, *generated[:place]), 0)] = row
    return table


def test_greedy_feeds_back_its_tokens_and_ends_with_the_last_row():
    model, seen = recorded(np.concatenate([path_table(4, 5, EOS), path_table(5, 5, 5)]))
    result = searches.greedy(model, first_state(2), jnp.asarray([True, False]), 7)
    jax.effects_barrier()
    assert np.asarray(result.tokens).tolist() == [[4, 5, EOS, *[PAD] * 4], [PAD] * 7]
    np.testing.assert_allclose(result.log_probs, [3 * math.log(0.75), 0], rtol=1e-6)
    assert result.tokens.dtype == jnp.int32 and result.log_probs.dtype == jnp.float32
    assert seen == [([BOS, BOS], 0), ([4, PAD], 1), ([5, PAD], 2)]


def test_of_equal_tokens_the_first_is_said_and_never_padding_or_the_beginning():
    even = np.zeros((1, CODES, V), np.float32)
    even[..., [PAD, BOS]] = 9
    result = searched(even, length=2)
    assert result.tokens.tolist() == [[UNK, UNK]]
    np.testing.assert_allclose(result.log_probs, 2 * math.log(0.25), rtol=1e-6)
    best = searched(even, length=2, beams=3, n_best=4, length_penalty=0.0)
    # <eos> alone is likelier than two tokens, of which those with <eos> have been found first
    assert best.tokens[0].tolist() == [[EOS, PAD], [UNK, EOS], [4, EOS], [UNK, UNK]]


def test_a_beam_of_one_is_greedy():
    tables, active = random_tables(7), np.arange(7) != 2
    generated = searched(tables, active)
    result = searched(tables, active, beams=1, n_best=2)
    np.testing.assert_array_equal(result.tokens[:, 0], generated.tokens)
    np.testing.assert_array_equal(result.log_probs[active, 0], generated.log_probs[active])
    assert len(set((generated.tokens != PAD).sum(axis=1))) > 4
    assert (result.scores[:, 1] == -np.inf).all() and (result.tokens[:, 1] == PAD).all()
    assert (result.scores[2] == -np.inf).all() and (result.log_probs[2] == -np.inf).all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("beams", [0, 1, 3])
@pytest.mark.parametrize("alpha", [-0.5, 0.6])
def test_each_sentence_has_a_limit_of_its_own(beams, alpha):
    tables, limits = random_tables(6, seed=6), np.array([1, 7, 3, 3, 7, 1], np.int32)
    tables[:, :, EOS] -= 4  # nearly all come to their limits
    options: dict[str, Any] = {}
    if beams:
        options = {"beams": beams, "n_best": max(beams - 1, 1), "length_penalty": alpha}
    result = searched(tables, length=7, limits=limits, **options)
    for limit in (1, 3, 7):
        rows = limits == limit
        ids, *numbers = (x[rows] for x in result)
        alone = searched(tables[rows], length=limit, **options)
        np.testing.assert_array_equal(ids[..., :limit], alone.tokens)
        assert (ids[..., limit:] == PAD).all()
        assert_trees_close(numbers, [*alone[1:]], rtol=1e-6)


@pytest.mark.parametrize("alpha", [-0.5, 0.6, 1.3])
@pytest.mark.parametrize(("beams", "n_best", "length"), [(2, 2, 8), (5, 3, 8), (81, 125, 4)])
def test_a_beam_is_that_of_plain_python(beams, n_best, length, alpha):
    """The last beam holds every hypothesis; there are 121. A sentence is not active."""
    tables, active = random_tables(12, seed=2), np.arange(12) != 11
    tables[11] = np.nan
    options = {"length": length, "beams": beams, "n_best": n_best, "length_penalty": alpha}
    result = searched(tables, active, **options)
    assert (result.tokens[11] == PAD).all() and (result.scores[11] == -np.inf).all()
    for sentence in range(11):
        scores, sequences, log_probs = zip(
            *plain_beam(tables[sentence], length, beams, alpha)[:n_best], strict=True
        )
        got = Hypotheses(*(array[sentence, : len(scores)] for array in result))
        rows = [tuple(row[:n].tolist()) for row, n in zip(got.tokens, got.lengths, strict=True)]
        assert rows == [*sequences]
        np.testing.assert_allclose(got.scores, scores, rtol=1e-5)
        np.testing.assert_allclose(got.log_probs, log_probs, rtol=1e-5)
    assert (result.scores[:, 121:] == -np.inf).all() and (result.tokens[:, 121:] == PAD).all()
    assert len({int((row != PAD).sum()) for row in result.tokens[:, 0]}) > 2


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("alpha", "n_best", "steps"), [(0.0, 1, 1), (0.6, 1, 1), (0.0, 2, 2), (0.6, 2, 4), (-0.6, 2, 2)]
)
def test_a_beam_ends_when_nothing_can_become_better(alpha, n_best, steps):
    # <eos> has 0.94 everywhere, each other token 0.02. After <eos> (-0.06) and a second hypothesis
    # of two tokens (-3.97 / 1.10) are kept, beams of n tokens have -3.91·n, by at most 3.35.
    table = np.full((1, CODES, V), math.log(0.02), np.float32)
    table[..., EOS] = math.log(0.94)
    model, seen = recorded(table)
    begin = first_state(1, 2), jnp.ones(1, bool), 40
    options = {"n_best": n_best, "length_penalty": alpha}
    result = searches.beam(model, *begin, beams=2, reorder=reorder, **options)
    jax.effects_barrier()
    assert result.tokens[0, 0].tolist() == [EOS, *[PAD] * 39]
    assert [place for _, place in seen] == list(range(steps))


PROBABILITIES = {UNK: 0.1, EOS: 0.2, 4: 0.3, 5: 0.4}
ROWS = 4001


@functools.partial(
    quick_jit, static_argnames=("rows", "length", "temperature", "top_k", "top_p", "width")
)
def run_sample(logits, key, *, rows, length, **options):
    model = lambda state, tokens: (jnp.broadcast_to(logits, (rows, V)), state)  # noqa: E731
    return searches.sample(model, (), jnp.ones(rows, bool), length, key, **options)


def sampled(probabilities, *, rows=ROWS, length=1, seed=0, **options) -> Any:
    logits = np.full(V, -np.inf, np.float32)
    logits[list(probabilities)] = np.log(list(probabilities.values()))
    logits[[PAD, BOS]] = 8.0
    key = jax.random.key(seed)
    return jax.device_get(run_sample(logits, key, rows=rows, length=length, **options))


def assert_drawn_from(drawn, probabilities):
    """Checks that things are drawn with these probabilities, within 4 standard deviations."""
    counts = collections.Counter(drawn)
    assert set(counts) == set(probabilities)
    for thing, p in probabilities.items():
        assert abs(counts[thing] - p * len(drawn)) <= 4 * math.sqrt(len(drawn) * p * (1 - p)), thing


def test_places_and_rows_are_drawn_independently():
    words = {4: 0.3, 5: 0.7}
    result = sampled(words, length=2)
    pairs = {(a, b): words[a] * words[b] for a, b in itertools.product(words, repeat=2)}
    assert_drawn_from(list(map(tuple, result.tokens.tolist())), pairs)
    assert_drawn_from(list(itertools.pairwise(result.tokens[:, 0].tolist()))[::2], pairs)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"top_k": 2}, {5, 4}),
        ({"top_k": V + 5}, {5, 4, EOS, UNK}),
        ({"top_p": 0.05}, {5}),
        ({"top_p": 0.39}, {5}),
        ({"top_p": 0.41}, {5, 4}),
        ({"top_p": 0.69}, {5, 4}),
        ({"top_p": 0.71}, {5, 4, EOS}),
        ({"top_p": 1.0}, {5, 4, EOS, UNK}),
        ({"top_k": 2, "top_p": 0.5}, {5}),  # of the two likeliest, which have 4/7 and 3/7
        ({"top_k": 3, "top_p": 0.5}, {5, 4}),
        ({"temperature": 0.25, "top_p": 0.7}, {5}),  # 0.4 becomes 0.72
        ({"temperature": 0.5}, {5, 4, EOS, UNK}),
    ],
)
def test_tokens_are_drawn_by_their_probabilities_among_exactly_those_kept(options, tokens):
    """The log probability is the model's, whatever the options."""
    result = sampled(PROBABILITIES, **options)
    drawn = result.tokens[:, 0].tolist()
    exponent = 1 / options.get("temperature", 1)
    weights = {token: p**exponent for token, p in PROBABILITIES.items() if token in tokens}
    total = sum(weights.values())
    assert_drawn_from(drawn, {token: weight / total for token, weight in weights.items()})
    expected = [math.log(PROBABILITIES[token]) for token in drawn]
    np.testing.assert_allclose(result.log_probs, expected, rtol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"temperature": 0}, {"temperature": 1e-50}, {"temperature": 2e-38}]
)
def test_sampling_without_chance_is_greedy(options):
    tables = jnp.asarray(20 * random_tables(7, seed=6))
    begin = table_step(tables), first_state(7), jnp.arange(7) != 2, 8
    assert_equal(searches.sample(*begin, jax.random.key(0), **options), searches.greedy(*begin))


def test_a_key_decides_and_more_rows_change_nothing():
    words = {4: 0.4, 5: 0.5, EOS: 0.1}
    drawn, same, other = (sampled(words, rows=5, length=9, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(drawn.tokens, same.tokens)
    assert (drawn.tokens != other.tokens).any(axis=1).all()
    np.testing.assert_array_equal(sampled(words, rows=3, length=9).tokens, drawn.tokens[:3])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(5)[::-1])
    logits = np.log(np.array([words.get(token, 1e-30) for token in range(V)], np.float32))
    swapped = run_sample(logits, keys, rows=5, length=9)
    np.testing.assert_array_equal(swapped.tokens, drawn.tokens[::-1])


def options_of(kind: str) -> dict[str, Any]:
    options: dict[str, Any] = {"greedy": {}, "beam": {"beams": 3, "reorder": reorder}}
    return options.get(kind, {"key": jax.random.key(0), "top_p": 0.9})


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["greedy", "sample", "beam"])
def test_a_step_is_traced_as_often_for_a_long_search_as_for_a_short_one(kind):
    calls: list[list[tuple[int]]] = [[], []]
    for traced, length in zip(calls, (4, 40), strict=True):
        model = table_step(jnp.asarray(random_tables(2)), traced)
        begin = model, first_state(2, 3 if kind == "beam" else 1), jnp.ones(2, bool), length
        jax.eval_shape(lambda begin=begin: getattr(searches, kind)(*begin, **options_of(kind)))
    assert calls[0] == calls[1] == [(6 if kind == "beam" else 2,)] * len(calls[0])
    assert len(calls[0]) <= 3


def test_bad_options_are_named_before_anything_is_traced():
    def model(state, tokens):
        raise AssertionError("traced")

    wrong: Any = (
        ("greedy", {"length": 0}, "length: expected a whole number of at least 1, got 0"),
        ("beam", {"beams": 0}, "beams: expected a whole number of at least 1, got 0"),
        ("beam", {"beams": 2.0}, "beams: expected a whole number of at least 1, got 2.0"),
        ("beam", {"n_best": -1}, "n_best: expected a whole number of at least 1, got -1"),
        ("beam", {"length_penalty": math.nan}, "length_penalty: expected a finite number, got nan"),
        ("sample", {"temperature": -0.1}, "temperature: expected a number not below 0, got -0.1"),
        ("sample", {"temperature": math.nan}, "temperature: expected | got nan"),
        ("sample", {"top_k": 0}, "top_k: expected a whole number of at least 1, got 0"),
        ("sample", {"top_p": 0.0}, "top_p: expected 0 < top_p <= 1, got 0.0"),
        ("sample", {"top_p": 1.1}, "top_p: expected 0 < top_p <= 1, got 1.1"),
    )
    for kind, options, says in wrong:
        search = functools.partial(getattr(searches, kind), model, (), jnp.ones(2, bool))
        expect(ValueError, says, search, **{"length": 3} | options_of(kind) | options)
    with pytest.raises(ValueError, match=r"kind: expected one of .* got 'best'"):
        Search(kind="best")  # pyright: ignore[reportArgumentType]


def sources(count: int) -> list[list[int]]:
    return [bench().source.encode(pair.source) for pair in bench().texts.train[:count]]


def translations(count: int, **options):
    return decoding.translations(bench().model, decided_params(), sources(count), Search(**options))


@pytest.mark.usefixtures("as_users_run_it")
def test_nothing_is_compiled_after_the_first_batch_of_a_shape():
    counted: Any = decoding.search_batch
    rows = sources(6)
    width = max(map(len, rows))
    rows = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
    decoding.translations(bench().model, decided_params(), rows[:3])
    compiled = counted._cache_size()
    decoding.translations(bench().model, decided_params(), rows[3:])
    assert counted._cache_size() == compiled > 0


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_each_sentence_gets_its_own_best_translations():
    result = translations(5, kind="beam", beams=3, n_best=3)
    for best in result:
        scores = [generated.score for generated in best]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(generated.ids) for generated in best}) == 3
    params, rows, beam = decided_params(), sources(5), Search(kind="beam", beams=3, n_best=3)
    (alone,) = decoding.translations(bench().model, params, [rows[3]], beam)
    ids_of = lambda best: [generated.ids.tolist() for generated in best]  # noqa: E731
    assert ids_of(alone) == ids_of(result[3])
    best = decoding.translated(bench().model, params, rows, Search(kind="beam", beams=3))
    assert [ids.tolist() for ids in best] == [row[0].ids.tolist() for row in result]
    batch = jnp.asarray(padded(rows, 24)), jnp.asarray([len(row) for row in rows])
    ids = decoding.search_batch(bench().model, params, *batch, length=9).tokens[:, 0]
    generated = decoding.translated(bench().model, params, rows)
    np.testing.assert_array_equal(ids, padded([row[:9] for row in generated], 9))


@pytest.mark.usefixtures("as_users_run_it")
def test_missing_hypotheses_are_left_out(monkeypatch):
    ids = np.array([[[4, EOS, PAD], [PAD] * 3]], np.int32)
    arrays = map(jnp.asarray, (ids, [[2, 0]], [[-2.0, -np.inf]], [[-1.0, -np.inf]]))
    best_of_two = Hypotheses(*arrays)
    monkeypatch.setattr(decoding, "search_batch", lambda *_, **options: best_of_two)
    ((best,),) = translations(1, kind="beam", beams=2, n_best=2)
    assert (best.ids.tolist(), best.score, best.log_prob) == ([4, EOS], -1.0, -2.0)


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_samples_are_decided_by_seed_and_sentence_and_not_by_batches(monkeypatch):
    def drawn(count, seed, **options):
        rows = translations(count, kind="sample", seed=seed, **options)
        return [row[0].ids.tolist() for row in rows]

    five = drawn(5, 1)
    assert drawn(5, 1) == five != drawn(5, 2)
    assert max(map(len, five)) > 8
    greedy = [row[0].ids.tolist() for row in translations(5)]
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}):
        assert drawn(5, 1, **options) == greedy
    monkeypatch.setattr(decoding, "_ROWS", 2)  # batches of other widths
    assert drawn(5, 1) == five and drawn(3, 1) == five[:3]
    rows, search = sources(1) * 4, Search(kind="sample")
    same = decoding.translated(bench().model, decided_params(), rows, search)
    assert len({tuple(ids) for ids in same}) > 1


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory) -> Path:
    """A run whose model has learned nothing, but generates different sentences."""
    directory = tmp_path_factory.mktemp("runs") / "run"
    with plain_jax():
        run = bench().run(directory)
        run.create()
        run.save({"params": decided_params()}, 1)
    return directory


@pytest.fixture
def translate(run_directory, as_users_run_it, capsys, monkeypatch):
    """Calls the command with arguments and stdin; returns its lines."""

    def call(*arguments: Any, stdin: str = "", status: int = 0) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        assert cli.main(["translate", "--run", str(run_directory), *map(str, arguments)]) == status
        output = capsys.readouterr()
        assert (output.err == "") == (status == 0)
        return output.out.split("\n")[:-1]

    return call


def text(count: int) -> str:
    """Sentences, with an empty line after the first, and one of white space at the end."""
    first, *rest = (pair.source for pair in bench().texts.train[:count])
    return "\n".join([first, "", *rest, "  "]) + "\n"


def test_the_order_of_lines_is_kept_and_empty_ones_stay_empty(translate):
    expected = [bench().target.decode(best[0].ids) for best in translations(6)]
    assert len(set(expected)) > 3
    assert translate(stdin=text(6)) == [expected[0], "", *expected[1:], ""]
    assert translate(stdin="") == [] and translate(stdin="\n") == [""]
    assert translate(stdin="\u200b\n\ufeff \u2060\n") == ["", ""]


def test_quantised_caches_change_log_probabilities_slightly(translate):
    lines = translate("--cache-dtype", "int8", "--scores", stdin=text(4))
    quantized, exact = translations(4, cache_dtype="int8"), translations(4)
    first = quantized[0][0]
    assert lines[0].split("\t")[1:] == [f"{first.log_prob:.4f}", bench().target.decode(first.ids)]
    log_probs = np.array([[row[0].log_prob for row in rows] for rows in (quantized, exact)])
    same = [np.array_equal(a[0].ids, b[0].ids) for a, b in zip(quantized, exact, strict=True)]
    assert sum(same) >= 3
    assert 0 < np.abs(log_probs[0] - log_probs[1])[same].max() < 0.01 * np.abs(log_probs).max()
    assert "int8" in str(Search(cache_dtype="int8"))


@pytest.mark.usefixtures("as_users_run_it")
def test_a_row_without_words_has_an_empty_translation():
    rows = [[EOS], *sources(1), [EOS]]
    result = decoding.translated(bench().model, decided_params(), rows)
    assert [bench().target.decode(ids) for ids in result][::2] == ["", ""]
    alone = decoding.translated(bench().model, decided_params(), rows[1:2])
    assert result[1].tolist() == alone[0].tolist() != [EOS]


@pytest.mark.slow
def test_the_best_are_printed_with_their_scores_and_alignments(translate):
    options = ("--beam", 3, "--n-best", 2, "--scores", "--alignments")
    lines = translate(*options, stdin=text(3))
    rows = [row for row in sources(3) for _ in range(2)]
    best = [x for row in translations(3, kind="beam", beams=3, n_best=2) for x in row]
    generated = [x.ids.tolist() for x in best]
    links = decoding.alignments(bench().model, decided_params(), rows, generated)
    assert any(links)
    expected = []
    for x, row in zip(best, links, strict=True):
        fields = f"{x.score:.4f}", f"{x.log_prob:.4f}", bench().target.decode(x.ids)
        pairs = " ".join(f"{source}-{target}" for source, target in row)
        expected.append("\t".join((*fields, pairs)))
    assert lines == [*expected[:2], "", "", *expected[2:], "", ""]
    assert translate("--alignments", stdin="\n") == [""]
    other = translate("--beam", 3, "--length-penalty", -1, "--scores", stdin=text(3))
    score, log_prob, _ = other[0].split("\t")
    assert float(score) < float(log_prob)


def test_a_terminal_gets_a_bar_and_each_line_is_answered(run_directory, as_users_run_it, capsys):
    first, second = (pair.source for pair in bench().texts.train[:2])
    long = " ".join([first] * 9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", Terminal(f"{first}\n{long}\n{second}\n"))
        patch.setattr(sys, "stderr", Terminal())
        assert cli.main(["translate", "--run", str(run_directory)]) == 0
        errors = sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "sentence/s" in errors and "Ctrl-D" in errors and "error: expected at most 32" in errors
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_line_that_is_too_long_is_named_and_the_others_are_translated(
    run_directory, as_users_run_it, capsys, monkeypatch, tmp_path
):
    first, second = (pair.source for pair in bench().texts.train[:2])
    long = " ".join([first] * 9)
    text, out, file = f"{first}\n{long}\n\n{second}\n{long}\n", tmp_path / "out", tmp_path / "text"
    file.write_text(text)
    out.write_text("kept")
    unasked = ["translate", "--run", str(run_directory), first, "--output", str(out)]
    assert cli.main(unasked) == 2 and out.read_text() == "kept"
    assert "exists already" in capsys.readouterr().err
    message = "2: expected at most 32 tokens (max_length, counting <eos>), got "
    places = ("stdin", ()), ("SENTENCE", text.splitlines()), (file, ("--file", str(file)))
    for place, arguments in places:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        command = ["translate", "--run", str(run_directory), *arguments]
        assert cli.main([*command, "--output", str(out), "--overwrite"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {place}:{message}") and error.count("\n") == 1
        assert error.endswith("; its lines are empty, and those of 5\n")
        assert [bool(line) for line in out.read_text().split("\n")] == [1, 0, 0, 1, 0, 0]
