// Attention of one head by normalizers that need all scores of a query, see attention.cc.
//
// A block of queries computes the scores of all keys that it sees before it computes weights, so that
// a thread needs memory for them: a number for each key and query of the block. As in a tile, rows are
// keys and lanes are queries. Gradients are those of the implicit function of a threshold.

#pragma once

#include "block.h"
#include "pairs.h"
#include "rule.h"
#include "wide.h"

namespace {

constexpr Index kChunk = 16;  // keys whose greatest score is kept

// Consecutive keys that a block sees, with the row of their scores and the first of their chunks.
struct Segment {
  Keys keys;
  Index row, chunk;
};

// The scores of a block of queries and of all keys that it sees; masked scores are -infinity.
struct ScoreRows {
  static constexpr Index L = kLanes;

  const Rules& rules;
  const Block& block;
  Index t, rows = 0, chunks = 0;
  T* scores;      // [rows, t]
  T* tops;        // [chunks, t]: the greatest scores of chunks, or NaN
  T* candidates;  // memory for a vector of each row
  std::vector<Segment> segments;

  static Index most_chunks(Index keys) { return keys / kChunk + keys / kKeys + 2; }
  static Index size(Index keys, Index t) { return (keys + most_chunks(keys)) * (t + L); }

  ScoreRows(const Rules& rules, const Block& block, Index keys, Bench& bench)
      : rules(rules), block(block), t(block.width), scores(bench.take(keys * t)),
        tops(bench.take(most_chunks(keys) * t)),
        candidates(bench.take((keys + most_chunks(keys)) * L)) {}

  // Adds the keys whose products stand in the next rows of `scores`. `before` gets the products if the
  // rule of the call keeps them.
  void add(const Keys& seen, const T* nonfinite, T factor, T* before) {
    T* here = scores + rows * t;
    if (rules.own.changes(seen.kind)) {
      if (factor != 1) scale(here, seen.count * t, factor);
      if (before) std::copy(here, here + seen.count * t, before + rows * t);
      apply(rules.own, block, block.whole.lanes, seen, nonfinite, here);
      modify<Steps::kRule>(seen, nullptr, factor, here);
    } else if (seen.kind == Kind::kMixed) {
      modify<Steps::kMask>(seen, nonfinite, factor, here);
    } else {
      modify<Steps::kModify>(seen, nonfinite, factor, here);
    }
    segments.push_back({seen, rows, chunks});
    rows += seen.count, chunks += (seen.count + kChunk - 1) / kChunk;
  }

  // Turns products into scores, and keeps the greatest of each chunk.
  template <Steps kSteps>
  JATTN_APART void modify(const Keys& seen, const T* nonfinite, T factor, T* here) {
    T* top = tops + chunks * t;
    for (Index s = 0; s < seen.count; s += kChunk, top += t)
      for (Index i = 0; i < t; i += L) {
        Vector most = all(-kInfinity);
        for (Index n = s; n < std::min(s + kChunk, seen.count); ++n) {
          Vector x = load(here + n * t + i);
          if constexpr (kSteps != Steps::kRule) {
            x *= factor;
            if (nonfinite) x += nonfinite[n];
            x = block.template modified<kSteps == Steps::kMask>(rules, x, i, seen.j + n);
            store(here + n * t + i, x);
          }
          most = greatest(x, most);
        }
        store(top + i, most);
      }
  }

  // The greatest scores of some lanes: NaN if any score is NaN or infinity.
  Vector most(Index i) const {
    Vector most = all(-kInfinity);
    for (Index c = 0; c < chunks; ++c) most = greatest(load(tops + c * t + i), most);
    return most == kInfinity ? all(kNaN) : most;
  }
};

// Converts the bits of numbers to integers in the order of the numbers, or back.
inline Ints turned(Ints bits) {
  return bits ^ ((bits >> (8 * sizeof(Int) - 1)) & std::numeric_limits<Int>::max());
}

// The mean, rounded down, without overflow.
inline Ints middle_of(Ints a, Ints b) { return (a & b) + ((a ^ b) >> 1); }

// The rule by which the threshold of Entmax follows from scores, and weights from both. Its key is
// z = (alpha - 1) (score - greatest), and weights are (z - threshold)^power before they are divided by
// their sum; kPower is the power, 1 / (alpha - 1), or 0 if it is neither 1 nor 2.
template <int kPower>
struct EntmaxRule {
  using Key = Vector;
  T alpha, power;

