// Statistics of weights: sums over each query's row of weights and over each key's column, given each
// row's normalizer.

#pragma once

#include "block.h"

namespace {

// A question about the weights of one head. `q_positions` and `kv_positions` are null if they are
// places.
struct Asked {
  Rows<const T> maximum, log_total;
  const int32_t *q_positions, *kv_positions;  // [T], [S] or null
  const T* marks;                             // [S] or null: the factors of weights on keys
  T threshold;                                // weights above it are summed; none if negative

  bool more() const { return marks || threshold >= 0; }
};

// The destinations of the statistics of one head; `on_keys` and `above` may be missing.
struct Found {
  Rows<T> entropy, greatest, distance, on_keys, above;
  Rows<int32_t> place;
};

// A block of queries that visits keys, with its sums.
template <typename Products>
struct StatisticsBlock {
  static constexpr Index L = kLanes;
  using Lanes = T[kQueries];

  Block block;
  typename Products::Forward sums;
  T factor;  // the factor of products
  alignas(64) Int positions[kQueries], place[kQueries];
  // A row without keys has maximum 0 in place of -infinity; `real` is 0 in lanes without a query.
  alignas(64) Lanes maximum, log_total, real, most, entropy, distance, on_keys, above;

  StatisticsBlock(const Head& head, const Asked& asked, Index first, Index count, Index H,
                  Bench& bench)
      : block(head.rules, first, count, kQueries),
        sums(head.q.from(first), count, block.width, H, 0, head.scale, bench),
        factor(Products::kScales ? T{1} : head.scale) {
    for (Index i = 0; i < block.width; ++i) {
      const bool there = i < count;
      const T top = there ? *asked.maximum[first + i] : T{0};
      maximum[i] = top == -kInfinity ? T{0} : top;
      log_total[i] = there ? *asked.log_total[first + i] : T{0};
      real[i] = there;
      positions[i] = there && asked.q_positions ? asked.q_positions[first + i] : first + i;
      place[i] = -1, most[i] = -kInfinity;
      entropy[i] = distance[i] = on_keys[i] = above[i] = 0;
    }
  }

  // Adds these keys, which begin at row `at` of the tile. `columns` is memory for kKeys vectors.
  void visit(const Head& head, const Asked& asked, const Keys& seen, Index at,
             const typename Products::Tile& tile, T* scores, T* columns, T* received) {
    sums.scores(tile, at, seen.count, block.whole.lanes, scores);
    const Rules& rules = head.rules;
    T left = factor;  // for what stands in `scores`
    if (rules.own.changes(seen.kind)) {
      if (!Products::kScales) scale(scores, seen.count * block.width, factor);
      apply(rules.own, block, block.whole.lanes, seen, nullptr, scores);
      left = 1;
    } else if (seen.kind == Kind::kMixed) {
      block.template modify<true>(rules, {block.whole.lanes, seen}, factor, scores), left = 1;
    } else if (rules.cap != 0 || rules.bias) {
      block.template modify<false>(rules, {block.whole.lanes, seen}, factor, scores), left = 1;
    }
    if (asked.more())
      add<true>(asked, seen, left, scores, columns);
    else
      add<false>(asked, seen, left, scores, columns);
    add_columns(columns, seen.count, received + seen.j);
  }

  // Sums over keys are lanes; sums over queries are written to `columns`, a vector for each key.
  template <bool kMore>
  JATTN_APART void add(const Asked& asked, const Keys& seen, T left, const T* scores, T* columns) {
    Index i = 0;
    for (; i + 2 * L <= block.width; i += 2 * L)
      add_lanes<kMore, 2>(asked, seen, i, left, scores, columns);
    for (; i < block.width; i += L) add_lanes<kMore, 1>(asked, seen, i, left, scores, columns);
  }

