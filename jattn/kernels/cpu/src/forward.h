// One head's output and normalizer, for some blocks of its queries; see attention.cc.

#pragma once

#include "block.h"
#include "wide.h"

namespace {

// A maximum is not updated if it increases by less than this: weights may be up to e^8, and sums need
// not be rescaled (as in FlashAttention-4).
constexpr T kSlack = 8;

// The destinations of results. Weights are e^(score - most - log_sum): two numbers, as their sum would
// have no digits left for the second if scores are large. They are written if `sums`.
struct Results {
  Output out;
  Rows<T> most, log_sum;
  bool sums;
  Put how;
};

// A block of queries that visits keys, with the state of the online softmax.
template <typename Products>
struct ForwardBlock {
  static constexpr Index L = kLanes;

  Block block;
  typename Products::Forward sums;
  T factor;                      // the factor of products
  bool fresh = true;             // no values are summed yet
  alignas(64) T most[kQueries];  // the largest score, within kSlack: weights are e^(score - most)
  alignas(64) T sum[kQueries], shrink[kQueries];

  ForwardBlock(const Head& head, Index first, Index count, Index H, Index V, Bench& bench)
      : block(head.rules, first, count, Products::kFewestLanes),
        sums(head.q.from(first), count, block.width, H, V, head.scale, bench),
        factor(Products::kScales ? T{1} : head.scale) {
    std::fill(most, most + block.width, -kInfinity);
    std::fill(sum, sum + block.width, T{0});
  }

  // Adds these keys of a tile that starts at key `start`; `exact` if sums of values are to be as exact
  // as T.
  void visit(const Head& head, const Keys& seen, Index start, const typename Products::Tile& tile,
             bool exact, T* scores) {
    Piece pieces[3];
    const int count = block.cut(head.rules, seen, pieces);
    for (int n = 0; n < count; ++n) visit(head, pieces[n], start, tile, exact, scores);
  }

  void visit(const Head& head, const Piece& piece, Index start, const typename Products::Tile& tile,
             bool exact, T* scores) {
    const auto [lanes, seen] = piece;
    const auto [kind, j, keys] = seen;
    const Index at = j - start;
    if (fresh && lanes.size < block.width) sums.clear(), fresh = false;
    sums.scores(tile, at, keys, lanes, scores);
    const T* nonfinite = tile.nonfinite ? tile.nonfinite + at : nullptr;
    const Rules& rules = head.rules;
    if (rules.normalizer.pointwise()) {
      const T left = to_scores(rules, block, piece, factor, scores);
      by_kind(rules.normalizer.kind, [&](auto normalizer) {
        weigh<normalizer>(rules, piece, nonfinite, left, exact, scores);
      });
      sums.add(tile, at, keys, lanes, scores, fresh, exact);
      fresh = false;
      return;
    }
    const bool by_rule = rules.own.changes(kind);
    const bool modified = rules.cap != 0 || rules.bias || nonfinite || factor <= 0;
    if (by_rule) {
      if (!Products::kScales) scale(scores, keys * lanes.size, factor);
      apply(rules.own, block, lanes, seen, nonfinite, scores);
    }
    const bool grows =
        by_rule ? online_softmax_step<Steps::kScale>(rules, lanes, j, keys, nullptr, T{1}, exact, scores)
        : kind == Kind::kMixed
            ? online_softmax_step<Steps::kMask>(rules, lanes, j, keys, nonfinite, factor, exact, scores)
        : modified
            ? online_softmax_step<Steps::kModify>(rules, lanes, j, keys, nonfinite, factor, exact, scores)
            : online_softmax_step<Steps::kScale>(rules, lanes, j, keys, nonfinite, factor, exact, scores);
    if (grows && !fresh) sums.rescale(lanes, shrink);
    sums.add(tile, at, keys, lanes, scores, fresh, exact);
    fresh = false;
  }

