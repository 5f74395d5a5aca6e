// Attention on CPUs: one head by tiles, forward and backward, called from XLA.
//
// A block of queries visits its tiles of keys with the online softmax (Milakov and Gimelshein
// 2018; Dao et al. 2022, FlashAttention, algorithms 1 and 4). A tile of scores lies in the first
// cache and is transposed: rows are keys, and the lanes of a vector are queries. So each query's
// maximum, sum and bounds are lanes as well, nothing is ever summed across a vector, and of all
// operands only the block of queries (and of d_out) has to be transposed:
//
//   scores   [s, t] = k [s, H] · qT [H, t]          d_weights [s, t] = v [s, V] · d_outT [V, t]
//   out      [t, V] += weightsT [t, s] · v [s, V]    d_query   [t, H] += d_scoresT [t, s] · k [s, H]
//   d_key    [s, H] += d_scores [s, t] · q [t, H]    d_value   [s, V] += weights [s, t] · d_out [t, V]
//
// Which keys a query sees is a run of places, `from <= j < until`, and equality of ids where there
// are some. Tiles that this empties are skipped, and those that it leaves whole are not masked.
// Other masks and score functions are rules that are compiled apart (rule.h): they change a tile of
// scores in place, and a tile map says which tiles are empty and which need no masking.
// What is masked is selected away; in sums over keys or queries it has weight 0, and there numbers
// that are not finite count as 0, so that 0 × NaN does not reach anybody.

#include "native.h"
#include "pairs.h"
#include "rule.h"
#include "wide.h"

namespace {

// ------------------------------------------------------------------------------------------------
// Masks, score functions, dropout
// ------------------------------------------------------------------------------------------------

enum class Kind { kEmpty, kMixed, kFull };

// `count` keys from j on, and what the mask says about them.
struct Keys {
  Kind kind;
  Index j, count;
  Index end() const { return j + count; }
};

// Some lanes of a block, and keys that they see.
struct Piece {
  Lanes lanes;
  Keys keys;
};

// A rule that was generated, see rule.h.
struct Generated {
  void (*forward)(const Place&, T* scores, bool masked);
  void (*backward)(const Place&, const T* before, T* d_scores);
  bool modifies, keeps;  // whether it changes more than masks, and needs scores before the change
  int64_t number;
  const Generated* next;
};

constexpr Index kMostOperands = 32;

// A rule for one head: its operands, their gradients, and the tile map.
struct HeadRule {
  const Generated* rule = nullptr;
  const void* operands[kMostOperands];
  void* gradients[kMostOperands];
  const int8_t* map = nullptr;  // [rows of queries, chunks of keys]: 0 empty, 1 mixed, 2 full
  Index row, chunk, chunks, t, S;  // row: queries in each; a part of a block, or the whole of it

  bool changes(Kind kind) const { return rule && (rule->modifies || kind == Kind::kMixed); }
};

// What a head's mask, score function and dropout are.
struct Rules {
  const int32_t* from;   // [T]: query i sees keys from[i] <= j < until[i]
  const int32_t* until;  // [T]
  const int32_t* q_ids;  // [T] or null: and among them those of its own id
  const int32_t* kv_ids; // [S]
  const T* bias;         // [T + S - 1] or null: bias[i - j + S - 1] is added to score (i, j)
  T* d_bias;             // its gradient
  T cap;                 // scores become cap tanh(score / cap), if not 0
  uint32_t seed;         // of this head's dropout
  uint32_t threshold;    // weights whose hash is less are dropped; 0: none
  T grown;               // what the others are multiplied with
  Index S;
  HeadRule own;          // in place of runs, ids, bias and cap, if there is one
};

// As `jattn.tile`: Wellons's "lowbias32"; queries whose places differ in one bit share all of a hash
// but its last factor.
constexpr uint32_t kShared = 8, kLast = 0x846CA68Bu, kOtherLast = kLast * 2891336453u;
template <typename W>
inline W first_round(W x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  return x ^ (x >> 15);
}
inline uint32_t mix(uint32_t x) {
  x = first_round(x) * kLast;
  return x ^ (x >> 16);
}

// JATTN_TILES is given by `library.py`.
constexpr Index kSizes[] = {JATTN_TILES};
constexpr Index kQueries = kSizes[0], kKeys = kSizes[1];  // of a tile
constexpr Index kRun = kSizes[2];  // keys whose gradients are summed before they are written
// Queries of half a block, if that is what products take: whole vectors, and whole depths of pairs.
constexpr Index kLeast = JATTN_SINGLE ? 32 : kLanes;
constexpr Index kPart = kQueries % (2 * kLeast) == 0 ? kQueries / 2 : kQueries;
constexpr Index kWorth = kPart < 32 ? 1 : 32;  // keys of a part that are worth a piece of its own

// The ids of some lanes: each of them while they are few, and the range of all.
struct Ids {
  static constexpr int kFew = 8;
  int32_t each[kFew];
  int count = 0;  // kFew + 1: more than are listed
  int32_t least = std::numeric_limits<int32_t>::max(), most = std::numeric_limits<int32_t>::min();

  bool listed(int32_t id) const {
    const int32_t* end = each + std::min(count, kFew);
    return std::find(each, end, id) != end;
  }

  void add(int32_t id) {
    least = std::min(least, id), most = std::max(most, id);
    if (count > kFew || listed(id)) return;
    if (count < kFew) each[count] = id;
    ++count;
  }

  bool may_have(int32_t id) const {
    return least <= id && id <= most && (count > kFew || listed(id));
  }
};

// What some lanes of a block see: keys from the first to the last that anybody sees, those that all
// see, and ids; or rows of the map.
struct Range {
  Lanes lanes;
  Index least_from, most_from, least_until, most_until;
  Ids ids;
  Index first_row, rows;
};

// A block of at most kQueries queries: what its lanes see.
struct Block {
  Index first, count, width;  // width: count as whole vectors
  alignas(64) Int from[kQueries], until[kQueries], ids[kQueries];
  alignas(64) uint32_t hashes[kQueries], last[kQueries];
  Range whole, parts[2];  // parts: if there are two

  Block(const Rules& rules, Index first, Index count) : Block(rules, first, count, 0, rules.S) {}

  // For keys j .. end - 1: of no others is the map read.
  Block(const Rules& rules, Index first, Index count, Index j, Index end)
      : first(first), count(count), width(up(count, kLanes)) {
    if (!rules.own.map) read_runs(rules);
    if (rules.threshold) hash(rules);
    whole = range(rules, {0, width}, j, end);
    if (!in_parts() || whole.least_from >= whole.most_until) return;
    for (Index p = 0; p < 2; ++p)
      parts[p] = range(rules, {p * kPart, kPart}, whole.least_from, whole.most_until);
  }