  explicit EntmaxRule(double alpha) : alpha(static_cast<T>(alpha)), power(T(1 / (alpha - 1))) {}

  static Vector raised(Vector x, T power) { return x > 0 ? exp_of(power * log_of(x)) : Vector{}; }
  static Vector above(Vector z, Vector threshold) { return z > threshold ? z - threshold : Vector{}; }
  // x^power and x^(power - 1), which are 0 for 0.
  Vector powered(Vector x) const {
    if constexpr (kPower == 1) return x;
    else if constexpr (kPower == 2) return x * x;
    else return raised(x, power);
  }
  Vector slope(Vector x) const {
    if constexpr (kPower == 1) return x > 0 ? all(1) : Vector{};
    else if constexpr (kPower == 2) return x;
    else return raised(x, power - 1);
  }

  Key key(Vector score, Vector most) const { return (alpha - 1) * (score - most); }
  Key least() const { return all(-1); }
  Vector threshold(Key key) const { return key; }

  Vector total(const T* keys, Index n, Vector threshold, Vector) const {
    Vector sum = {};
    for (Index s = 0; s < n; ++s) sum += powered(above(load(keys + s * kLanes), threshold));
    return sum;
  }

  // Solves total = 1 for n keys, of which only those above `bound` matter.
  Key solve(const T* keys, Index n, Key bound, Vector) const {
    return alpha <= 2 ? newton(keys, n, bound) : bisection(keys, n);
  }

  // The total is a convex function of the threshold: from below, no step passes the solution.
  Key newton(const T* keys, Index n, Key threshold) const {
    const T least_step = 2 * std::numeric_limits<T>::epsilon();
    for (int step = 0; step < 100; ++step) {
      Vector sum = {}, slopes = {};
      for (Index s = 0; s < n; ++s) {
        const Vector x = above(load(keys + s * kLanes), threshold), slope = this->slope(x);
        slopes += slope, sum += slope * x;
      }
      slopes *= power;
      Vector next = threshold + (sum - 1) / (slopes > 0 ? slopes : all(1));
      next = next > 0 ? Vector{} : (next > threshold ? next : threshold);
      const Ints grows = next > threshold + least_step;
      threshold = next;
      if (is_zero(grows)) break;
    }
    return threshold;
  }

  // It bisects the bits of the threshold, which may be very close to 0.
  Key bisection(const T* keys, Index n) const {
    constexpr T kLargest = std::numeric_limits<T>::max();
    Ints low = turned((Ints)all(-kLargest)), high = turned((Ints)all(kLargest));
    for (size_t step = 0; step <= 8 * sizeof(Int); ++step) {
      const Ints middle = middle_of(low, high);
      const Ints enough = total(keys, n, (Vector)turned(middle), Vector{}) >= 1;
      low = pick(enough, middle, low), high = pick(enough, high, middle);
    }
    return (Vector)turned(low);
  }

  // A power below 1 amplifies the rounding of a threshold: then it is added to the greatest score,
  // and solved for again, relative to the sum.
  bool is_solved_twice() const { return alpha > 2; }
  Vector shifted(Vector most, Key threshold) const { return most + threshold / (alpha - 1); }
  Key least(Vector most) const {
    const Vector size = most > 0 ? most : -most;
    return -1 - 4 * std::numeric_limits<T>::epsilon() * (alpha - 1) * size;
  }

  Ints counts(Vector score, Vector most, Vector threshold) const {
    return ~(key(score, most) <= threshold);
  }
  Vector weight(Vector score, Vector most, Vector threshold) const {
    return powered(above(key(score, most), threshold));
  }
  // weight^(2 - alpha), the weight's share in the derivative.
  Vector share(Vector score, Vector most, Vector threshold, Vector) const {
    return slope(above(key(score, most), threshold));
  }
};

// The rule of TopK, whose threshold is the k-th greatest score. Keys are the bits of scores, as
// integers in the order of the scores.
struct TopKRule {
  using Key = Ints;
  Index k;

  explicit TopKRule(double k) : k(static_cast<Index>(k)) {}