  // Turns scores, after multiplication by `factor`, into the weights of a pointwise normalizer.
  template <Normalizer kKind>
  JATTN_APART void weigh(const Rules& rules, const Piece& piece, const T* nonfinite, T factor,
                         bool exact, T* scores) {
    const Lanes& lanes = piece.lanes;
    const Keys& seen = piece.keys;
    const Index t = lanes.size, keys = seen.count;
    const T constant = static_cast<T>(rules.normalizer.constant);
    const auto weight = [&](auto adjusts, Index n, Index s, Index i) {
      Vector x = load(scores + n);
      if (!Products::kScales) x *= factor;
      Vector w = weighted<kKind>(x, constant).weight;
      if (adjusts && rules.threshold) w = block.dropped(rules, w, lanes.first + i, seen.j + s);
      if (adjusts && nonfinite) w += x == -kInfinity ? Vector{} : all(nonfinite[s]);
      return w;
    };
    const auto write = [&](auto adjusts) {
      for (Index s = 0; s < Products::rows(keys); s += Products::kKeys)
        for (Index i = 0; i < t; i += L) {
          Vector weights[Products::kKeys] = {};
#pragma GCC unroll 2
          for (int k = 0; k < Products::kKeys; ++k)
            if (Products::kKeys == 1 || s + k < keys)
              weights[k] = weight(adjusts, (s + k) * t + i, s + k, i);
          Products::put_weights(weights, scores + i, s, keys, t, exact);
        }
    };
    if (rules.threshold || nonfinite) return write(std::true_type{});
    if (Products::kKeys > 1) return write(std::false_type{});
    // Pairs that need neither their key nor their query take one loop, which is faster than two.
#pragma GCC unroll 4
    for (Index n = 0; n < keys * t; n += L) store(scores + n, weight(std::false_type{}, n, 0, 0));
  }

  // Turns products into weights; if scaling is the only step, the factor is above 0. Returns whether
  // the running maximum of any query increased.
  template <Steps kSteps>
  JATTN_APART bool online_softmax_step(const Rules& rules, Lanes lanes, Index j, Index keys,
                                       const T* nonfinite, T factor, bool exact, T* scores) {
    const Index t = lanes.size, end = lanes.end();
    bool grows = false;
    Index i = lanes.first;
    for (; i + kWide * L <= end; i += kWide * L, scores += kWide * L)
      grows |= step_lanes<kSteps, kWide>(rules, i, t, j, keys, nonfinite, factor, exact, scores);
    for (; i + 2 * L <= end; i += 2 * L, scores += 2 * L)
      grows |= step_lanes<kSteps, 2>(rules, i, t, j, keys, nonfinite, factor, exact, scores);
    for (; i < end; i += L, scores += L)
      grows |= step_lanes<kSteps, 1>(rules, i, t, j, keys, nonfinite, factor, exact, scores);
    return grows;
  }