  // What a rule is told of some lanes and keys.
  Place at(const HeadRule& own, Lanes lanes, const Keys& seen) const {
    const Index last = std::min(count, lanes.end());
    return {first + lanes.first, last - lanes.first, lanes.size, seen.j,       seen.count,
            own.t,               own.S,              own.operands, own.gradients};
  }

  bool in_parts() const { return kPart < kQueries && width == kQueries; }

  void read_runs(const Rules& rules) {
    for (Index i = 0; i < width; ++i) {
      const bool real = i < count;
      from[i] = real ? rules.from[first + i] : 0;
      until[i] = real ? rules.until[first + i] : 0;
      if (rules.q_ids) ids[i] = real ? rules.q_ids[first + i] : ids[0];
    }
  }

  void hash(const Rules& rules) {
    for (Index i = 0; i < width; ++i) {
      const uint32_t place = static_cast<uint32_t>(first + i);
      hashes[i] = mix(rules.seed ^ mix(place & ~kShared));
      last[i] = place & kShared ? kOtherLast : kLast;
    }
  }

  Range range(const Rules& rules, Lanes lanes, Index j, Index end) const {
    constexpr Index kMost = std::numeric_limits<Index>::max();
    Range x{lanes, kMost, 0, kMost, 0, {}, 0, 0};
    if (rules.own.map) {
      read_map(rules.own, x, j, end);
      return x;
    }
    for (Index i = lanes.first; i < lanes.end(); ++i) {
      const bool real = i < count, sees = until[i] > from[i];
      x.least_from = std::min<Index>(x.least_from, sees ? from[i] : x.least_from);
      x.most_from = std::max<Index>(x.most_from, from[i]);
      x.least_until = std::min<Index>(x.least_until, real ? until[i] : x.least_until);
      x.most_until = std::max<Index>(x.most_until, sees ? until[i] : 0);
      if (rules.q_ids) x.ids.add(ids[i]);
    }
    return x;
  }

  // The first and the last key of chunks from j to end that the map leaves.
  void read_map(const HeadRule& own, Range& x, Index j, Index end) const {
    x.first_row = (first + x.lanes.first) / own.row;
    x.rows = (first + std::min(count, x.lanes.end()) - 1) / own.row - x.first_row + 1;
    Index low = j / own.chunk, high = (end + own.chunk - 1) / own.chunk;
    trim(own, x, low, high);
    x.least_from = low < high ? low * own.chunk : own.S;
    x.most_until = low < high ? std::min(high * own.chunk, own.S) : 0;
  }

  // Leaves out chunks at both ends that are empty.
  static void trim(const HeadRule& own, const Range& x, Index& low, Index& high) {
    const auto empty = [&](Index n) {
      const int8_t* kind = own.map + x.first_row * own.chunks + n;
      for (Index r = 0; r < x.rows; ++r)
        if (kind[r * own.chunks]) return false;
      return true;
    };
    while (low < high && empty(low)) ++low;
    while (high > low && empty(high - 1)) --high;
  }

  // As `seen`, by the map: chunks of the tile from the first to the last that is not empty.
  static Keys seen_in_map(const HeadRule& own, const Range& x, Index j, Index end) {
    Index low = j / own.chunk, high = (end - 1) / own.chunk + 1;
    trim(own, x, low, high);
    if (low == high) return {Kind::kEmpty, j, 0};
    bool full = true;
    for (Index r = x.first_row; full && r < x.first_row + x.rows; ++r) {
      const int8_t* row = own.map + r * own.chunks;
      full = std::all_of(row + low, row + high, [](int8_t kind) { return kind == 2; });
    }
    j = std::max(j, low * own.chunk), end = std::min(end, high * own.chunk);
    return {full ? Kind::kFull : Kind::kMixed, j, end - j};
  }

  // Those of `keys` keys from j on that are between the first and the last that anybody sees.
  // Lanes without a query may count as whatever suits: nothing reads them.
  Keys seen(const Rules& rules, const Range& x, Index j, Index keys) const {
    Index end = std::min(j + keys, x.most_until);
    j = std::max(j, x.least_from);
    if (rules.own.map && j < end) return seen_in_map(rules.own, x, j, end);
    if (rules.q_ids) {
      while (j < end && !x.ids.may_have(rules.kv_ids[j])) ++j;
      while (j < end && !x.ids.may_have(rules.kv_ids[end - 1])) --end;
    }
    if (j >= end) return {Kind::kEmpty, j, 0};
    // Lanes without a query must add nothing to the sums along diagonals.
    bool full = x.most_from <= j && x.least_until >= end && (count == width || !rules.d_bias);
    const auto is_own = [&](int32_t id) { return id == x.ids.least; };
    if (rules.q_ids)
      full = full && x.ids.count == 1 && std::all_of(rules.kv_ids + j, rules.kv_ids + end, is_own);
    return {full ? Kind::kFull : Kind::kMixed, j, end - j};
  }

  // What is computed of keys that the block sees: at most three pieces. Where its parts see `least`
  // keys less, all together, these are what one part sees, what both do, and what one does after that.
  int cut(const Rules& rules, const Keys& seen, Index least, Piece* pieces) const {
    pieces[0] = {whole.lanes, seen};
    if (!in_parts() || seen.kind != Kind::kMixed) return 1;
    const Keys a = this->seen(rules, parts[0], seen.j, seen.count);
    const Keys b = this->seen(rules, parts[1], seen.j, seen.count);
    if (2 * seen.count - a.count - b.count < least) return 1;
    int count = 0;
    const auto add = [&](const Range& x, Index j, Index end) {
      const Keys keys = j < end ? this->seen(rules, x, j, end - j) : Keys{Kind::kEmpty, j, 0};
      if (keys.kind != Kind::kEmpty) pieces[count++] = {x.lanes, keys};
    };
    const Index both = std::max(a.j, b.j), end = std::min(a.end(), b.end());
    if (both >= end) {
      add(parts[0], a.j, a.end());
      add(parts[1], b.j, b.end());
      return count;
    }
    add(parts[a.j < b.j ? 0 : 1], std::min(a.j, b.j), both);
    add(whole, both, end);
    add(parts[a.end() > b.end() ? 0 : 1], end, std::max(a.end(), b.end()));
    return count;
  }