  Key key(Vector score, Vector) const { return turned((Ints)score); }
  Key least() const { return turned((Ints)all(-kInfinity)); }
  Vector threshold(Key key) const { return (Vector)turned(key); }

  Vector total(const T* keys, Index n, Vector threshold, Vector most) const {
    Vector sum = {};
    for (Index s = 0; s < n; ++s)
      sum += weight(this->threshold(load<Ints>(keys + s * kLanes)), most, threshold);
    return sum;
  }

  // Returns a number that at least k of n keys reach, and more than k only if some are equal. At least
  // k keys reach `low`. The range of keys halves with each step.
  Key solve(const T* keys, Index n, Key low, Vector most) const {
    if (n < k) return low;
    Ints high = turned((Ints)(most == most ? most : all(kInfinity))) + 1, done = {};
    for (size_t step = 0; step <= 8 * sizeof(Int); ++step) {
      const Ints middle = middle_of(low, high);
      Ints count = {};
      for (Index s = 0; s < n; ++s) count -= load<Ints>(keys + s * kLanes) >= middle;
      const Ints enough = count >= static_cast<Int>(k);
      done |= (middle == low) | (count == static_cast<Int>(k));
      low = pick(enough, middle, low), high = pick(enough, high, middle);
      if (is_zero(~done)) break;
    }
    return low;
  }

  Ints counts(Vector score, Vector, Vector threshold) const { return ~(score < threshold); }
  Vector weight(Vector score, Vector most, Vector threshold) const {
    return score < threshold ? Vector{} : exponential(score - most);
  }
  Vector share(Vector, Vector, Vector, Vector weight) const { return weight; }

  bool is_solved_twice() const { return false; }
  Vector shifted(Vector most, Key) const { return most; }
  Key least(Vector) const { return least(); }
};

// A normalizer whose weights are above 0 where scores exceed a threshold of the query.
template <typename Rule>
struct ByThreshold {
  static constexpr Index L = kLanes;
  using Key = typename Rule::Key;

  Rule rule;
  // What keys are relative to: the greatest score, 0 without keys, or what `shifted` returns; the
  // threshold; the factor of weights, NaN in a row that is NaN; the mean of the weights' cotangents.
  alignas(64) T most[kQueries], threshold[kQueries], factor[kQueries], mean[kQueries];

  explicit ByThreshold(double number) : rule(number) {}

  // The greatest scores of chunks are some of the scores: the solution for them is a lower bound.
  void solve(const ScoreRows& x) {
    for (Index i = 0; i < x.t; i += L) {
      const Vector top = x.most(i);
      Vector shift = top == -kInfinity ? Vector{} : top;
      Key key = rule.least();
      Index n = gather(x.tops + i, x.chunks, x.t, shift, key, x.candidates);
      key = rule.solve(x.candidates, n, key, top);
      n = gather(x.scores + i, x.rows, x.t, shift, key, x.candidates);
      key = rule.solve(x.candidates, n, key, top);
      if (rule.is_solved_twice()) {
        shift = rule.shifted(shift, key);
        n = gather(x.scores + i, x.rows, x.t, shift, rule.least(shift), x.candidates);
        key = rule.solve(x.candidates, n, key, top);
      }
      const Vector limit = rule.threshold(key), total = rule.total(x.candidates, n, limit, shift);
      store(most + i, shift);
      store(threshold + i, top == top ? limit : all(kNaN));
      store(factor + i, top == -kInfinity ? Vector{} : (top == top ? 1 / total : all(kNaN)));
    }
  }

  // Copies the keys of scores, `stride` apart, that are in any lane as great as the bound.
  JATTN_APART Index gather(const T* scores, Index count, Index stride, Vector most, Key bound,
                           T* to) const {
    Index n = 0;
    for (Index s = 0; s < count; ++s) {
      const Key key = rule.key(load(scores + s * stride), most);
      std::memcpy(to + n * L, &key, sizeof(key));
      n += !is_zero((Ints)(key >= bound));
    }
    return n;
  }

  bool counts(const ScoreRows& x, Index chunk) const {
    Ints any = {};
    for (Index i = 0; i < x.t; i += L)
      any |= rule.counts(load(x.tops + chunk * x.t + i), load(most + i), load(threshold + i));
    return !is_zero(any);
  }

