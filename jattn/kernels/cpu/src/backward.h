// One head's gradients, for a run of its keys and some of its queries; see attention.cc.

#pragma once

#include "block.h"

namespace {

// The arrays along the queries, and the destinations of gradients.
struct Back {
  Rows<const T> d_out, most, log_sum, delta;
  Rows<T> d_q, d_k, d_v;
  Put how;
  Index begin = 0;  // the first key of the sum d_q, for which d_q is overwritten
};

// The arrays whose gradients are computed.
enum class Of { kAll, kQueries, kKeys };

// The gradients of a run of keys: its tiles, and the sums.
template <typename Products>
struct Sums {
  typename Products::Tile tile;
  T *d_k, *d_v;          // [keys, H], [keys, V]
  T *scores, *d_scores, *before;  // [kKeys, width]

  static Index size(Index H, Index V) {
    return Products::Tile::size(H, V, kRun) + kRun * (H + V) + 3 * kKeys * kQueries;
  }

  Sums(Index H, Index V, Bench& bench) : tile(H, V, kRun, true, bench) {
    d_k = bench.take(kRun * H), d_v = bench.take(kRun * V);
    scores = bench.take(kKeys * kQueries), d_scores = bench.take(kKeys * kQueries);
    before = bench.take(kKeys * kQueries);
  }
};

// A block of queries in the backward pass.
template <typename Products>
struct BackwardBlock {
  static constexpr Index L = kLanes;

  Block block;
  Index H, V;
  typename Products::Backward sums;
  T factor;  // the factor of products
  alignas(64) T most[kQueries], log_sum[kQueries], delta[kQueries];

  static Index size(Index H, Index V) { return Products::Backward::size(kQueries, kKeys, H, V); }

  // For keys j .. end - 1.
  BackwardBlock(const Head& head, Index first, Index count, Index j, Index end, Index H, Index V,
                Bench bench)
      : block(head.rules, first, count, Products::kFewestLanes, j, end),
        H(H),
        V(V),
        sums(block.width, kKeys, H, V, bench),
        factor(Products::kScales ? T{1} : head.scale) {}

  void read(const Head& head, const Back& back) {
    const Index t = block.width, first = block.first, count = block.count;
    sums.read(head.q.from(first), back.d_out.from(first), count, head.scale);
    for (Index i = 0; i < t; ++i) {
      most[i] = i < count ? *back.most[first + i] : T{0};
      log_sum[i] = i < count ? *back.log_sum[first + i] : T{0};
      delta[i] = i < count ? *back.delta[first + i] : T{0};
    }
  }

  // Adds the gradients of these keys; `run` starts at key `start`.
  template <Of kOf>
  void visit(const Head& head, const Keys& seen, Index start, const Sums<Products>& run) {
    Piece pieces[3];
    const int count = block.cut(head.rules, seen, pieces);
    for (int n = 0; n < count; ++n) visit<kOf>(head, pieces[n], start, run);
  }

  template <Of kOf>
  void visit(const Head& head, const Piece& piece, Index start, const Sums<Products>& run) {
    const auto [lanes, seen] = piece;
    const auto [kind, j, keys] = seen;
    const Index at = j - start, t = lanes.size;
    const auto& tile = run.tile;
    T *p = run.scores, *ds = run.d_scores;
    sums.products(tile, at, keys, lanes, p, ds);
    const T* nonfinite = tile.nonfinite ? tile.nonfinite + at : nullptr;
    const Rules& rules = head.rules;
    const bool by_rule = rules.own.changes(kind);
    const bool keeps = by_rule && rules.own.rule->keeps;
    if (rules.normalizer.pointwise()) {
      if (keeps)
        for (Index n = 0; n < keys * t; n += L) store(run.before + n, load(p + n) * factor);
      const T left = to_scores(rules, block, piece, factor, p);
      by_kind(rules.normalizer.kind, [&](auto normalizer) {
        derive<normalizer>(rules, piece, nonfinite, left, p, ds);
      });
    } else if (by_rule) {
      if (!Products::kScales) scale(p, keys * t, factor);
      if (keeps) std::copy(p, p + keys * t, run.before);
      apply(rules.own, block, lanes, seen, nonfinite, p);
      derive<Steps::kRule>(rules, lanes, j, keys, nullptr, p, ds);
    } else if (kind == Kind::kMixed)
      derive<Steps::kMask>(rules, lanes, j, keys, nonfinite, p, ds);
    else if (nonfinite || rules.cap != 0 || rules.bias || rules.threshold)
      derive<Steps::kModify>(rules, lanes, j, keys, nonfinite, p, ds);
    else
      derive<Steps::kScale>(rules, lanes, j, keys, nonfinite, p, ds);
    if (by_rule && rules.own.rule->modifies)
      rules.own.rule->backward(block.at(rules.own, lanes, seen), keeps ? run.before : nullptr, ds);
    if constexpr (kOf != Of::kQueries) sums.add_to_keys(keys, lanes, p, ds, run.d_k + at * H, run.d_v + at * V);
    if constexpr (kOf != Of::kKeys) sums.add_to_queries(tile, at, keys, lanes, ds);
  }