  // Score (i, j) of lanes i from the product of query and key.
  template <bool kMasked>
  Vector modified(const Rules& rules, Vector score, Index i, Index j) const {
    if (rules.cap != 0) score = rules.cap * tangent(score / rules.cap);
    if (rules.bias) score += load(rules.bias + first + i - j + rules.S - 1);
    if constexpr (kMasked) score = allowed(rules, i, j) ? score : all(-kInfinity);
    return score;
  }

  Ints allowed(const Rules& rules, Index i, Index j) const {
    const Int place = j;
    Ints yes = (load<Ints>(from + i) <= place) & (load<Ints>(until + i) > place);
    if (rules.q_ids) yes &= load<Ints>(ids + i) == Int{rules.kv_ids[j]};
    return yes;
  }

  // Weights with dropout.
  Vector dropped(const Rules& rules, Vector weights, Index i, Index j) const {
    const uint32_t column = mix(static_cast<uint32_t>(j) + 0x85EBCA6Bu);
#if JATTN_SINGLE
    const Words bits = first_round(load<Words>(hashes + i) + column) * load<Words>(last + i);
    return bits >= rules.threshold ? weights * rules.grown : Vector{};
#else
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t bits = first_round(hashes[i + l] + column) * last[i + l];
      weights[l] = bits >= rules.threshold ? weights[l] * rules.grown : 0;
    }
    return weights;
#endif
  }
};

// ------------------------------------------------------------------------------------------------
// One head
// ------------------------------------------------------------------------------------------------

struct Head {
  Input q, k, v;
  Rules rules;
  T scale;
};

constexpr Index kTogether = 16;  // blocks of queries that share a tile, at most

// A maximum that grows by less than this stays: weights may be up to e^8, and what has been summed
// up need not be multiplied (the rule of FlashAttention-4).
constexpr T kSlack = 8;

// Where results go. Weights are e^(score - most - log_sum): two numbers, as their sum would have no
// digits left for the second where scores are large. They are written if somebody asks for them.
struct Results {
  Rows<T> out, most, log_sum;
  bool sums;
  Put how;
};

// Multiplies whole vectors.
void scale(T* x, Index size, T factor) {
  for (Index i = 0; i < size; i += kLanes) store(x + i, load(x + i) * factor);
}

// Products become scores by a rule.
void apply(const HeadRule& own, const Block& block, Lanes lanes, const Keys& seen,
           const T* nonfinite, T* scores) {
  const Index t = lanes.size;
  if (nonfinite)
    for (Index s = 0; s < seen.count; ++s)
      for (Index i = 0; i < t; i += kLanes) add_to(scores + s * t + i, all(nonfinite[s]));
  own.rule->forward(block.at(own, lanes, seen), scores, seen.kind == Kind::kMixed);
}

// A block of queries on its way over the keys: the online softmax.
template <typename Products>
struct ForwardBlock {
  static constexpr Index L = kLanes;

  Block block;
  typename Products::Forward sums;
  T factor;                      // what products are multiplied with
  bool fresh = true;             // no values are summed yet
  alignas(64) T most[kQueries];  // the largest score up to kSlack, which weights are relative to
  alignas(64) T sum[kQueries], shrink[kQueries];

  ForwardBlock(const Head& head, Index first, Index count, Index H, Index V, Bench& bench)
      : block(head.rules, first, count),
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
    const int count = block.cut(head.rules, seen, kWorth, pieces);
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
    const bool by_rule = rules.own.changes(kind);
    const bool modified = rules.cap != 0 || rules.bias || nonfinite || factor <= 0;
    if (by_rule) {
      if (!Products::kScales) scale(scores, keys * lanes.size, factor);
      apply(rules.own, block, lanes, seen, nonfinite, scores);
    }
    const bool grows =
        by_rule ? soften<false, false>(rules, lanes, j, keys, nullptr, T{1}, scores)
        : kind == Kind::kMixed
            ? soften<true, true>(rules, lanes, j, keys, nonfinite, factor, scores)
        : modified ? soften<false, true>(rules, lanes, j, keys, nonfinite, factor, scores)
                   : soften<false, false>(rules, lanes, j, keys, nonfinite, factor, scores);
    if (grows && !fresh) sums.rescale(lanes, shrink);
    sums.add(tile, at, keys, lanes, scores, fresh, exact);
    fresh = false;
  }

  // Products, times a factor above 0 where nothing is modified, become weights. Whether what they are
  // relative to has grown.
  template <bool kMasked, bool kModified>
  JATTN_APART bool soften(const Rules& rules, Lanes lanes, Index j, Index keys, const T* nonfinite,
                          T factor, T* scores) {
    const Index t = lanes.size, end = lanes.end();
    bool grows = false;
    Index i = lanes.first;
    for (; i + kWide * L <= end; i += kWide * L, scores += kWide * L)
      grows |= soften_few<kMasked, kModified, kWide>(rules, i, t, j, keys, nonfinite, factor, scores);
    for (; i + 2 * L <= end; i += 2 * L, scores += 2 * L)
      grows |= soften_few<kMasked, kModified, 2>(rules, i, t, j, keys, nonfinite, factor, scores);
    for (; i < end; i += L, scores += L)
      grows |= soften_few<kMasked, kModified, 1>(rules, i, t, j, keys, nonfinite, factor, scores);
    return grows;
  }

  // For N vectors of lanes side by side, so that none waits for its own last sum. Their scores are
  // rows `t` apart.
  template <bool kMasked, bool kModified, int N>
  bool soften_few(const Rules& rules, Index first, Index t, Index j, Index keys, const T* nonfinite,
                  T factor, T* scores) {
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
          x = block.template modified<kMasked>(rules, x, first + n * L, j + s);
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
      for (int l = 0; l < L; ++l) grows |= now[n][l] != before[l];
    }
    for (Index s = 0; s < keys; ++s) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        T* here = scores + s * t + n * L;
        Vector weights = exponential(load(here) * left - shift[n]);
        total[n] += weights;
        if (rules.threshold) weights = block.dropped(rules, weights, first + n * L, j + s);
        store(here, weights);
      }
    }
    for (int n = 0; n < N; ++n) store(sum + first + n * L, total[n]);
    return grows;
  }

  // Whether a sum of values has overflowed in a row that is not NaN for another reason.
  bool overflowed(Index V) const {
    if (fresh || all_finite(sums.out, block.count * V)) return false;
    for (Index i = 0; i < block.count; ++i)
      if (std::isfinite(sum[i]) && !all_finite(sums.out + i * V, V)) return true;
    return false;
  }

  void finish(const Results& to, Index V, T down) {
    if (fresh) std::fill(sums.out, sums.out + block.width * V, T{0});
    for (Index i = 0; i < block.width; i += L) {
      const Vector total = load(sum + i);
      const Ints dead = total == T{0};
      store(shrink + i, dead ? Vector{} : 1 / (total * down));
      if (to.sums) store(sum + i, dead ? Vector{} : logarithm(total));
    }
    for (Index i = 0; i < block.count; ++i)
      put_row(to.out[block.first + i], sums.out + i * V, to.out.size, shrink[i], to.how);
    if (!to.sums) return;
    for (Index i = 0; i < block.count; ++i) {
      *to.most[block.first + i] = most[i];
      *to.log_sum[block.first + i] = sum[i];
    }
  }
};

