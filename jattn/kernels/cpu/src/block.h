// The keys of one head that a block of queries sees, and what turns its products into scores and
// weights: masks, score functions, dropout, and generated rules.

#pragma once

#include "native.h"
#include "pointwise.h"

namespace {

enum class Kind { kEmpty, kMixed, kFull };

// The steps from products to scores: scaling; then score functions, and NaN for values that are not
// finite; then the mask; or a rule, which does all of this.
enum class Steps { kScale, kModify, kMask, kRule };

// `count` keys from j on, and how the mask treats them.
struct Keys {
  Kind kind;
  Index j, count;
  Index end() const { return j + count; }
};

// Some lanes of a block, and the keys that they see.
struct Piece {
  Lanes lanes;
  Keys keys;
};

// A generated rule, see rule.h.
struct Generated {
  void (*forward)(const Place&, T* scores, bool masked);
  void (*backward)(const Place&, const T* before, T* d_scores);
  bool modifies, keeps;  // whether it changes unmasked scores; whether `backward` needs old scores
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
  Index row, chunk, chunks, t, S;  // row: queries in a row of the map, a block or a part of it

  bool changes(Kind kind) const { return rule && (rule->modifies || kind == Kind::kMixed); }
};

// The mask, score function and dropout of a head.
struct Rules {
  const int32_t* start;  // [T]: query i sees keys start[i] <= j < stop[i]
  const int32_t* stop;   // [T]
  const int32_t* q_ids;  // [T] or null: and only keys with its own id
  const int32_t* kv_ids; // [S]
  const T* bias;         // [T + S - 1] or null: bias[i - j + S - 1] is added to score (i, j)
  T* d_bias;             // its gradient
  T cap;                 // scores become cap tanh(score / cap), if not 0
  uint32_t seed;         // the seed of this head's dropout
  uint32_t threshold;    // weights whose hash is less are dropped; 0: none
  T dropout_scale;       // the factor of the other weights
  Index S;
  HeadRule own;          // replaces runs, ids, bias and cap, if there is one
  NormalizerRule normalizer;  // if it is pointwise, there are neither bias nor cap
};

// The hash of `jattn.dropout`: Wellons's "lowbias32". Queries whose places differ in one bit share all
// but the last factor of a hash.
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
constexpr Index kIds = kBytes / sizeof(int32_t);
typedef int32_t IdVector __attribute__((vector_size(kBytes)));

// The ids of some lanes: a list if there are few, and their range.
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

  // Whether any of kIds consecutive ids is in the range.
  bool may_have_any(const int32_t* ids) const {
    const auto x = load<IdVector>(ids);
    return !is_zero((Ints)((x >= least) & (x <= most)));
  }
};

// The keys that some lanes of a block see: bounds of the keys that any lane sees and of those that all
// lanes see, and ids; or rows of the map.
struct Range {
  Lanes lanes;
  Index least_start, most_start, least_stop, most_stop;
  Ids ids;
  Index first_row, rows;
};

// A block of at most kQueries queries, and the keys that its lanes see.
struct Block {
  Index first, count, width;  // width: count as whole vectors
  alignas(64) Int start[kQueries], stop[kQueries], ids[kQueries];
  alignas(64) uint32_t hashes[kQueries], last[kQueries];
  Index part;  // the lanes of half a block, if products can take so few; else 0
  Range whole, parts[2];

  Block(const Rules& rules, Index first, Index count, Index fewest)
      : Block(rules, first, count, fewest, 0, rules.S) {}

  // For keys j .. end - 1: the map is only read for these. Products take `fewest` lanes or more.
  Block(const Rules& rules, Index first, Index count, Index fewest, Index j, Index end)
      : first(first), count(count), width(up(count, kLanes)),
        part(width % (2 * fewest) ? 0 : width / 2) {
    if (!rules.own.map) read_runs(rules);
    if (rules.threshold) hash(rules);
    whole = range(rules, {0, width}, j, end);
    if (!part || whole.least_start >= whole.most_stop) return;
    for (Index p = 0; p < 2; ++p)
      parts[p] = range(rules, {p * part, part}, whole.least_start, whole.most_stop);
  }