  // The same as below for a pointwise normalizer, from scores after multiplication by `left`; the
  // cotangent of scores is dp times the derivative of the weight.
  template <Normalizer kKind>
  JATTN_APART void derive(const Rules& rules, const Piece& piece, const T* nonfinite, T left,
                          T* scores, T* d_weights) {
    const Lanes& lanes = piece.lanes;
    const Keys& seen = piece.keys;
    const Index t = lanes.size;
    const bool drops = rules.threshold != 0;
    const T constant = static_cast<T>(rules.normalizer.constant);
    const auto derive = [&](auto adjusts, auto hides, Index n, Index s, Index i) {
      Vector x = load(scores + n), dp = load(d_weights + n);
      if (!Products::kScales) x *= left;
      const Ints masked = x == -kInfinity;
      if (adjusts && drops) dp = block.dropped(rules, dp, lanes.first + i, seen.j + s);
      auto [p, slope] = weighted<kKind>(x, constant);
      if (adjusts && drops) p = block.dropped(rules, p, lanes.first + i, seen.j + s);
      Vector ds = dp * slope;
      if (adjusts && nonfinite) p += masked ? Vector{} : all(nonfinite[s]), ds += nonfinite[s];
      if constexpr (hides) ds = masked ? Vector{} : ds;
      store(scores + n, p);
      store(d_weights + n, ds);
    };
    constexpr std::true_type yes;
    constexpr std::false_type no;
    // Pairs that need neither their key nor their query take one loop, which is faster than two.
    if (drops || nonfinite) {
      for (Index s = 0; s < seen.count; ++s)
        for (Index i = 0; i < t; i += L) derive(yes, yes, s * t + i, s, i);
    } else if (seen.kind == Kind::kMixed || rules.own.rule) {
      for (Index n = 0; n < seen.count * t; n += L) derive(no, yes, n, 0, 0);
    } else {
#pragma GCC unroll 4
      for (Index n = 0; n < seen.count * t; n += L) derive(no, no, n, 0, 0);
    }
  }

  // Turns products q k into weights p after dropout, and products d_out v into the cotangent of the
  // products q k; that of scores is p (dp - delta), with p before dropout.
  template <Steps kSteps>
  JATTN_APART void derive(const Rules& rules, Lanes lanes, Index j, Index keys, const T* nonfinite,
                          T* products, T* d_weights) {
    constexpr bool kByRule = kSteps == Steps::kRule, kModified = kSteps != Steps::kScale;
    constexpr bool kMasked = kByRule || kSteps == Steps::kMask;
    T along[kModified ? kQueries + kKeys : 1] = {};  // a tile's diagonals: short sums round less
    for (Index s = 0; s < keys; ++s)
      for (Index i = lanes.first; i < lanes.end(); i += L) {
        const Index here = s * lanes.size + i - lanes.first;
        Vector score = load(products + here), dp = load(d_weights + here);
        if constexpr (!kByRule) score *= factor;
        if constexpr (kModified) {
          if constexpr (!kByRule) {
            if (nonfinite) score += nonfinite[s];
            score = block.template modified<kMasked>(rules, score, i, j + s);
          }
          if (rules.threshold) dp = block.dropped(rules, dp, i, j + s);
        }
        Vector p = exponential(score - load(most + i) - load(log_sum + i));
        Vector ds = p * (dp - load(delta + i));
        if constexpr (kModified) {
          if (!kByRule && rules.cap != 0) ds *= 1 - (score / rules.cap) * (score / rules.cap);
          if constexpr (kMasked) {  // also in a row that is NaN
            const Ints allowed =
                kByRule ? score != all(-kInfinity) : block.allowed(rules, i, j + s);
            p = allowed ? p : Vector{};
            ds = allowed ? ds : Vector{};
          }
          if (!kByRule && rules.bias) {
            T* sum = along + i - lanes.first - s + keys - 1;
            store(sum, load(sum) + ds);
          }
          if (rules.threshold) p = block.dropped(rules, p, i, j + s);
        }
        store(products + here, p);
        store(d_weights + here, ds);
      }
    if (!kModified || kByRule || !rules.bias) return;
    T* sums = rules.d_bias + block.first + lanes.first - (j + keys - 1) + rules.S - 1;
    for (Index i = 0; i < lanes.size + keys - 1; ++i) sums[i] += along[i];
  }
};

// Adds the contributions of queries first .. last - 1 and keys from .. until - 1 to the gradients of
// keys and queries; kOf may leave out either.
template <Of kOf, typename Products>
void backward(const Head& head, const Back& back, Index first, Index last, Index from,
              Index until, const Sums<Products>& sums, Index H, Index V, const Bench& bench) {
  for (Index i = first; i < last; i += kQueries) {
    BackwardBlock<Products> one(head, i, std::min(kQueries, last - i), from, until, H, V, bench);
    const Range& whole = one.block.whole;
    const Index end = std::min(until, whole.most_stop);
    bool there = false;
    for (Index j = std::max(from, whole.least_start / kKeys * kKeys); j < end; j += kKeys) {
      const Keys seen = one.block.seen(head.rules, whole, j, std::min(kKeys, until - j));
      if (seen.kind == Kind::kEmpty) continue;
      if (!there) one.read(head, back);
      there = true;
      one.template visit<kOf>(head, seen, from, sums);
    }
    const bool adds = from != back.begin;
    if (kOf == Of::kKeys || (!there && adds)) continue;
    T* d_query = one.sums.d_query;
    if (there) one.sums.settle();
    else std::fill(d_query, d_query + one.block.width * H, T{0});
    const Put how = adds ? Put::kAdd : head.rules.S > kRun ? Put::kOver : back.how;
    put(back.d_q.from(i), d_query, one.block.count, H, head.scale, how);
  }
}

}  // namespace