  // Calls `visit(keys, row)` for all keys with a weight above 0, and some others.
  template <typename Visit>
  void each_run(const ScoreRows& x, const Visit& visit) {
    for (const Segment& one : x.segments) {
      const auto [kind, j, count] = one.keys;
      for (Index s = 0, end; s < count; s = end + kChunk) {
        for (end = s; end < count && counts(x, one.chunk + end / kChunk);) end += kChunk;
        const Index stop = std::min(end, count);
        if (stop > s) visit(Keys{kind, j + s, stop - s}, one.row + s);
      }
    }
  }

  // Writes the weights of a run of keys, after dropout.
  JATTN_APART void weights(const ScoreRows& x, const Keys& run, Index row, T* to) {
    for (Index s = 0; s < run.count; ++s)
      for (Index i = 0; i < x.t; i += L) {
        const Vector score = load(x.scores + (row + s) * x.t + i);
        Vector w = rule.weight(score, load(most + i), load(threshold + i)) * load(factor + i);
        if (x.rules.threshold) w = x.block.dropped(x.rules, w, i, run.j + s);
        store(to + s * x.t + i, w);
      }
  }

  // Before `derive`, given the cotangents of all weights.
  void prepare(const ScoreRows& x, const T* d_weights) {
    alignas(64) T sums[kQueries] = {}, totals[kQueries] = {};
    each_run(x, [&](const Keys& run, Index row) {
      for (Index i = 0; i < x.t; i += L) {
        const Vector most = load(this->most + i), threshold = load(this->threshold + i);
        Vector sum = load(sums + i), total = load(totals + i);
        for (Index at = row * x.t + i; at < (row + run.count) * x.t; at += x.t) {
          const Vector score = load(x.scores + at);
          const Vector share =
              rule.share(score, most, threshold, rule.weight(score, most, threshold));
          // The cotangent of a masked weight may be infinite.
          sum += score != -kInfinity ? share * load(d_weights + at) : Vector{};
          total += share;
        }
        store(sums + i, sum), store(totals + i, total);
      }
    });
    for (Index i = 0; i < x.t; i += L) {
      const Vector total = load(totals + i), factor = load(this->factor + i);
      store(mean + i, load(sums + i) / (total == 0 ? all(1) : total) + (factor - factor));
    }
  }

  // Writes the weights of a run of keys, after dropout, and turns the cotangents of weights into those
  // of scores: dw becomes u (dw - mean), with the share u.
  JATTN_APART void derive(const ScoreRows& x, const Keys& run, Index row, T* weights, T* d_scores) {
    for (Index s = 0; s < run.count; ++s)
      for (Index i = 0; i < x.t; i += L) {
        const Index at = (row + s) * x.t + i;
        const Vector score = load(x.scores + at), most = load(this->most + i);
        const Vector threshold = load(this->threshold + i);
        const Ints allowed = score != -kInfinity;  // also in a row that is NaN
        Vector w = rule.weight(score, most, threshold) * load(factor + i);
        const Vector share = rule.share(score, most, threshold, w);
        const Vector ds = share * (load(d_scores + at) - load(mean + i));
        store(d_scores + at, allowed ? ds : Vector{});
        w = allowed ? w : Vector{};
        if (x.rules.threshold) w = x.block.dropped(x.rules, w, i, run.j + s);
        store(weights + s * x.t + i, w);
      }
  }
};

// The weights beta_j times the product of 1 - beta_k over the later keys k, with beta = sigmoid(score):
// from the last key to the first, each takes its part of the rest of a stick. The rest is the sum of
// two numbers, as many small parts are taken from it.
struct StickBreaking {
  static constexpr Index L = kLanes;

  struct Stick {
    Vector high, low;

    // beta and 1 - beta.
    static Vector parts(Vector score, Vector* rest) {
      const Ints most = score >= 0;
      const Vector e = exponential(most ? -score : score), inverse = 1 / (1 + e);
      *rest = most ? e * inverse : inverse;
      return most ? inverse : e * inverse;
    }