// Results of queries first .. first + count - 1, at most kTogether blocks. Values are multiplied with
// `down`, a power of two, and once more with a smaller one where their sums overflow.
template <typename Products>
void forward(const Head& head, Index first, Index count, const Results& results, T down = 1) {
  using OneBlock = ForwardBlock<Products>;
  const Index H = up(head.q.size, kLanes), V = up(head.v.size, kLanes), S = head.rules.S;
  const typename Products::Session session;
  Bench bench(Products::Forward::size(up(count, kQueries), H, V) +
              Products::Tile::size(H, V, kKeys) + Products::room(kKeys) * kQueries);
  typename Products::Tile tile(H, V, kKeys, false, bench);
  tile.down = down;
  T* scores = bench.take(Products::room(kKeys) * kQueries);
  thread_local std::vector<OneBlock> blocks;
  blocks.clear();
  blocks.reserve(kTogether);
  Index from = S, until = 0;
  for (Index i = 0; i < count; i += kQueries) {
    blocks.emplace_back(head, first + i, std::min(kQueries, count - i), H, V, bench);
    from = std::min(from, blocks.back().block.whole.least_from);
    until = std::max(until, blocks.back().block.whole.most_until);
  }
  for (Index j = from / kKeys * kKeys; j < until; j += kKeys) {
    const Index keys = std::min(kKeys, S - j);
    bool there = false;
    for (OneBlock& one : blocks) {
      const Keys seen = one.block.seen(head.rules, one.block.whole, j, keys);
      if (seen.kind == Kind::kEmpty) continue;
      if (!there) tile.read(head.k.from(j), head.v.from(j), keys);
      there = true;
      one.visit(head, seen, j, tile, results.sums, scores);
    }
  }
  for (OneBlock& one : blocks) one.sums.settle();
  const auto overflowed = [V](const OneBlock& one) { return one.overflowed(V); };
  if (down == 1 && std::any_of(blocks.begin(), blocks.end(), overflowed)) {
    // Weights are at most e^kSlack.
    down = std::exp2(-std::ceil(std::log2(T(S)) + kSlack * T(1.5)));
    return forward<Wide>(head, first, count, results, down);
  }
  for (OneBlock& one : blocks) one.finish(results, V, down);
}

// ------------------------------------------------------------------------------------------------
// One head's gradients
// ------------------------------------------------------------------------------------------------