  template <bool kMore, int N>
  void add_lanes(const Asked& asked, const Keys& seen, Index first, T left, const T* scores,
                 T* columns) {
    Vector entropies[N], distances[N], greatest[N], marked[N], higher[N];
    Ints places[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const Index i = first + n * L;
      entropies[n] = load(entropy + i), distances[n] = load(distance + i);
      greatest[n] = load(most + i), places[n] = load<Ints>(place + i);
      if (kMore) marked[n] = load(on_keys + i), higher[n] = load(above + i);
    }
    for (Index s = 0; s < seen.count; ++s) {
      const Int j = seen.j + s;
      const Int at = asked.kv_positions ? asked.kv_positions[j] : j;
      Vector column = first ? load(columns + s * L) : Vector{};
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        const Index i = first + n * L;
        const Vector score = load(scores + s * block.width + i) * left;
        const Vector log = (score - load(maximum + i)) - load(log_total + i);
        const Vector weight = exponential(log);
        entropies[n] -= weight * (log == all(-kInfinity) ? Vector{} : log);
        distances[n] += weight * apart(load<Ints>(positions + i), at);
        const Ints better = log > greatest[n];
        greatest[n] = better ? log : greatest[n];
        places[n] = better ? Int{j} - Ints{} : places[n];
        column += load(real + i) != 0 ? weight : Vector{};
        if constexpr (kMore) {
          if (asked.marks) marked[n] += weight * asked.marks[j];
          higher[n] += weight > asked.threshold ? weight : Vector{};
        }
      }
      store(columns + s * L, column);
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      const Index i = first + n * L;
      store(entropy + i, entropies[n]), store(distance + i, distances[n]);
      store(most + i, greatest[n]), std::memcpy(place + i, &places[n], sizeof(Ints));
      if (kMore) store(on_keys + i, marked[n]), store(above + i, higher[n]);
    }
  }

  // |q - kv|, as an unsigned number: it has one bit more than positions.
  static Vector apart(Ints q, Int kv) {
    const Ints other = kv - Ints{}, size = (q > other ? q : other) - (q > other ? other : q);
#if JATTN_SINGLE
    return __builtin_convertvector((Words)size, Vector);
#else
    return __builtin_convertvector(size, Vector);
#endif
  }

  // Adds the sum of each vector to `received`; `columns` has memory for whole squares.
  JATTN_APART static void add_columns(T* columns, Index keys, T* received) {
    for (Index s = 0; s < keys; s += L) {
      Vector square[L];
      for (Index l = 0; l < L; ++l) square[l] = s + l < keys ? load(columns + (s + l) * L) : Vector{};
      turn_square(square);
      Vector sum = square[0];
      for (int l = 1; l < L; ++l) sum += square[l];
      for (Index l = 0; l < L && s + l < keys; ++l) received[s + l] += sum[l];
    }
  }

  void finish(const Asked& asked, const Found& to) {
    for (Index i = 0; i < block.width; i += L) store(most + i, exponential(load(most + i)));
    for (Index i = 0; i < block.count; ++i) {
      const Index row = block.first + i;
      *to.entropy[row] = entropy[i], *to.distance[row] = distance[i];
      // A row that is NaN has no greatest weight.
      const T lse = maximum[i] + log_total[i];
      *to.greatest[row] = most[i] + (lse - lse), *to.place[row] = place[i];
      if (asked.marks) *to.on_keys[row] = on_keys[i];
      if (asked.threshold >= 0) *to.above[row] = above[i];
    }
  }
};

// Computes the statistics of queries first .. first + count - 1, at most kTogether blocks, and adds
// the weights that keys receive from them to `received`.
template <typename Products>
void statistics(const Head& head, const Asked& asked, Index first, Index count, const Found& to,
                T* received) {
  using OneBlock = StatisticsBlock<Products>;
  const Index H = up(head.q.size, kLanes);
  const typename Products::Session session;
  Bench bench(Products::Forward::size(up(count, kQueries), H, 0) +
              Products::Tile::size(H, 0, kKeys) + Products::room(kKeys) * kQueries +
              kKeys * kLanes);
  typename Products::Tile tile(H, 0, kKeys, false, bench);
  T *scores = bench.take(Products::room(kKeys) * kQueries), *columns = bench.take(kKeys * kLanes);
  thread_local std::vector<OneBlock> blocks;
  blocks.clear();
  blocks.reserve(kTogether);
  for (Index i = 0; i < count; i += kQueries)
    blocks.emplace_back(head, asked, first + i, std::min(kQueries, count - i), H, bench);
  visit_tiles(head, blocks, tile, [&](OneBlock& one, const Keys& seen, Index start) {
    one.visit(head, asked, seen, seen.j - start, tile, scores, columns, received);
  });
  for (OneBlock& one : blocks) one.finish(asked, to);
}

}  // namespace