    // Takes the part of a key; returns its weight.
    Vector take(Vector score) {
      Vector rest;
      const Vector beta = parts(score, &rest), weight = beta * (high + low);
      const Ints most = score >= 0, allowed = score != -kInfinity;
      const Vector left = most ? high * rest : high - high * beta;
      const Vector lost = most ? Vector{} : (high - left) - high * beta;
      const Vector less = most ? low * rest : low - low * beta + lost;
      high = allowed ? left : high, low = allowed ? less : low;
      return allowed ? weight : Vector{};
    }
  };

  // The rest of the stick; and the sum of weights times cotangents over earlier keys.
  alignas(64) T high[kQueries], low[kQueries], sum[kQueries];
  std::vector<T> rests;  // the rest after each segment, [segments, 2, t]
  Index next = 0;        // the next segment to derive

  explicit StickBreaking(double) {}

  void solve(const ScoreRows& x) {
    for (Index i = 0; i < x.t; i += L) {
      const Vector top = x.most(i);
      store(high + i, top == top ? all(1) : all(kNaN));
      store(low + i, Vector{}), store(sum + i, Vector{});
    }
    rests.clear(), next = 0;
  }

  // Calls `visit(keys, row)` for the keys of all segments: in descending order for `weights`, and in
  // ascending order for `derive`.
  template <typename Visit>
  void each_run(const ScoreRows& x, const Visit& visit) {
    const Index n = static_cast<Index>(x.segments.size());
    for (Index m = 0; m < n; ++m) {
      const Segment& one = x.segments[rests.empty() ? n - 1 - m : m];
      visit(one.keys, one.row);
    }
  }

  JATTN_APART void weights(const ScoreRows& x, const Keys& run, Index row, T* to) {
    for (Index i = 0; i < x.t; i += L) {
      Stick stick{load(high + i), load(low + i)};
      for (Index s = run.count - 1; s >= 0; --s) {
        Vector w = stick.take(load(x.scores + (row + s) * x.t + i));
        if (x.rules.threshold) w = x.block.dropped(x.rules, w, i, run.j + s);
        store(to + s * x.t + i, w);
      }
      store(high + i, stick.high), store(low + i, stick.low);
    }
  }

  void prepare(const ScoreRows& x, const T*) {
    const Index n = static_cast<Index>(x.segments.size());
    rests.resize(2 * n * x.t);
    for (Index m = n - 1; m >= 0; --m) {
      const Segment& one = x.segments[m];
      T* rest = rests.data() + 2 * m * x.t;
      for (Index i = 0; i < x.t; i += L) {
        Stick stick{load(high + i), load(low + i)};
        store(rest + i, stick.high), store(rest + x.t + i, stick.low);
        for (Index s = one.keys.count - 1; s >= 0; --s)
          stick.take(load(x.scores + (one.row + s) * x.t + i));
        store(high + i, stick.high), store(low + i, stick.low);
      }
    }
  }