  // The arguments of a rule for some lanes and keys.
  Place at(const HeadRule& own, Lanes lanes, const Keys& seen) const {
    const Index last = std::min(count, lanes.end());
    return {first + lanes.first, last - lanes.first, lanes.size, seen.j,       seen.count,
            own.t,               own.S,              own.operands, own.gradients};
  }

  void read_runs(const Rules& rules) {
    for (Index i = 0; i < width; ++i) {
      const bool real = i < count;
      start[i] = real ? rules.start[first + i] : 0;
      stop[i] = real ? rules.stop[first + i] : 0;
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
      const bool real = i < count, sees = stop[i] > start[i];
      x.least_start = std::min<Index>(x.least_start, sees ? start[i] : x.least_start);
      x.most_start = std::max<Index>(x.most_start, start[i]);
      x.least_stop = std::min<Index>(x.least_stop, real ? stop[i] : x.least_stop);
      x.most_stop = std::max<Index>(x.most_stop, sees ? stop[i] : 0);
      if (rules.q_ids) x.ids.add(ids[i]);
    }
    return x;
  }

  // Reads the first and the last key, of the chunks from j to end, that the map allows.
  void read_map(const HeadRule& own, Range& x, Index j, Index end) const {
    x.first_row = (first + x.lanes.first) / own.row;
    x.rows = (first + std::min(count, x.lanes.end()) - 1) / own.row - x.first_row + 1;
    Index low = j / own.chunk, high = (end + own.chunk - 1) / own.chunk;
    trim(own, x, low, high);
    x.least_start = low < high ? low * own.chunk : own.S;
    x.most_stop = low < high ? std::min(high * own.chunk, own.S) : 0;
  }

  // Removes empty chunks at both ends.
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

  // `seen` by the map: chunks of the tile from the first to the last that is not empty.
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

  // The keys, of `keys` keys from j on, between the first and the last that any lane sees. Lanes
  // without a query do not matter: nothing reads them.
  Keys seen(const Rules& rules, const Range& x, Index j, Index keys) const {
    Index end = std::min(j + keys, x.most_stop);
    j = std::max(j, x.least_start);
    if (j >= end) return {Kind::kEmpty, j, 0};
    if (rules.own.map) return seen_in_map(rules.own, x, j, end);
    if (rules.q_ids) {
      while (j + kIds <= end && !x.ids.may_have_any(rules.kv_ids + j)) j += kIds;
      while (j < end && !x.ids.may_have(rules.kv_ids[j])) ++j;
      while (j + kIds <= end && !x.ids.may_have_any(rules.kv_ids + end - kIds)) end -= kIds;
      while (j < end && !x.ids.may_have(rules.kv_ids[end - 1])) --end;
      if (j >= end) return {Kind::kEmpty, j, 0};
    }
    // Lanes without a query must add nothing to the sums along diagonals.
    bool full = x.most_start <= j && x.least_stop >= end && (count == width || !rules.d_bias);
    const auto is_own = [&](int32_t id) { return id == x.ids.least; };
    if (rules.q_ids)
      full = full && x.ids.count == 1 && std::all_of(rules.kv_ids + j, rules.kv_ids + end, is_own);
    return {full ? Kind::kFull : Kind::kMixed, j, end - j};
  }