  // The step of N vectors of lanes side by side, which hides the latency of sums. Their scores are
  // rows `t` apart.
  template <Steps kSteps, int N>
  bool step_lanes(const Rules& rules, Index first, Index t, Index j, Index keys, const T* nonfinite,
                  T factor, bool exact, T* scores) {
    constexpr bool kModified = kSteps != Steps::kScale;
    const T left = kModified ? T{1} : factor;  // for what stands in `scores`
    Vector now[N], shift[N], total[N];
    for (int n = 0; n < N; ++n) now[n] = all(-kInfinity);
    for (Index s = 0; s < keys; ++s) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        T* here = scores + s * t + n * L;
        Vector x = load(here);
        if constexpr (kModified) {
          x *= factor;
          if (nonfinite) x += nonfinite[s];
          x = block.template modified<kSteps == Steps::kMask>(rules, x, first + n * L, j + s);
          store(here, x);
        }
        now[n] = x > now[n] ? x : now[n];
      }
    }
    bool grows = false;
    for (int n = 0; n < N; ++n) {
      const Index i = first + n * L;
      const Vector before = load(most + i);
      now[n] *= left;
      now[n] = now[n] > before + kSlack ? now[n] : before;
      shift[n] = now[n] == -kInfinity ? Vector{} : now[n];
      const Vector shrunk = exponential(before - shift[n]);
      total[n] = load(sum + i) * shrunk;
      store(most + i, now[n]);
      store(shrink + i, shrunk);
      grows |= !is_zero((Ints)(now[n] != before));
    }
    const auto write = [&](auto is_exact, Index s, auto count) {  // of `count` keys from s on
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        T* here = scores + n * L;
        Vector weights[Products::kKeys] = {};
        for (int k = 0; k < count; ++k) {
          weights[k] = exponential<is_exact>(load(here + (s + k) * t) * left - shift[n]);
          total[n] += weights[k];
          if (rules.threshold)
            weights[k] = block.dropped(rules, weights[k], first + n * L, j + s + k);
        }
        Products::put_weights(weights, here, s, keys, t, exact);
      }
    };
    constexpr int kStep = Products::kKeys;
    const auto write_all = [&](auto is_exact) {
      Index s = 0;
      for (; s + kStep <= keys; s += kStep)
        write(is_exact, s, std::integral_constant<int, kStep>{});
      for (; s < Products::rows(keys); s += kStep)
        write(is_exact, s, static_cast<int>(std::max<Index>(0, keys - s)));
    };
    if (Products::kRounds && !exact) write_all(std::bool_constant<!Products::kRounds>{});
    else write_all(std::true_type{});
    for (int n = 0; n < N; ++n) store(sum + first + n * L, total[n]);
    return grows;
  }

  // Whether a sum of values has overflowed in a row that is not NaN because of its scores.
  bool overflowed(Index V) const {
    if (fresh || all_finite(sums.out, block.count * V)) return false;
    for (Index i = 0; i < block.count; ++i)
      if (std::isfinite(sum[i]) && !all_finite(sums.out + i * V, V)) return true;
    return false;
  }

  void finish(const Rules& rules, const Results& to, Index V, T down) {
    if (fresh) std::fill(sums.out, sums.out + block.width * V, T{0});
    for (Index i = 0; i < block.width; i += L) {
      if (rules.normalizer.pointwise()) {
        store(shrink + i, all(1)), store(most + i, Vector{});
        continue;
      }
      const Vector total = load(sum + i);
      const Ints dead = total == T{0};
      store(shrink + i, dead ? Vector{} : 1 / (total * down));
      if (to.sums) store(sum + i, dead ? Vector{} : logarithm(total));
    }
    for (Index i = 0; i < block.count; ++i)
      to.out.put(block.first + i, sums.out + i * V, shrink[i], to.how);
    if (!to.sums) return;
    for (Index i = 0; i < block.count; ++i) {
      *to.most[block.first + i] = most[i];
      *to.log_sum[block.first + i] = sum[i];
    }
  }
};

// Computes the results of queries first .. first + count - 1, at most kTogether blocks. Values are
// multiplied by `down`, a power of two; if their sums overflow, all is repeated with a smaller one.
template <typename Products>
void forward(const Head& head, Index first, Index count, const Results& results, T down = 1) {
  using OneBlock = ForwardBlock<Products>;
  const Index H = up(head.q.size, kLanes), V = up(head.v.size, kLanes);
  const typename Products::Session session;
  Bench bench(Products::Forward::size(up(count, kQueries), H, V) +
              Products::Tile::size(H, V, kKeys) + Products::room(kKeys) * kQueries);
  typename Products::Tile tile(H, V, kKeys, false, bench);
  tile.down = down;
  T* scores = bench.take(Products::room(kKeys) * kQueries);
  thread_local std::vector<OneBlock> blocks;
  blocks.clear();
  blocks.reserve(kTogether);
  for (Index i = 0; i < count; i += kQueries)
    blocks.emplace_back(head, first + i, std::min(kQueries, count - i), H, V, bench);
  visit_tiles(head, blocks, tile, [&](OneBlock& one, const Keys& seen, Index start) {
    one.visit(head, seen, start, tile, results.sums, scores);
  });
  for (OneBlock& one : blocks) one.sums.settle();
  const auto overflowed = [V](const OneBlock& one) { return one.overflowed(V); };
  if (down == 1 && !head.rules.normalizer.pointwise() && std::any_of(blocks.begin(), blocks.end(), overflowed)) {
    // Weights are at most e^kSlack.
    down = std::exp2(-std::ceil(std::log2(T(head.rules.S)) + kSlack * T(1.5)));
    return forward<Wide>(head, first, count, results, down);
  }
  for (OneBlock& one : blocks) one.finish(head.rules, results, V, down);
}

}  // namespace