  // With a = w dw, the cotangent of a score is a (1 - beta) - beta times the sum of a over earlier keys.
  JATTN_APART void derive(const ScoreRows& x, const Keys& run, Index row, T* weights, T* d_scores) {
    const T* rest = rests.data() + 2 * next++ * x.t;
    for (Index i = 0; i < x.t; i += L) {
      Stick stick{load(rest + i), load(rest + x.t + i)};
      for (Index s = run.count - 1; s >= 0; --s) {
        const Index at = (row + s) * x.t + i;
        Vector w = stick.take(load(x.scores + at));
        store(d_scores + at, w * load(d_scores + at));
        if (x.rules.threshold) w = x.block.dropped(x.rules, w, i, run.j + s);
        store(weights + s * x.t + i, w);
      }
      Vector earlier = load(sum + i);
      for (Index s = 0; s < run.count; ++s) {
        const Index at = (row + s) * x.t + i;
        const Vector score = load(x.scores + at), a = load(d_scores + at);
        Vector left;
        const Vector beta = Stick::parts(score, &left);
        store(d_scores + at, score != -kInfinity ? a * left - beta * earlier : Vector{});
        earlier += a;
      }
      store(sum + i, earlier);
    }
  }
};

// Calls `run` with the normalizer of a call.
template <typename Run>
void by_normalizer(const NormalizerRule& rule, const Run& run) {
  const double number = rule.constant;
  if (rule.kind == Normalizer::kStickBreaking) return run(StickBreaking(number));
  if (rule.kind == Normalizer::kTopK) return run(ByThreshold<TopKRule>(number));
  if (number == 2) return run(ByThreshold<EntmaxRule<1>>(number));
  if (number == 1.5) return run(ByThreshold<EntmaxRule<2>>(number));
  run(ByThreshold<EntmaxRule<0>>(number));
}

// Calls `products(keys, row)` for each tile of keys that the block sees, and adds the scores of these
// products to `x`. `tile` begins at key `low` and ends at key `high`.
template <typename Tile, typename Products>
void add_scores(const Head& head, const Tile& tile, Index low, Index high, T factor, T* before,
                ScoreRows& x, const Products& products) {
  for (Index j = low; j < high; j += kKeys) {
    const Keys seen = x.block.seen(head.rules, x.block.whole, j, std::min(kKeys, high - j));
    if (seen.kind == Kind::kEmpty) continue;
    products(seen, x.rows);
    x.add(seen, tile.nonfinite ? tile.nonfinite + seen.j - low : nullptr, factor, before);
  }
}

// Writes weights as products take them.
template <typename Products>
void put_weights(T* weights, Index keys, Index t) {
  constexpr int kStep = Products::kKeys;
  if constexpr (kStep > 1)
    for (Index i = 0; i < t; i += kLanes)
      for (Index s = 0; s < Products::rows(keys); s += kStep) {
        Vector some[kStep] = {};
        for (Index n = 0; n < kStep && s + n < keys; ++n) some[n] = load(weights + (s + n) * t + i);
        Products::put_weights(some, weights + i, s, keys, t, false);
      }
}

// Computes the outputs of queries first .. first + count - 1.
template <typename Products, typename Normalizer>
void forward_by_rows(const Head& head, Normalizer normalizer, Index first, Index count,
                     const Output& out, Put how) {
  const Index H = up(head.q.size, kLanes), V = up(head.v.size, kLanes), S = head.rules.S;
  std::vector<Block> blocks;
  Index low = S, high = 0;
  for (Index i = 0; i < count; i += kQueries) {
    blocks.emplace_back(head.rules, first + i, std::min(kQueries, count - i), kQueries);
    low = std::min(low, blocks.back().whole.least_start);
    high = std::max(high, blocks.back().whole.most_stop);
  }
  low = low / kKeys * kKeys;
  const Index keys = std::max<Index>(0, high - low), t = std::min(up(count, kLanes), kQueries);
  const typename Products::Session session;
  std::unique_ptr<char[]> memory;
  Bench bench(Products::Tile::size(H, V, keys) + Products::room(kKeys) * t +
                  Products::Forward::size(t, H, V) + ScoreRows::size(keys, t),
              memory);
  typename Products::Tile tile(H, V, keys, false, bench);
  if (keys) tile.read(head.k.from(low), head.v.from(low), keys);
  T* weights = bench.take(Products::room(kKeys) * t);
  for (const Block& block : blocks) {
    Bench own = bench;
    const Lanes lanes = block.whole.lanes;
    typename Products::Forward sums(head.q.from(block.first), block.count, block.width, H, V,
                                    head.scale, own);
    ScoreRows x(head.rules, block, keys, own);
    add_scores(head, tile, low, high, Products::kScales ? T{1} : head.scale, nullptr, x,
               [&](const Keys& seen, Index row) {
                 sums.scores(tile, seen.j - low, seen.count, lanes, x.scores + row * x.t);
               });
    normalizer.solve(x);
    bool fresh = true;
    normalizer.each_run(x, [&](const Keys& run, Index row) {
      normalizer.weights(x, run, row, weights);
      put_weights<Products>(weights, run.count, x.t);
      sums.add(tile, run.j - low, run.count, lanes, weights, fresh, false);
      fresh = false;
    });
    if (fresh) sums.clear();
    sums.settle();
    for (Index i = 0; i < block.count; ++i) out.put(block.first + i, sums.out + i * V, T{1}, how);
  }
}

// The keys of a head, and the sums of their gradients.
template <typename Products>
struct RowSums {
  Index H, V, S;
  std::unique_ptr<char[]> memory;
  Bench bench;
  typename Products::Tile tile;
  T *d_k, *d_v, *weights;  // [S, H], [S, V], [kKeys, kQueries]