  // Cuts the keys that the block sees into at most three pieces, if this saves its parts at least as
  // many keys as each has lanes: keys of one part, then keys of both, then keys of one part.
  int cut(const Rules& rules, const Keys& seen, Piece* pieces) const {
    pieces[0] = {whole.lanes, seen};
    if (!part || seen.kind != Kind::kMixed) return 1;
    const Keys a = this->seen(rules, parts[0], seen.j, seen.count);
    const Keys b = this->seen(rules, parts[1], seen.j, seen.count);
    if (2 * seen.count - a.count - b.count < part) return 1;
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

  // Turns products into scores, -infinity for masked ones.
  template <bool kMasked>
  JATTN_APART void modify(const Rules& rules, const Piece& piece, T factor, T* scores) const {
    const auto [lanes, keys] = piece;
    for (Index s = 0; s < keys.count; ++s)
      for (Index i = lanes.first; i < lanes.end(); i += kLanes, scores += kLanes)
        store(scores, modified<kMasked>(rules, load(scores) * factor, i, keys.j + s));
  }

  Ints allowed(const Rules& rules, Index i, Index j) const {
    const Int place = j;
    Ints yes = (load<Ints>(start + i) <= place) & (load<Ints>(stop + i) > place);
    if (rules.q_ids) yes &= load<Ints>(ids + i) == Int{rules.kv_ids[j]};
    return yes;
  }

  // Weights with dropout.
  Vector dropped(const Rules& rules, Vector weights, Index i, Index j) const {
    const uint32_t column = mix(static_cast<uint32_t>(j) + 0x85EBCA6Bu);
#if JATTN_SINGLE
    const Words bits = first_round(load<Words>(hashes + i) + column) * load<Words>(last + i);
    return bits >= rules.threshold ? weights * rules.dropout_scale : Vector{};
#else
    for (int l = 0; l < kLanes; ++l) {
      const uint32_t bits = first_round(hashes[i + l] + column) * last[i + l];
      weights[l] = bits >= rules.threshold ? weights[l] * rules.dropout_scale : 0;
    }
    return weights;
#endif
  }
};

struct Head {
  Input q, k, v;
  Rules rules;
  T scale;
};

constexpr Index kTogether = 16;  // blocks of queries that share a tile, at most

// Turns products into scores by a rule.
void apply(const HeadRule& own, const Block& block, Lanes lanes, const Keys& seen,
           const T* nonfinite, T* scores) {
  const Index t = lanes.size;
  if (nonfinite)
    for (Index s = 0; s < seen.count; ++s)
      for (Index i = 0; i < t; i += kLanes) add_to(scores + s * t + i, all(nonfinite[s]));
  own.rule->forward(block.at(own, lanes, seen), scores, seen.kind == Kind::kMixed);
}

// Turns products into scores, for a pointwise normalizer; returns the factor by which they still have
// to be multiplied.
T to_scores(const Rules& rules, const Block& block, const Piece& piece, T factor, T* products) {
  const auto& [lanes, keys] = piece;
  if (rules.own.changes(keys.kind)) {
    if (factor != 1) scale(products, keys.count * lanes.size, factor);
    apply(rules.own, block, lanes, keys, nullptr, products);
  } else if (keys.kind == Kind::kMixed) {
    block.modify<true>(rules, piece, factor, products);
  } else {
    return factor;
  }
  return 1;
}

// Reads each tile of keys that some blocks see, and calls `visit(block, seen, start)` for each of these
// blocks: `seen` are the keys of the tile from `start` on that the block sees.
template <typename OneBlock, typename Tile, typename Visit>
void visit_tiles(const Head& head, std::vector<OneBlock>& blocks, Tile& tile, const Visit& visit) {
  const Index S = head.rules.S;
  Index first = S, end = 0;
  for (const OneBlock& one : blocks) {
    first = std::min(first, one.block.whole.least_start);
    end = std::max(end, one.block.whole.most_stop);
  }
  for (Index j = first / kKeys * kKeys; j < end; j += kKeys) {
    const Index keys = std::min(kKeys, S - j);
    bool there = false;
    for (OneBlock& one : blocks) {
      const Keys seen = one.block.seen(head.rules, one.block.whole, j, keys);
      if (seen.kind == Kind::kEmpty) continue;
      if (!there) tile.read(head.k.from(j), head.v.from(j), keys);
      there = true;
      visit(one, seen, j);
    }
  }
}

}  // namespace