// What goes with the queries, and where gradients go.
struct Back {
  Rows<const T> d_out, most, log_sum, delta;
  Rows<T> d_q, d_k, d_v;
  Put how;
  Index begin = 0;  // the key from which d_q is summed: with it, d_q is written over
};

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
  T factor;  // what products are multiplied with
  alignas(64) T most[kQueries], log_sum[kQueries], delta[kQueries];

  static Index size(Index H, Index V) { return Products::Backward::size(kQueries, kKeys, H, V); }

  // For keys j .. end - 1.
  BackwardBlock(const Head& head, Index first, Index count, Index j, Index end, Index H, Index V,
                Bench bench)
      : block(head.rules, first, count, j, end),
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

  // Adds what these keys of a run that starts at key `start` contribute.
  template <bool kQuery, bool kOfKeys>
  void visit(const Head& head, const Keys& seen, Index start, const Sums<Products>& run) {
    Piece pieces[3];
    const int count = block.cut(head.rules, seen, 2 * kWorth, pieces);
    for (int n = 0; n < count; ++n) visit<kQuery, kOfKeys>(head, pieces[n], start, run);
  }

  template <bool kQuery, bool kOfKeys>
  void visit(const Head& head, const Piece& piece, Index start, const Sums<Products>& run) {
    const auto [lanes, seen] = piece;
    const auto [kind, j, keys] = seen;
    const Index at = j - start, t = lanes.size;
    const auto& tile = run.tile;
    T *p = run.scores, *ds = run.d_scores;
    sums.products(tile, at, keys, lanes, p, ds);
    const T* nonfinite = tile.nonfinite ? tile.nonfinite + at : nullptr;
    const Rules& rules = head.rules;
    if (rules.own.changes(kind)) {
      const bool keeps = rules.own.rule->keeps;
      if (!Products::kScales) scale(p, keys * t, factor);
      if (keeps) std::copy(p, p + keys * t, run.before);
      apply(rules.own, block, lanes, seen, nonfinite, p);
      derive<true, true, true>(rules, lanes, j, keys, nullptr, p, ds);
      if (rules.own.rule->modifies)
        rules.own.rule->backward(block.at(rules.own, lanes, seen), keeps ? run.before : nullptr, ds);
    } else if (kind == Kind::kMixed)
      derive<true, true>(rules, lanes, j, keys, nonfinite, p, ds);
    else if (nonfinite || rules.cap != 0 || rules.bias || rules.threshold)
      derive<false, true>(rules, lanes, j, keys, nonfinite, p, ds);
    else
      derive<false, false>(rules, lanes, j, keys, nonfinite, p, ds);
    if constexpr (kOfKeys) sums.add_to_keys(keys, lanes, p, ds, run.d_k + at * H, run.d_v + at * V);
    if constexpr (kQuery) sums.add_to_queries(tile, at, keys, lanes, ds);
  }

  // Products q k become weights p after dropout, and products d_out v the cotangent of products
  // q k; that of scores is p (dp - delta), with p before dropout.
  template <bool kMasked, bool kModified, bool kByRule = false>
  JATTN_APART void derive(const Rules& rules, Lanes lanes, Index j, Index keys, const T* nonfinite,
                          T* products, T* d_weights) {
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
          if constexpr (kMasked) {  // in a row that is NaN as well
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

// Adds to the sums of keys from .. until - 1 what queries first .. last - 1 contribute, and to the
// queries' gradients; either may be left out.
template <bool kQuery, bool kOfKeys, typename Products>
void backward(const Head& head, const Back& back, Index first, Index last, Index from,
              Index until, const Sums<Products>& sums, Index H, Index V, const Bench& bench) {
  for (Index i = first; i < last; i += kQueries) {
    BackwardBlock<Products> one(head, i, std::min(kQueries, last - i), from, until, H, V, bench);
    const Range& whole = one.block.whole;
    const Index end = std::min(until, whole.most_until);
    bool there = false;
    for (Index j = std::max(from, whole.least_from / kKeys * kKeys); j < end; j += kKeys) {
      const Keys seen = one.block.seen(head.rules, whole, j, std::min(kKeys, until - j));
      if (seen.kind == Kind::kEmpty) continue;
      if (!there) one.read(head, back);
      there = true;
      one.template visit<kQuery, kOfKeys>(head, seen, from, sums);
    }
    const bool adds = from != back.begin;
    if (!kQuery || (!there && adds)) continue;
    T* d_query = one.sums.d_query;
    if (there) one.sums.settle();
    else std::fill(d_query, d_query + one.block.width * H, T{0});
    const Put how = adds ? Put::kAdd : head.rules.S > kRun ? Put::kOver : back.how;
    put(back.d_q.from(i), d_query, one.block.count, H, head.scale, how);
  }
}

}  // namespace

#include "statistics.h"  // of one head

namespace {

// ------------------------------------------------------------------------------------------------
// All heads
// ------------------------------------------------------------------------------------------------

// The axes of an array before its last `own`, as one: batch rows, maybe fewer than the call's, of
// which each then stands for several.
Index leading(const ffi::AnyBuffer& x, int own) {
  Index size = 1;
  const auto sizes = x.dimensions();
  for (size_t a = 0; a + own < sizes.size(); ++a) size *= sizes[a];
  return size;
}

Index axis(const ffi::AnyBuffer& x, int from_end) {
  return x.dimensions()[x.dimensions().size() - from_end];
}

// Heads (b, n) of [B, t, n, size]; size is 1 where there is no such axis.
template <typename E>
struct Heads {
  E* start;
  Index tokens, heads, size;

  Rows<E> at(Index b, Index n) const {
    return {start + (b * tokens * heads + n) * size, heads * size, size};
  }
};

Heads<const T> heads_of(const ffi::AnyBuffer& x, bool vectors = true) {
  const T* start = static_cast<const T*>(x.untyped_data());
  if (vectors) return {start, axis(x, 3), axis(x, 2), axis(x, 1)};
  return {start, axis(x, 2), axis(x, 1), 1};
}
Heads<T> heads_of(ffi::Result<ffi::AnyBuffer>& x, bool vectors = true) {
  const Heads<const T> same = heads_of(static_cast<const ffi::AnyBuffer&>(*x), vectors);
  return {const_cast<T*>(same.start), same.tokens, same.heads, same.size};
}

// Heads (b, n) of queries, keys or values [B, t, n, size].
struct Inputs {
  Input first;
  Index tokens, heads, size;

  explicit Inputs(const ffi::AnyBuffer& x)
      : first{static_cast<const char*>(x.untyped_data()), axis(x, 2) * axis(x, 1), axis(x, 1),
              x.element_type()},
        tokens(axis(x, 3)),
        heads(axis(x, 2)),
        size(axis(x, 1)) {}

  Input at(Index b, Index n) const {
    const Index bytes = static_cast<Index>(ffi::ByteWidth(first.type));
    Input one = first;
    one.start += (b * tokens * heads + n) * size * bytes;
    return one;
  }
};

// An operand [b, n, size]: of fewer batch rows or heads than the call, each stands for several.
template <typename E>
struct Shared {
  const E* start;  // null if there is none
  Index same, heads, size;

  Shared(const ffi::AnyBuffer& x, Index B, Index bytes = 1)
      : heads(axis(x, 2)), size(axis(x, 1) * bytes) {
    const Index rows = leading(x, 2);
    start = rows && heads && size ? static_cast<const E*>(x.untyped_data()) : nullptr;
    same = rows ? B / rows : 1;
  }
  const E* at(Index b, Index n) const {
    return start ? start + (b / same * heads + (heads > 1 ? n : 0)) * size : nullptr;
  }
};

// Results of as many numbers do not all stay in the caches until somebody reads them.
Put put_of(Index size) { return size * sizeof(T) >= 1 << 20 ? Put::kPast : Put::kOver; }

// The rules of this process, in lists of numbers whose last bits are the same. Rules are added and
// never removed, so that compiled programs find theirs, and nothing is locked when a process forks.
std::atomic<const Generated*> rules_by_number[256];

std::atomic<const Generated*>& rules_like(int64_t number) { return rules_by_number[number & 255]; }

std::atomic<void (*)(int64_t)> ask_for_rule{nullptr};

const Generated* rule_of(int64_t number) {
  const Generated* rule = rules_like(number);
  while (rule && rule->number != number) rule = rule->next;
  return rule;
}

// The rule of a call: `map`, then its operands; and the gradients of those that have one.
struct CallRule {
  const Generated* rule = nullptr;
  Index row = 0, chunk = 0;
  std::vector<Shared<char>> operands;  // in bytes
  std::vector<char*> gradients;        // [B, N, size] or null
  std::vector<Index> sizes;            // of gradients, in bytes for each head

  bool has_gradients() const {
    return std::any_of(gradients.begin(), gradients.end(), [](char* x) { return x != nullptr; });
  }
  HeadRule head(Index b, Index n, Index N, Index t, Index S) const {
    HeadRule own;
    if (!rule) return own;
    own.rule = rule;
    own.map = reinterpret_cast<const int8_t*>(operands[0].at(b, n));
    own.chunk = chunk, own.chunks = (S + chunk - 1) / chunk, own.row = row, own.t = t, own.S = S;
    for (size_t i = 1; i < operands.size(); ++i) own.operands[i - 1] = operands[i].at(b, n);
    for (size_t i = 0; i < gradients.size(); ++i)
      own.gradients[i] = gradients[i] ? gradients[i] + (b * N + n) * sizes[i] : nullptr;
    return own;
  }
};

// A call: everything but what goes in and comes out per query.
struct Call {
  Inputs q, k, v;
  Index B, N, K, t, S;
  Shared<int32_t> from, until, q_ids, kv_ids;
  Shared<T> bias;
  Shared<uint32_t> seeds;
  T scale, cap, grown;
  uint32_t threshold;
  CallRule own;

  Call(const ffi::AnyBuffer& q, const ffi::AnyBuffer& k, const ffi::AnyBuffer& v,
       const ffi::AnyBuffer& from, const ffi::AnyBuffer& until, const ffi::AnyBuffer& q_ids,
       const ffi::AnyBuffer& kv_ids, const ffi::AnyBuffer& bias, const ffi::AnyBuffer& seeds,
       double scale, double cap, double grown, int64_t threshold)
      : q(q),
        k(k),
        v(v),
        B(leading(q, 3)),
        N(this->q.heads),
        K(this->k.heads),
        t(this->q.tokens),
        S(this->k.tokens),
        from(from, B),
        until(until, B),
        q_ids(q_ids, B),
        kv_ids(kv_ids, B),
        bias(bias, B),
        seeds(seeds, B),
        scale(static_cast<T>(scale)),
        cap(static_cast<T>(cap)),
        grown(static_cast<T>(grown)),
        threshold(static_cast<uint32_t>(threshold)) {}

  Head head(Index b, Index n) const {
    const uint32_t* seed = seeds.at(b, n);
    const Rules rules = {from.at(b, n), until.at(b, n), q_ids.at(b, n),  kv_ids.at(b, n),
                         bias.at(b, n), nullptr,        cap,             seed ? *seed : 0,
                         threshold,     grown,          S,
                         own.head(b, n, N, t, S)};
    const Index g = n / (N / K);
    return {q.at(b, n), k.at(b, g), v.at(b, g), rules, scale};
  }
};

// Runs with the products that a call's queries, keys and values take.
template <typename Run>
void by_products(const Call& call, const Run& run) {
#if JATTN_PAIRS
  const auto is_half = [](const Inputs& x) { return x.first.type == ffi::BF16; };
  if (is_half(call.q) && is_half(call.k) && is_half(call.v)) return run(Pairs{});
#endif
  run(Wide{});
}

void forward_all(ffi::ThreadPool& pool, const Call& call, Heads<T> out, Heads<T> most,
                 Heads<T> log_sum, bool sums) {
  const Index N = call.N, enough = 4 * std::max<Index>(1, pool.num_threads());
  auto pieces_of = [&](Index size) { return (call.t + size - 1) / size; };
  Index size = kTogether * kQueries;
  while (size > kQueries && call.B * N * pieces_of(size) < enough) size /= 2;
  const Index pieces = pieces_of(size);
  const Put how = put_of(call.B * call.t * N * out.size);
  // The last queries of a causal mask see most, so they go first.
  parallel(pool, call.B * N * pieces, [&](Index task) {
    const Index n = task % N, b = task / N % call.B, piece = pieces - 1 - task / N / call.B;
    const Index first = piece * size;
    const Index count = std::min(size, call.t - first);
    const Results to = {out.at(b, n), most.at(b, n), log_sum.at(b, n), sums, how};
    by_products(call, [&](auto products) {
      forward<decltype(products)>(call.head(b, n), first, count, to);
    });
  });
}

struct Gradients {
  Heads<const T> d_out, most, log_sum, delta;
  Heads<T> d_q, d_k, d_v;
  T* d_bias;
  Index diagonals;
  Put how;

  Back at(Index b, Index n, Index group) const {
    return {d_out.at(b, n), most.at(b, n),        log_sum.at(b, n),     delta.at(b, n),
            d_q.at(b, n),   d_k.at(b, n / group), d_v.at(b, n / group), how};
  }
};

// Where heads are fewer than threads, the runs of a head's keys are shared out among `count` parts.
// What a part adds to the queries' gradients is summed apart; the first adds to the result itself.
struct Parts {
  Index count, t, heads, size, each;  // [B, t, heads, size], of `each` numbers
  std::unique_ptr<T[]> sums;

  Parts(Index count, const Call& call)
      : count(count), t(call.t), heads(call.N), size(call.q.size),
        each(call.B * t * heads * size), sums(new T[(count - 1) * each]) {}

  Rows<T> at(Index part, Index b, Index n) const {
    return Heads<T>{sums.get() + (part - 1) * each, t, heads, size}.at(b, n);
  }
  // There and back, so that a causal mask gives all parts as much to do.
  Index of(Index run) const {
    const Index turn = run / count, place = run % count;
    return turn % 2 ? count - 1 - place : place;
  }
  void add_to(Rows<T> d_q, Index b, Index n, Index i) const {
    for (Index part = 1; part < count; ++part) {
      const T* x = at(part, b, n)[i];
      for (Index h = 0; h < size; ++h) d_q[i][h] += x[h];
    }
  }
};

// One thread's part of the backward pass.
template <typename Products>
struct Worker {
  const Call& call;
  const Gradients& all;
  Index S, H, V, group;
  typename Products::Session session;
  Bench bench;
  Sums<Products> sums;

  Worker(const Call& call, const Gradients& all)
      : call(call),
        all(all),
        S(call.S),
        H(up(call.q.size, kLanes)),
        V(up(call.v.size, kLanes)),
        group(call.N / call.K),
        bench(Sums<Products>::size(H, V) + BackwardBlock<Products>::size(H, V)),
        sums(H, V, bench) {}

  Head head(Index b, Index n) const {
    Head one = call.head(b, n);
    one.rules.d_bias = all.diagonals ? all.d_bias + (b * call.N + n) * all.diagonals : nullptr;
    return one;
  }

  // Gradients of keys from .. until - 1 of key head k, and what they contribute to queries'.
  template <bool kQuery>
  void keys(Index b, Index k, Index from, Index until, const Parts* parts = nullptr,
            Index part = 0) {
    std::fill(sums.d_k, sums.d_k + (until - from) * H, T{0});
    std::fill(sums.d_v, sums.d_v + (until - from) * V, T{0});
    for (Index n = k * group; n < (k + 1) * group; ++n) {
      const Head one = head(b, n);
      if (n == k * group) sums.tile.read(one.k.from(from), one.v.from(from), until - from);
      Back to = all.at(b, n, group);
      to.begin = part * kRun;
      if (part) to.d_q = parts->at(part, b, n);
      backward<kQuery, true>(one, to, 0, call.t, from, until, sums, H, V, bench);
    }
    const Back to = all.at(b, k * group, group);
    put(to.d_k.from(from), sums.d_k, until - from, H, call.scale, all.how);
    put(to.d_v.from(from), sums.d_v, until - from, V, T{1}, all.how);
  }

  // All gradients of key head k and its query heads.
  void heads(Index b, Index k) {
    for (Index n = k * group; n < (k + 1) * group; ++n) {
      for (size_t i = 0; i < call.own.gradients.size(); ++i)
        if (char* sums = call.own.gradients[i])
          std::memset(sums + (b * call.N + n) * call.own.sizes[i], 0, call.own.sizes[i]);
      T* d_bias = head(b, n).rules.d_bias;
      if (d_bias) std::fill(d_bias, d_bias + all.diagonals, T{0});
    }
    for (Index from = 0; from < S; from += kRun) keys<true>(b, k, from, std::min(S, from + kRun));
  }

  // Gradients of the keys of one part of key head k, and what they contribute to queries'.
  void share(Index b, Index k, const Parts& parts, Index part) {
    for (Index from = 0; from < S; from += kRun)
      if (parts.of(from / kRun) == part)
        keys<true>(b, k, from, std::min(S, from + kRun), &parts, part);
  }

  // Gradients of queries first .. last - 1 alone.
  void queries(Index b, Index n, Index first, Index last) {
    const Head one = head(b, n);
    const Back to = all.at(b, n, group);
    for (Index from = 0; from < S; from += kRun) {
      const Index until = std::min(S, from + kRun);
      sums.tile.read(one.k.from(from), one.v.from(from), until - from);
      backward<true, false>(one, to, first, last, from, until, sums, H, V, bench);
    }
  }
};

// Into how many parts the keys of each head are cut so that all threads have as much to do; 0 if that
// takes too many: each needs the memory of the queries' gradients.
Index parts_of(Index units, Index threads, Index runs) {
  for (Index parts = 1; parts <= 8 && (parts == 1 || parts <= runs); ++parts)
    if (units * parts >= 4 * threads || units * parts % threads == 0) return parts;
  return 0;
}

template <typename Products>
void backward_all(ffi::ThreadPool& pool, const Call& call, const Gradients& all) {
  using OneWorker = Worker<Products>;
  const Index K = call.K, N = call.N, units = call.B * K, t = call.t, S = call.S;
  const Index runs = (S + kRun - 1) / kRun, blocks = (t + kRun - 1) / kRun;
  const bool whole = all.diagonals || call.own.has_gradients();
  const Index count =
      whole ? 1 : parts_of(units, std::max<Index>(1, pool.num_threads()), runs);
  if (count == 1) {
    parallel(pool, units, [&](Index i) { OneWorker(call, all).heads(i / K, i % K); });
    return;
  }
  // The queries of block i of all heads, the last ones first.
  auto each_block = [&](auto work) {
    parallel(pool, call.B * N * blocks, [&](Index i) {
      const Index head = i / blocks, first = (blocks - 1 - i % blocks) * kRun;
      work(head / N, head % N, first, std::min(t, first + kRun));
    });
  };
  if (count) {
    const Parts parts(count, call);
    parallel(pool, units * count, [&](Index i) {
      const Index unit = i % units;
      OneWorker(call, all).share(unit / K, unit % K, parts, i / units);
    });
    each_block([&](Index b, Index n, Index first, Index last) {
      for (Index i = first; i < last; ++i) parts.add_to(all.d_q.at(b, n), b, n, i);
    });
    return;
  }
  // Many more threads than heads: runs of keys, then runs of queries, whose weights are computed
  // twice so that no two threads add to the same place.
  parallel(pool, units * runs, [&](Index i) {
    const Index unit = i % units, from = i / units * kRun;
    const Index until = std::min(S, from + kRun);
    OneWorker(call, all).template keys<false>(unit / K, unit % K, from, until);
  });
  each_block([&](Index b, Index n, Index first, Index last) {
    OneWorker(call, all).queries(b, n, first, last);
  });
}

// Where statistics of a call go; those that nobody asks for have no rows.
struct Statistics {
  Heads<const T> maximum, log_total;
  Shared<int32_t> q_positions, kv_positions;
  Shared<T> marks;
  T threshold;
  Heads<T> entropy, greatest, distance, on_keys, above;
  Heads<int32_t> place;
  T* received;  // [B, N, S]

  Asked asked(Index b, Index n) const {
    return {maximum.at(b, n),      log_total.at(b, n), q_positions.at(b, n),
            kv_positions.at(b, n), marks.at(b, n),     threshold};
  }
  Found at(Index b, Index n) const {
    return {entropy.at(b, n), greatest.at(b, n), distance.at(b, n),
            on_keys.at(b, n), above.at(b, n),    place.at(b, n)};
  }
};

// A head's queries are cut into as many pieces as keep the threads busy; what keys receive of a piece
// is summed apart, and then that of all pieces.
void statistics_all(ffi::ThreadPool& pool, const Call& call, const Statistics& all) {
  const Index N = call.N, units = call.B * N, S = call.S, group = kTogether * kQueries;
  const Index enough = 4 * std::max<Index>(1, pool.num_threads());
  const Index most = std::max<Index>(1, (call.t + kQueries - 1) / kQueries);
  const Index wanted = std::clamp<Index>((enough + units - 1) / std::max<Index>(1, units), 1, most);
  const Index size = up((call.t + wanted - 1) / wanted, kQueries);
  const Index pieces = std::max<Index>(1, (call.t + size - 1) / std::max<Index>(1, size));
  std::vector<T> apart(pieces > 1 ? pieces * units * S : 0);
  std::fill(all.received, all.received + units * S, T{0});
  T* sums = pieces > 1 ? apart.data() : all.received;
  parallel(pool, units * pieces, [&](Index task) {
    const Index unit = task % units, n = unit % N, b = unit / N, piece = pieces - 1 - task / units;
    const Index end = std::min(call.t, (piece + 1) * size);
    const Head head = call.head(b, n);
    for (Index first = piece * size; first < end; first += group)
      by_products(call, [&](auto products) {
        statistics<decltype(products)>(head, all.asked(b, n), first, std::min(group, end - first),
                                       all.at(b, n), sums + (piece * units + unit) * S);
      });
  });
  if (pieces == 1) return;
  for (Index piece = 0; piece < pieces; ++piece)
    for (Index i = 0; i < units * S; ++i) all.received[i] += apart[piece * units * S + i];
}

// ------------------------------------------------------------------------------------------------
// What XLA calls
// ------------------------------------------------------------------------------------------------

using Buffer = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

Index bytes_of(const Buffer& x) { return static_cast<Index>(ffi::ByteWidth(x.element_type())); }

// The rule of this number, which was added when the program was lowered; 0: none. `differentiated`
// has a bit for each operand that has a gradient.
ffi::Error find_rule(int64_t number, int64_t row, int64_t chunk, int64_t differentiated, Call& call,
                     ffi::RemainingArgs operands, ffi::RemainingRets* gradients) {
  if (!number) return ffi::Error::Success();
  call.own.rule = rule_of(number);
  if (auto* ask = ask_for_rule.load(); !call.own.rule && ask) {
    ask(number);
    call.own.rule = rule_of(number);
  }
  if (!call.own.rule)
    return {ffi::ErrorCode::kFailedPrecondition,
            "jattn: this process has not compiled the functions of this program's masks and scores:"
            " call jattn.attention with them once before"};
  call.own.row = row, call.own.chunk = chunk;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto x = operands.get<Buffer>(i);
    if (x.has_error()) return x.error();
    call.own.operands.emplace_back(*x, call.B, bytes_of(*x));
  }
  if (!gradients) return ffi::Error::Success();
  for (size_t i = 0, next = 0; i + 1 < operands.size(); ++i) {
    call.own.gradients.push_back(nullptr), call.own.sizes.push_back(0);
    if (!(differentiated >> i & 1)) continue;
    auto x = gradients->get<Buffer>(next++);
    if (x.has_error()) return x.error();
    call.own.gradients.back() = static_cast<char*>((*x)->untyped_data());
    call.own.sizes.back() = axis(**x, 1) * bytes_of(**x);
  }
  return ffi::Error::Success();
}

ffi::Error run_forward(ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer from,
                       Buffer until, Buffer q_ids, Buffer kv_ids, Buffer bias, Buffer seeds,
                       ffi::RemainingArgs operands, Out out, Out most, Out log_sum, double scale,
                       double cap, double grown, int64_t threshold, int64_t rule, int64_t row,
                       int64_t chunk) {
  return reported([&] {
    Call call{q, k, v, from, until, q_ids, kv_ids, bias, seeds, scale, cap, grown, threshold};
    const ffi::Error error = find_rule(rule, row, chunk, 0, call, operands, nullptr);
    if (!error.success()) return error;
    forward_all(pool, call, heads_of(out), heads_of(most, false), heads_of(log_sum, false),
                most->element_count() > 0);
    return ffi::Error::Success();
  });
}

ffi::Error run_backward(ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer from,
                        Buffer until, Buffer q_ids, Buffer kv_ids, Buffer bias, Buffer seeds,
                        Buffer d_out, Buffer most, Buffer log_sum, Buffer delta,
                        ffi::RemainingArgs operands, Out d_q, Out d_k, Out d_v, Out d_bias,
                        ffi::RemainingRets gradients, double scale, double cap, double grown,
                        int64_t threshold, int64_t rule, int64_t row, int64_t chunk,
                        int64_t differentiated) {
  return reported([&] {
    Call call{q, k, v, from, until, q_ids, kv_ids, bias, seeds, scale, cap, grown, threshold};
    const ffi::Error error =
        find_rule(rule, row, chunk, differentiated, call, operands, &gradients);
    if (!error.success()) return error;
    T* sums = static_cast<T*>(d_bias->untyped_data());
    const Put how = put_of(d_q->element_count() + d_k->element_count() + d_v->element_count());
    const Gradients all{heads_of(d_out), heads_of(most, false), heads_of(log_sum, false),
                        heads_of(delta, false), heads_of(d_q), heads_of(d_k), heads_of(d_v), sums,
                        axis(*d_bias, 1), how};
    by_products(call, [&](auto products) { backward_all<decltype(products)>(pool, call, all); });
    return ffi::Error::Success();
  });
}

ffi::Error run_statistics(ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer from,
                          Buffer until, Buffer q_ids, Buffer kv_ids, Buffer bias, Buffer seeds,
                          Buffer maximum, Buffer log_total, Buffer q_positions,
                          Buffer kv_positions, Buffer marks, ffi::RemainingArgs operands, Out entropy, Out greatest, Out place,
                          Out distance, Out on_keys, Out above, Out received, double scale,
                          double cap, double grown, int64_t threshold, int64_t rule, int64_t row,
                          int64_t chunk, double least) {
  return reported([&] {
    Call call{q, k, v, from, until, q_ids, kv_ids, bias, seeds, scale, cap, grown, threshold};
    const ffi::Error error = find_rule(rule, row, chunk, 0, call, operands, nullptr);
    if (!error.success()) return error;
    const Heads<int32_t> places{static_cast<int32_t*>(place->untyped_data()), call.t, call.N, 1};
    statistics_all(pool, call,
                   {heads_of(maximum, false), heads_of(log_total, false), {q_positions, call.B},
                    {kv_positions, call.B}, {marks, call.B}, static_cast<T>(least),
                    heads_of(entropy, false),
                    heads_of(greatest, false), heads_of(distance, false), heads_of(on_keys, false),
                    heads_of(above, false), places, static_cast<T*>(received->untyped_data())});
    return ffi::Error::Success();
  });
}

}  // namespace