  static Index size(Index H, Index V, Index S) {
    return Products::Tile::size(H, V, S) + S * (H + V) + kKeys * kQueries +
           Products::Backward::size(kQueries, kKeys, H, V) + ScoreRows::size(S, kQueries) +
           2 * S * kQueries;
  }

  RowSums(Index H, Index V, Index S)
      : H(H), V(V), S(S), bench(size(H, V, S), memory), tile(H, V, S, true, bench),
        d_k(bench.take(S * H)), d_v(bench.take(S * V)), weights(bench.take(kKeys * kQueries)) {
    std::fill(d_k, d_k + S * H, T{0});
    std::fill(d_v, d_v + S * V, T{0});
  }
};

// Turns the cotangent of a run's scores into that of its products; adds to gradients of parameters.
JATTN_APART void pull_scores(const ScoreRows& x, const Keys& run, Index row, const T* before,
                             T* d_scores) {
  const Rules& rules = x.rules;
  const Index t = x.t;
  if (rules.own.rule) {
    if (rules.own.rule->modifies)
      rules.own.rule->backward(x.block.at(rules.own, x.block.whole.lanes, run),
                               before ? before + row * t : nullptr, d_scores + row * t);
    return;
  }
  if (rules.cap == 0 && !rules.bias) return;
  T along[kQueries + kKeys] = {};  // the diagonals of the run: short sums round less
  for (Index s = 0; s < run.count; ++s)
    for (Index i = 0; i < t; i += kLanes) {
      const Index at = (row + s) * t + i;
      Vector ds = load(d_scores + at);
      if (rules.bias) add_to(along + i - s + run.count - 1, ds);
      const Vector part = load(x.scores + at) / rules.cap;
      if (rules.cap != 0) ds = part == -kInfinity ? Vector{} : ds * (1 - part * part);
      store(d_scores + at, ds);
    }
  if (!rules.bias) return;
  T* sums = rules.d_bias + x.block.first - (run.j + run.count - 1) + rules.S - 1;
  for (Index i = 0; i < t + run.count - 1; ++i) sums[i] += along[i];
}

// Adds the contributions of queries first .. first + count - 1, at most kQueries, to the gradients of
// keys and values, and writes those of the queries.
template <typename Products, typename Normalizer>
void backward_by_rows(const Head& head, Normalizer& normalizer, Rows<const T> d_out, Rows<T> d_q,
                      Index first, Index count, Put how, RowSums<Products>& to) {
  const Index H = to.H, V = to.V, S = to.S;
  const Rules& rules = head.rules;
  const auto& tile = to.tile;
  const Block block(rules, first, count, kQueries);
  const Lanes lanes = block.whole.lanes;
  Bench bench = to.bench;
  typename Products::Backward sums(block.width, kKeys, H, V, bench);
  ScoreRows x(rules, block, S, bench);
  const Index t = x.t;
  T* d_scores = bench.take(S * t);
  T* before = rules.own.rule && rules.own.rule->keeps ? bench.take(S * t) : nullptr;
  sums.read(head.q.from(first), d_out.from(first), count, head.scale);
  add_scores(head, tile, 0, S, Products::kScales ? T{1} : head.scale, before, x,
             [&](const Keys& seen, Index row) {
               T *scores = x.scores + row * t, *d_weights = d_scores + row * t;
               sums.products(tile, seen.j, seen.count, lanes, scores, d_weights);
               if (!rules.threshold) return;
               for (Index s = 0; s < seen.count; ++s)
                 for (Index i = 0; i < t; i += kLanes) {
                   T* here = d_weights + s * t + i;
                   store(here, block.dropped(rules, load(here), i, seen.j + s));
                 }
             });
  normalizer.solve(x);
  normalizer.prepare(x, d_scores);
  normalizer.each_run(x, [&](const Keys& run, Index row) {
    const Index j = run.j;
    T* ds = d_scores + row * t;
    normalizer.derive(x, run, row, to.weights, d_scores);
    pull_scores(x, run, row, before, d_scores);
    sums.add_to_keys(run.count, lanes, to.weights, ds, to.d_k + j * H, to.d_v + j * V);
    sums.add_to_queries(tile, j, run.count, lanes, ds);
  });
  sums.settle();
  put(d_q.from(first), sums.d_query, count, H, head.scale, how);
}

}  // namespace
