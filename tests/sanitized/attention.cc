// Compares the kernel, without XLA, with the plain formula in double precision, on random shapes,
// masks and score functions, under a sanitizer.

#include "../../jattn/kernels/cpu/src/attention.cc"

#include "common.h"

namespace {

struct RandomProblem {
  Index B, t, S, K, group, N, H, V;
  double scale, cap, dropout_scale = 1;
  uint32_t threshold = 0;
  Array<T> q, k, v;
  Array<int32_t> from, until, q_ids, kv_ids;
  Array<T> bias;
  Array<uint32_t> seeds;

  // An operand has a row for each of the batch, or one for all.
  static Index rows(Index B) { return once_in(2) ? B : 1; }

  RandomProblem(Index B, Index t, Index S, Index K, Index group, Index H, Index V, Index diagonals,
                bool ids, bool drops)
      : B(B), t(t), S(S), K(K), group(group), N(K * group), H(H), V(V),
        scale(1 / std::sqrt(H)), cap(diagonals || once_in(2) ? 0 : 1.5),
        q({B, t, N, H}, 2), k({B, S, K, H}, 2), v({B, S, K, V}, 1),
        from({rows(B), 1, t}), until({rows(B), 1, t}),
        q_ids({ids ? rows(B) : 1, 1, ids ? t : 0}), kv_ids({ids ? rows(B) : 1, 1, ids ? S : 0}),
        bias({1, diagonals ? N : 1, diagonals}, 1),
        seeds({drops ? B : 1, drops ? N : 1, drops ? 1 : 0}) {
    const Index kind = below(6), width = between(0, 12);
    for (Index r = 0; r < from.count(); ++r) {
      const Index i = r % t;
      from[r] = kind == 0 ? 0 : kind == 1 ? std::clamp<Index>(i - width, 0, S) : below(S + 1);
      if (kind == 2) from[r] = 0;
    }
    for (Index r = 0; r < until.count(); ++r) {
      const Index i = r % t;
      until[r] = kind == 0 ? S : kind == 1 ? std::min(i + 1, S) : below(S + 1);
      if (kind == 3) until[r] = S;
      if (kind == 5 && i % kQueries < kQueries / 2) until[r] = 0;  // sees no key
    }
    const Index together = between(1, 20);
    for (Index r = 0; r < q_ids.count(); ++r) q_ids[r] = r % t / together;
    for (Index r = 0; r < kv_ids.count(); ++r) kv_ids[r] = once_in(9) ? -1 : r % S / together;
    for (Index r = 0; r < seeds.count(); ++r) seeds[r] = generator();
    if (drops) threshold = 1u << 30, dropout_scale = 1 / 0.75;
    if (once_in(2)) poison();
  }

  Arrays arrays(const Buffer& query, const Buffer& key, const Buffer& value) const {
    return {query,          key,             value,         from.buffer(), until.buffer(),
            q_ids.buffer(), kv_ids.buffer(), bias.buffer(), seeds.buffer()};
  }
  Attributes attributes(double least = -1) const {
    return {scale, cap, dropout_scale, threshold, 0, 0, 0, 0, least};
  }

  bool sees(Index b, Index i, Index j) const {
    auto at = [&](const Array<int32_t>& x, Index size, Index place) {
      return x[x.count() == size ? place : b * size + place];
    };
    if (j < at(from, t, i) || j >= at(until, t, i)) return false;
    return !q_ids.count() || at(q_ids, t, i) == at(kv_ids, S, j);
  }

  // The score of a pair, and its derivative by the product.
  double score(Index b, Index n, Index i, Index j, Index diagonals, double& slope) const {
    const Index row = (b * t + i) * N + n, key = (b * S + j) * K + n / group;
    double score = 0;
    for (Index h = 0; h < H; ++h) score += double{q[row * H + h]} * k[key * H + h];
    score *= scale, slope = 1;
    if (cap != 0) {
      const double bent = std::tanh(score / cap);
      score = cap * bent, slope = 1 - bent * bent;
    }
    return diagonals ? score + bias[n * diagonals + i - j + S - 1] : score;
  }