#define JATTN_OPERANDS                                                                        \
  xla::ffi::Ffi::Bind()                                                                       \
      .Ctx<xla::ffi::ThreadPool>()                                                            \
      .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()    \
      .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
#define JATTN_ATTRIBUTES                                                                  \
  .Attr<double>("scale").Attr<double>("cap").Attr<double>("grown").Attr<int64_t>("threshold") \
      .Attr<int64_t>("rule").Attr<int64_t>("row").Attr<int64_t>("chunk")

XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_forward, run_forward,
                              JATTN_OPERANDS.RemainingArgs().Ret<Buffer>().Ret<Buffer>()
                                  .Ret<Buffer>() JATTN_ATTRIBUTES);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_backward, run_backward,
                              JATTN_OPERANDS.Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                                  .Arg<Buffer>().RemainingArgs().Ret<Buffer>().Ret<Buffer>()
                                  .Ret<Buffer>().Ret<Buffer>().RemainingRets() JATTN_ATTRIBUTES
                                  .Attr<int64_t>("differentiated"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_statistics, run_statistics,
                              JATTN_OPERANDS.Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                                  .Arg<Buffer>().Arg<Buffer>().RemainingArgs().Ret<Buffer>()
                                  .Ret<Buffer>().Ret<Buffer>().Ret<Buffer>().Ret<Buffer>()
                                  .Ret<Buffer>().Ret<Buffer>() JATTN_ATTRIBUTES
                                  .Attr<double>("least"));

// Sets the function that is called with the number of a rule that the process lacks, and adds it.
extern "C" void jattn_ask_for_rules(void (*ask)(int64_t)) { ask_for_rule = ask; }

// Adds a rule that was compiled, once; its library stays loaded.
extern "C" void jattn_add_rule(int64_t number, void* forward, void* backward, int modifies,
                               int keeps) {
  if (rule_of(number)) return;
  auto* rule = new Generated{reinterpret_cast<void (*)(const Place&, T*, bool)>(forward),
                             reinterpret_cast<void (*)(const Place&, const T*, T*)>(backward),
                             modifies != 0, keeps != 0, number, rules_like(number)};
  while (!rules_like(number).compare_exchange_weak(rule->next, rule)) {
  }
}