  // Keys and values that no query attends to are NaN.
  void poison() {
    for (Index b = 0; b < B; ++b)
      for (Index j = 0; j < S; ++j) {
        bool seen = false;
        for (Index i = 0; i < t; ++i) seen |= sees(b, i, j);
        if (seen) continue;
        for (Index h = 0; h < K * H; ++h) k[(b * S + j) * K * H + h] = NAN;
        for (Index h = 0; h < K * V; ++h) v[(b * S + j) * K * V + h] = NAN;
      }
  }

  static uint32_t hash(uint32_t x) {
    x ^= x >> 16, x *= 0x7FEB352Du, x ^= x >> 15, x *= 0x846CA68Bu;
    return x ^ x >> 16;
  }
  // The factor of a weight in dropout.
  double kept(Index b, Index n, Index i, Index j) const {
    if (!threshold) return 1;
    const uint32_t row = hash(seeds[b * N + n] ^ hash(i & ~8)), column = hash(j + 0x85EBCA6Bu);
    uint32_t x = row + column;
    x ^= x >> 16, x *= 0x7FEB352Du, x ^= x >> 15, x *= 0x846CA68Bu;
    if (i & 8) x *= 2891336453u;
    return x >= threshold ? dropout_scale : 0;
  }
};

struct Answer {
  std::vector<double> out, lse, delta, d_q, d_k, d_v, d_bias;
};

// The formula, and its derivative.
Answer formula(const RandomProblem& p, const Array<T>& d_out, const std::vector<double>& d_lse,
               Index diagonals) {
  const Index B = p.B, t = p.t, S = p.S, K = p.K, N = p.N, H = p.H, V = p.V;
  const std::vector<double> nothing(B * t * N);
  Answer a{std::vector<double>(B * t * N * V), nothing, nothing, std::vector<double>(p.q.count()),
           std::vector<double>(p.k.count()), std::vector<double>(p.v.count()),
           std::vector<double>(B * N * diagonals)};
  std::vector<double> weights(S), slopes(S), d_weights(S);
  for (Index b = 0; b < B; ++b)
    for (Index n = 0; n < N; ++n)
      for (Index i = 0; i < t; ++i) {
        const Index row = (b * t + i) * N + n, g = n / p.group;
        double most = -INFINITY, sum = 0;
        for (Index j = 0; j < S; ++j) {
          weights[j] = -INFINITY;
          if (!p.sees(b, i, j)) continue;
          weights[j] = p.score(b, n, i, j, diagonals, slopes[j]), most = std::max(most, weights[j]);
        }
        for (Index j = 0; j < S; ++j) sum += p.sees(b, i, j) ? std::exp(weights[j] - most) : 0;
        a.lse[row] = most + std::log(sum);
        for (Index j = 0; j < S; ++j) {
          if (!p.sees(b, i, j)) continue;
          weights[j] = std::exp(weights[j] - most) / sum, d_weights[j] = 0;
          const Index at = ((b * S + j) * K + g) * V;
          const double kept = p.kept(b, n, i, j);
          for (Index h = 0; h < V; ++h) {
            const double d = d_out[row * V + h];
            a.out[row * V + h] += weights[j] * kept * p.v[at + h];
            d_weights[j] += d * kept * p.v[at + h];
            a.d_v[at + h] += weights[j] * kept * d;
          }
        }
        for (Index h = 0; h < V; ++h) a.delta[row] += a.out[row * V + h] * d_out[row * V + h];
        a.delta[row] -= d_lse[row];
        for (Index j = 0; j < S; ++j) {
          if (!p.sees(b, i, j)) continue;
          const double d_score = weights[j] * (d_weights[j] - a.delta[row]);
          if (diagonals) a.d_bias[(b * N + n) * diagonals + i - j + S - 1] += d_score;
          const double d_product = d_score * slopes[j] * p.scale;
          for (Index h = 0; h < H; ++h) {
            const Index at = ((b * S + j) * K + g) * H + h;
            a.d_q[row * H + h] += d_product * p.k[at];
            a.d_k[at] += d_product * p.q[row * H + h];
          }
        }
      }
  return a;
}

// Statistics are those of weights before dropout, whose sums are e^lse.
bool one_statistics(ffi::ThreadPool& pool, bool limited, const RandomProblem& p,
                    const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const Answer& answer,
                    Index diagonals) {
  const Sizes rows = {p.B, p.t, p.N}, nobody = {0, p.t, p.N};
  const bool asks = once_in(2), placed = once_in(2);
  Array<T> marks({1, 1, asks ? p.S : 0});
  for (Index j = 0; j < marks.count(); ++j) marks[j] = once_in(3);
  Array<int32_t> q_at({1, 1, placed ? p.t : 0}), kv_at({1, 1, placed ? p.S : 0});
  for (Index i = 0; i < q_at.count(); ++i) q_at[i] = 5 * i - 7;
  for (Index j = 0; j < kv_at.count(); ++j) kv_at[j] = 9 - 2 * j;
  const double least = once_in(2) ? 1e-3 : -1;
  Array<T> v({p.B, p.S, p.K, 0}), maximum(rows), log_total(rows);
  Array<T> entropy(rows), greatest(rows), distance(rows);
  Array<T> on_keys(asks ? rows : nobody), above(least < 0 ? nobody : rows);
  Array<T> received({p.B, p.N, p.S});
  Array<int32_t> place(rows);
  for (Index i = 0; i < maximum.count(); ++i) maximum[i] = answer.lse[i], log_total[i] = 0;
  const auto statistics = [&] {
    return run_statistics(pool, p.arrays(q, k, v.buffer()), maximum.buffer(), log_total.buffer(),
                          q_at.buffer(), kv_at.buffer(), marks.buffer(), {}, entropy.result(),
                          greatest.result(), place.result(), distance.result(), on_keys.result(),
                          above.result(), received.result(), p.attributes(least));
  };
  if (!runs(limited, [&] { return reported(statistics); })) return false;
  const std::vector<double> nothing(p.B * p.t * p.N);
  auto sums = nothing, most = nothing, far = nothing, on = nothing, over = nothing;
  std::vector<double> columns(p.B * p.N * p.S);
  for (Index b = 0; b < p.B; ++b)
    for (Index n = 0; n < p.N; ++n)
      for (Index i = 0; i < p.t; ++i)
        for (Index j = 0; j < p.S; ++j) {
          if (!p.sees(b, i, j)) continue;
          const Index row = (b * p.t + i) * p.N + n;
          double slope;
          const double score = p.score(b, n, i, j, diagonals, slope);
          const double log = score - answer.lse[row], w = std::exp(log);
          sums[row] -= w * log, most[row] = std::max(most[row], w);
          far[row] += w * std::abs(placed ? q_at[i] - kv_at[j] : i - j);
          if (asks) on[row] += w * marks[j];
          if (w > least) over[row] += w;
          columns[(b * p.N + n) * p.S + j] += w;
        }
  expect("entropy", entropy, sums);
  expect("greatest", greatest, most);
  expect("distance", distance, far);
  if (asks) expect("on_keys", on_keys, on);
  if (least >= 0 && sizeof(T) == 8) expect("above", above, over);
  expect("received", received, columns);
  for (Index i = 0; i < place.count(); ++i)
    if ((place[i] < 0) != std::isinf(answer.lse[i]) || place[i] >= p.S) {
      std::fprintf(stderr, "place [%td]: %d\n", i, place[i]);
      std::exit(1);
    }
  return true;
}

bool one_call(ffi::ThreadPool& pool, bool limited) {
  const bool large = once_in(40);  // results that bypass the caches
  const Index t = large ? 1100 : between(1, 3 * kQueries);
  const Index S = large ? 20 : between(1, 3 * kRun), N = large ? 6 : between(1, 4);
  const Index H = between(1, 40), V = large ? 64 : between(1, 40);
  const Index diagonals = once_in(3) ? (t + S) / 64 * 64 + 128 : 0;
  RandomProblem p(large ? 1 : between(1, 3), t, S, N, large ? 1 : between(1, 3), H, V, diagonals,
            once_in(2), once_in(3));
  // Sums of values overflow, their means do not.
  const bool huge = once_in(8);
  const T unit = huge ? std::numeric_limits<T>::max() / 8 : 1;
  for (Index i = 0; i < p.v.count(); ++i) p.v[i] *= unit;

  const Sizes rows = {p.B, p.t, p.N};
  Array<T> d_out({p.B, p.t, p.N, p.V}, 1);
  // Queries, keys and values may have 16 bits; so does then the cotangent, in an array of 32 bits.
  const Index some = sizeof(T) == 4 && once_in(2) ? p.B : 0;
  Array<uint16_t> half_q({some, t, p.N, H}), half_k({some, S, p.K, H}), half_v({some, S, p.K, V});
  Array<uint16_t> half_d_out({some, t, p.N, V});
  halve(p.q, half_q), halve(p.k, half_k), halve(p.v, half_v), halve(d_out, half_d_out);
  auto given = [some](const Array<T>& x, const Array<uint16_t>& half) {
    return some ? half.buffer() : x.buffer();
  };
  const Arrays arrays = p.arrays(given(p.q, half_q), given(p.k, half_k), given(p.v, half_v));
  std::vector<double> d_lse(p.B * p.t * p.N);
  for (double& d : d_lse) d = normal();
  Answer want = formula(p, d_out, d_lse, diagonals);

  Array<T> out({p.B, p.t, p.N, p.V}), lse(rows), most(rows), log_sum(rows);
  const auto forward = [&] {
    return run_forward(pool, arrays, {}, out.result(), most.result(), log_sum.result(),
                       p.attributes());
  };
  if (!runs(limited, [&] { return reported(forward); })) return false;
  for (Index i = 0; i < lse.count(); ++i) lse[i] = most[i] + log_sum[i];
  for (Index i = 0; i < out.count(); ++i) out[i] /= unit, want.out[i] /= unit;
  expect("out", out, want.out);
  expect("lse", lse, want.lse);
  if (huge) return true;
  if (once_in(2))
    return one_statistics(pool, limited, p, given(p.q, half_q), given(p.k, half_k), want, diagonals);

  Array<T> delta(rows), d_q({p.B, p.t, p.N, p.H}), d_k({p.B, p.S, p.K, p.H});
  Array<T> d_v({p.B, p.S, p.K, p.V}), d_bias({p.B, p.N, diagonals});
  for (Index i = 0; i < delta.count(); ++i) delta[i] = want.delta[i];
  const auto backward = [&] {
    return run_backward(pool, arrays, d_out.buffer(), most.buffer(), log_sum.buffer(),
                        delta.buffer(), {}, d_q.result(), d_k.result(), d_v.result(),
                        d_bias.result(), {}, p.attributes());
  };
  if (!runs(limited, [&] { return reported(backward); })) return false;
  expect("d_q", d_q, want.d_q);
  expect("d_k", d_k, want.d_k);
  expect("d_v", d_v, want.d_v);
  // Entries beyond the last diagonal are arbitrary.
  for (Index head = 0; head < p.B * p.N; ++head)
    for (Index x = p.t + p.S - 1; x < diagonals; ++x) d_bias[head * diagonals + x] = 0;
  expect("d_bias", d_bias, want.d_bias);
  return true;
}

}  // namespace

int main(int argc, char** argv) { return rounds(argc, argv, one_call); }
