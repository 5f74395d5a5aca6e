// A few queries against many keys, called from XLA: every key and value is read once, in the order of
// the memory.
//
// There are two operations for each number that is read, so only reading takes time. Heads whose keys
// lie side by side are computed together, and so are the rows of a key head: its group's heads ×
// tokens. Values are prefetched while the products with the keys are computed, and keys while values
// are summed, so that the memory always works. Long sequences are cut into parts, whose results are
// merged (Dao et al. 2023, Flash-Decoding). Tiles that no query sees are not read.

#include "quantized.h"

namespace {

constexpr Index kTile = 1 << 17;      // bytes of a tile's keys: with its values, part of the L2 cache
constexpr Index kMostKeys = 512;      // the most keys of a tile
constexpr Index kPart = 1 << 20;      // the fewest bytes of keys in a part
constexpr Index kTogether = 1 << 14;  // the most rows times head size of heads that are read together
constexpr Index kTurned = 64;         // keys that are transposed at a time
constexpr Index kFewRows = 16;        // the most rows for which keys are not transposed
constexpr Index kFewAlone = 8;        // the same if heads do not lie side by side
constexpr Index kFewSums = 4;         // the most rows of such a head whose output stays in registers
constexpr Index kOnce = 4;            // the most rows for which numbers are converted in registers only
constexpr Index kPair = 2;            // keys that are multiplied side by side
constexpr Index kLine = 64;           // bytes of a cache line
constexpr int kRowsOfQueries = 4;     // the most rows that are multiplied by keys as integers at a time
template <typename E>                 // the most rows that are multiplied by values so
constexpr int kRowsOfWeights = 4 / Stored<E>::kVectors;
template <typename E>                 // the most rows for which integers are faster than floats
constexpr Index kFewIntegers = 8 / Stored<E>::kVectors;

// Prefetches the rows of some tokens, a few cache lines at each of `steps`: memory is always being
// read, and loads do not wait for too many prefetches.
class Ahead {
 public:
  template <typename E>
  Ahead(Rows<const E> rows, Index heads, Index count, Index steps)
      : at_(reinterpret_cast<const char*>(rows.start)),
        row_(heads * rows.size * sizeof(E)),
        gap_(rows.stride * sizeof(E) - row_),
        left_(rows.start ? count : 0) {
    if (gap_ == 0) row_ *= left_, left_ = std::min<Index>(left_, 1);  // all rows as one
    end_ = at_ + row_;
    each_ = (left_ * (up(row_, kLine) / kLine) + steps - 1) / steps;
  }

  void step() {
    for (Index i = 0; i < each_ && left_; ++i) {
      __builtin_prefetch(at_, 0, 2);
      if ((at_ += kLine) < end_) continue;
      at_ = end_ + gap_, end_ += row_ + gap_, --left_;
    }
  }

 private:
  const char *at_, *end_;
  Index row_, gap_, left_, each_;
};

// scores[r, :] = q[r] · each of `kLanes` keys, M rows at a time and then the others.
template <int M, typename E>
void multiply_rows(Index rows, const T* q, Rows<const E> keys, T* scores, Index stride,
                   Ahead& ahead) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
  constexpr Index n = Stored<E>::kVectors;
  const Index half = keys.size, H = n * half;
  for (; rows >= M; rows -= M, q += M * H, scores += M * stride) {
    Vector sums[M][kLanes];
    for (Index s = 0; s < kLanes; s += kPair) {
      Vector sum[M][kPair] = {};
      ahead.step();
      for (Index h = 0; h < half; h += kLanes) {
        Vector key[kPair][n];
#pragma GCC unroll 2
        for (Index i = 0; i < kPair; ++i) widen(keys[s + i] + h, key[i]);
#pragma GCC unroll 4
        for (Index m = 0; m < M; ++m)
#pragma GCC unroll 2
          for (Index i = 0; i < kPair; ++i)
#pragma GCC unroll 2
            for (Index v = 0; v < n; ++v)
              sum[m][i] += key[i][v] * load(q + m * H + v * half + h);
      }
#pragma GCC unroll 4
      for (Index m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (Index i = 0; i < kPair; ++i) sums[m][s + i] = sum[m][i];
    }
    for (Index m = 0; m < M; ++m) store(scores + m * stride, add_lanes<1>(sums[m], lanes));
  }
  if constexpr (M > 1)
    if (rows) multiply_rows<M / 2>(rows, q, keys, scores, stride, ahead);
}

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Keys or values of E in pages [K, page, size] or [page, K, size]. A table [B, M] lists
// the pages of each row; without a table, row b has page b. The first `size` numbers of a token's head
// are read, so that values may be the beginning of keys.
template <typename E>
struct Pages {
  const E* start;
  const float* scales;  // [pages, K, page]; null if there are none
  const int32_t* table;
  Index pages, rows;  // of each group of rows, which has its own pages and table
  Index K, page, size, M;
  Index by_page, by_head, by_token;

  // Token j of row b and those after it in its page; null if the row has no such page.
  Rows<const E> at(Index b, Index k, Index j) const {
    const Index p = page_of(b, j);
    if (p < 0) return {nullptr, by_token, size};
    return {start + p * by_page + k * by_head + j % page * by_token, by_token, size};
  }
  const float* scales_at(Index b, Index k, Index j) const {
    return scales ? scales + (page_of(b, j) * K + k) * page + j % page : nullptr;
  }

 private:
  Index page_of(Index b, Index j) const {
    const Index p = table ? table[b * M + j / page] : b % rows;
    return p < 0 || p >= pages ? -1 : b / rows * pages + p;
  }
};

template <typename E>
struct Call {
  const T* q;  // [B, T, N, H]
  Pages<E> keys, values;
  Shared<uint8_t> allowed;  // [b, n, T, S]
  Shared<T> bias;
  Index B, T_, N, K, S, H, V;
  T scale;
  // The results: out [B, T, N, V] and, for each row, the largest score and the log of the sum of
  // weights relative to it, [B, T, N].
  T *out, *most, *log_sum;

  Index group() const { return N / K; }
};

// The partial results of some rows: those over some of the keys.
struct Part {
  T *most, *sum, *out;  // [R], [R], [R, V]
  T* down;              // what values were multiplied by, less than 1 where sums overflowed

  static Index size(Index R, Index V) { return R * (V + 2) + 1; }
  Part(T* memory, Index R, Index V)
      : most(memory), sum(memory + R), out(memory + 2 * R), down(out + R * V) {}
};

// Computes the part of some keys for the rows of some key heads of a batch row.
template <typename E>
class Reader {
 public:
  Reader(const Call<E>& call, Index b, Index k, Index heads, Index tile, Part part)
      : call_(call),
        b_(b),
        k_(k),
        heads_(heads),
        R_(call.group() * call.T_),
        H_(call.H),
        V_(up(call.V, kLanes)),
        tile_(tile),
        bench_(heads * R_ * (2 * (H_ + kLanes) + tile) + kTurned * (2 * H_ + V_) + tile * (R_ + V_ + 1)),
        part_(part) {
    *part.down = 1;
    q_ = bench_.take(heads * R_ * H_), scores_ = bench_.take(heads * R_ * tile);
    transposed_ = bench_.take(H_ * kTurned), wide_ = bench_.take(kTurned * std::max(H_, V_));
    values_ = bench_.take(tile * V_), nonfinite_ = bench_.take(tile);
    for (Index r = 0; r < heads * R_; ++r) {
      const T* from = call.q + ((b * call.T_ + token(r)) * call.N + head(r)) * H_;
      for (Index h = 0; h < H_; ++h) q_[r * H_ + h] = from[h] * call.scale;
    }
    if constexpr (Stored<E>::kIntegers)
      if (R_ <= kFewIntegers<E>) write_digits();
  }

  // Masked values have weight 0, and 0 × NaN is NaN: if a result is not finite, everything is computed
  // again with 0 for values that are not finite, and NaN for the rows that attend to them. Results
  // that are still not finite have overflowed, and values are multiplied by `down`.
  void run(Index from, Index until, T down) {
    read(from, until);
    if (finite()) return;
    exact_ = true;
    read(from, until);
    if (finite()) return;
    *part_.down = down_ = down;
    read(from, until);
  }

 private:
  // A tile: its first key, the number of its keys, and the keys and values of the first head.
  struct Tile {
    Index j = 0, count = 0;
    Rows<const E> keys = {}, values = {};
  };

  // Writes queries as integers; `by_integers_` is whether that is possible.
  void write_digits() {
    constexpr Index n = Stored<E>::kVectors;
    const Index half = H_ / n, padded = up(half, kLanes), rows = heads_ * R_;
    digits_.take(bench_, rows, n * padded, true);
    weights_.take(bench_, R_, tile_, false);
    by_integers_ = n == 1 || call_.values.size % kLanes == 0;
    std::fill(wide_, wide_ + n * padded, T{0});
    for (Index r = 0; r < rows && by_integers_; ++r) {
      for (Index v = 0; v < n; ++v)
        std::copy_n(q_ + r * H_ + v * half, half, wide_ + v * padded);
      by_integers_ = digits_.write(r, wide_);
    }
  }

  // Whether all rows are finite, except those that are NaN because of their scores.
  bool finite() const {
    for (Index r = 0; r < heads_ * R_; ++r)
      if (!all_finite(part_.out + r * V_, V_) && (!exact_ || std::isfinite(part_.sum[r])))
        return false;
    return true;
  }

  void read(Index from, Index until) {
    const Index rows = heads_ * R_;
    std::fill(part_.most, part_.most + rows, -kInfinity);
    std::fill(part_.sum, part_.sum + rows, T{0});
    std::fill(part_.out, part_.out + rows * V_, T{0});
    Tile now = next(from, until);
    while (now.count) {
      const Tile then = next(now.j + now.count, until);
      visit(now, then);
      now = then;
    }
  }

  Index head(Index r) const { return k_ * call_.group() + r / call_.T_; }
  Index token(Index r) const { return r % call_.T_; }

  // The first tile from j on that any row sees; whole vectors, except at the end of a page.
  Tile next(Index j, Index until) const {
    for (Index count; j < until; j += count) {
      count = std::min({tile_, until - j, call_.keys.page - j % call_.keys.page});
      if (count > kLanes) count -= count % kLanes;
      const Rows<const E> keys = call_.keys.at(b_, k_, j);
      if (keys.start && seen(j, count)) return {j, count, keys, call_.values.at(b_, k_, j)};
    }
    return {};
  }

  // Keys or values from s on of head h of a tile.
  Rows<const E> keys_of(const Tile& tile, Index h, Index s) const {
    return {tile.keys[s] + h * call_.keys.by_head, tile.keys.stride, tile.keys.size};
  }
  Rows<const E> values_of(const Tile& tile, Index h, Index s) const {
    return {tile.values[s] + h * call_.values.by_head, tile.values.stride, tile.values.size};
  }

  bool seen(Index j, Index count) const {
    if (!call_.allowed.start) return true;
    for (Index r = 0; r < (call_.allowed.heads > 1 ? heads_ * R_ : call_.T_); ++r)
      if (std::memchr(call_.allowed.at(b_, head(r)) + token(r) * call_.S + j, 1, count))
        return true;
    return false;
  }

  // The number of passes over the rows: of `each` rows, then of half as many, and so on.
  static Index times(Index rows, Index each) {
    Index n = rows / each;
    for (Index left = rows % each; left; left &= left - 1) ++n;
    return n;
  }

  void visit(Tile now, Tile then) {
    if constexpr (Stored<E>::kIntegers)
      if (by_integers_ && !exact_) return visit_by_integers(now, then);
    const Index most_few = heads_ == 1 ? kFewAlone : kFewRows;
    const bool few = R_ <= most_few && call_.keys.size % kLanes == 0 && now.count % kLanes == 0;
    const Index each = few ? now.count / kPair * times(R_, 4) : up(now.count, kTurned) / kTurned;
    Ahead for_values(now.values, heads_, now.count, heads_ * each);
    few ? multiply(now, for_values) : multiply_turned(now, for_values);
    if (exact_ || V_ != call_.V) return weigh_copies(now);
    for (Index r = 0; r < heads_ * R_; ++r) soften(r, now, true);
    const Index run = heads_ == 1 && R_ > kFewSums ? kTurned : kLanes;
    const Index columns = V_ / kLanes, blocks = times(columns, kWide) * times(R_, 4);
    const Index steps = run == kTurned ? up(now.count, run) / run : now.count * blocks;
    Ahead for_keys(then.keys, heads_, then.count, heads_ * steps);
    for (Index s = 0; s < now.count; s += run)
      for (Index h = 0; h < heads_; ++h) {
        const Index count = std::min(run, now.count - s);
        const Rows<const E> rows = values_of(now, h, s);
        if constexpr (Stored<E>::kVectors == 1)
          if (R_ <= kOnce) {
            weigh(h, s, count, rows, for_keys);
            continue;
          }
        const Rows<const T> wide = widened(rows, count, wide_);
        if (run == kLanes) {
          weigh(h, s, count, wide, for_keys);
          continue;
        }
        for_keys.step();
        product(R_, V_, count, scores_ + s, tile_, 1, wide.start, wide.stride, part_.out, V_, true);
      }
  }

  // `visit` with products of integers. Rows whose weights are not finite or negative become NaN, so that
  // `run` computes them exactly.
  void visit_by_integers(Tile now, Tile then) {
    const auto loads = [](Index size) { return up(size, 64) / 64; };
    const Index width = up(now.count, kLanes), passes = times(R_, kRowsOfWeights<E>);
    Ahead for_values(now.values, heads_, now.count,
                     heads_ * width / 4 * loads(call_.keys.size) * times(R_, kRowsOfQueries));
    for (Index s = 0; s < width; s += kLanes)
      for (Index h = 0; h < heads_; ++h)
        multiply_integers<kRowsOfQueries>(
            R_, digits_, h * R_, keys_of(now, h, s), std::min<Index>(kLanes, now.count - s),
            scores_ + h * R_ * tile_ + s, tile_, for_values);
    for (Index r = 0; r < heads_ * R_; ++r) soften(r, now, true);
    Ahead for_keys(then.keys, heads_, then.count,
                   heads_ * width / 4 * loads(call_.values.size) * passes);
    weights_.size = width;
    for (Index h = 0; h < heads_; ++h) {
      T* out = part_.out + h * R_ * V_;
      bool written = true;
      for (Index r = 0; r < R_ && written; ++r)
        written = weights_.write(r, scores_ + (h * R_ + r) * tile_);
      if (written)
        weigh_integers<kRowsOfWeights<E>>(R_, weights_, 0, values_of(now, h, 0),
                                          now.count, out, V_, for_keys);
      else
        std::fill(out, out + R_ * V_, std::numeric_limits<T>::quiet_NaN());
    }
  }

  // q k for few rows: keys are not transposed.
  void multiply(Tile now, Ahead& ahead) {
    for (Index s = 0; s < now.count; s += kLanes)
      for (Index h = 0; h < heads_; ++h) {
        const Rows<const E> rows = keys_of(now, h, s);
        T* scores = scores_ + h * R_ * tile_ + s;
        if (R_ <= kOnce)
          multiply_rows<4>(R_, q_ + h * R_ * H_, rows, scores, tile_, ahead);
        else
          multiply_rows<4>(R_, q_ + h * R_ * H_, widened(rows, kLanes, wide_), scores, tile_, ahead);
      }
  }

  void multiply_turned(Tile now, Ahead& ahead) {
    for (Index s = 0; s < now.count; s += kTurned)
      for (Index h = 0; h < heads_; ++h) {
        ahead.step();
        const Index count = std::min(kTurned, now.count - s), width = up(count, kLanes);
        const Rows<const E> rows = keys_of(now, h, s);
        transpose(widened(rows, count, wide_), count, width, transposed_, T{1});
        product(R_, width, H_, q_ + h * R_ * H_, H_, 1, transposed_, width,
                scores_ + h * R_ * tile_ + s, tile_, false);
      }
  }

  // Weights times values for keys s .. s + count - 1 of the tile.
  template <typename A>
  void weigh(Index h, Index s, Index count, Rows<const A> values, Ahead& ahead) {
    product<4>(R_, V_, count, scores_ + h * R_ * tile_ + s, tile_, 1, values.start, values.stride,
               part_.out + h * R_ * V_, V_, true, ahead);
  }

  // Softmax and weighted sums with copies of values, in whole vectors, made finite if `exact_`.
  void weigh_copies(Tile now) {
    Ahead nothing(Rows<const T>{nullptr, 0, 0}, 0, 0, 1);
    for (Index h = 0; h < heads_; ++h) {
      for (Index s = 0; s < now.count; s += kLanes) {
        const Index count = std::min<Index>(kLanes, now.count - s);
        const Rows<const E> rows = values_of(now, h, s);
        copy(widened(rows, count, wide_), count, values_ + s * V_, V_);
      }
      const float* scales = call_.values.scales_at(b_, k_ + h, now.j);
      for (Index s = 0; scales && s < now.count; ++s)
        scale(values_ + s * V_, V_, scales[s] * Stored<E>::kFactor);
      std::fill(nonfinite_, nonfinite_ + now.count, T{0});
      if (exact_) zero_nonfinite(values_, now.count, V_, nonfinite_);
      if (down_ != 1) scale(values_, now.count * V_, down_);
      for (Index r = h * R_; r < (h + 1) * R_; ++r) {
        for (Index s = 0; s < now.count; ++s) scores_[r * tile_ + s] += nonfinite_[s];
        soften(r, now, false);
      }
      for (Index s = 0; s < now.count; s += kLanes)
        weigh(h, s, std::min<Index>(kLanes, now.count - s),
              Rows<const T>{values_ + s * V_, V_, V_}, nothing);
    }
  }

  // Replaces products of one row by weights; with `scaled`, by weights times the scales of values.
  void soften(Index r, Tile run, bool scaled) {
    const Index j = run.j, keys = run.count, width = up(keys, kLanes);
    T* scores = scores_ + r * tile_;
    const Index n = head(r), first = token(r) * call_.S + j;
    scale_all(scores, call_.keys, r, run);
    std::fill(scores + keys, scores + width, -kInfinity);
    if (call_.bias.start) {
      const T* bias = call_.bias.at(b_, n) + first;
      Index s = 0;
      for (; s + kLanes <= keys; s += kLanes) store(scores + s, load(scores + s) + load(bias + s));
      for (; s < keys; ++s) scores[s] += bias[s];
    }
    if (call_.allowed.start) {
      const uint8_t* allowed = call_.allowed.at(b_, n) + first;
      Index s = 0;
      for (; s + kLanes <= keys; s += kLanes) {
        const Ints yes = __builtin_convertvector(load<Bytes>(allowed + s), Ints) != 0;
        store(scores + s, yes ? load(scores + s) : all(-kInfinity));
      }
      for (; s < keys; ++s) scores[s] = allowed[s] ? scores[s] : -kInfinity;
    }
    Vector most = all(part_.most[r]);
    for (Index s = 0; s < width; s += kLanes) {
      const Vector x = load(scores + s);
      most = x > most ? x : most;
    }
    T now = most[0];
    for (int l = 1; l < kLanes; ++l) now = most[l] > now ? most[l] : now;
    const T shift = now == -kInfinity ? T{0} : now;
    Vector total = {};
    for (Index s = 0; s < width; s += kLanes) {
      const Vector weights = exponential(load(scores + s) - shift);
      total += weights;
      store(scores + s, weights);
    }
    const T factor = std::exp(part_.most[r] - shift);
    if (now != part_.most[r])
      for (Index h = 0; h < V_; ++h) part_.out[r * V_ + h] *= factor;
    part_.sum[r] *= factor;
    for (int l = 0; l < kLanes; ++l) part_.sum[r] += total[l];
    part_.most[r] = now;
    if (scaled) scale_all(scores, call_.values, r, run);
  }

  // Multiplies a number for each key by the scales of the keys or values.
  void scale_all(T* numbers, const Pages<E>& pages, Index r, Tile run) const {
    const float* scales = pages.scales_at(b_, k_ + r / R_, run.j);
    if (!scales) return;
    Index s = 0;
#if JATTN_SINGLE
    for (; s + kLanes <= run.count; s += kLanes)
      store(numbers + s, load(numbers + s) * (load(scales + s) * Stored<E>::kFactor));
#endif
    for (; s < run.count; ++s) numbers[s] *= scales[s] * Stored<E>::kFactor;
  }

  const Call<E>& call_;
  Index b_, k_, heads_, R_, H_, V_, tile_;
  Bench bench_;
  Part part_;
  bool exact_ = false, by_integers_ = false;
  T down_ = 1;
  T *q_, *scores_, *transposed_, *wide_, *values_, *nonfinite_;
  Digits digits_, weights_;  // of queries, and of the weights of a head
};

// Merges row r of all parts, using `sums [V]` as memory.
void merge(const std::vector<Part>& parts, Index r, Index V, T down, T* sums, Rows<T> out, T* most,
           T* log_sum) {
  T top = -kInfinity, sum = 0;
  for (const Part& part : parts) top = part.most[r] > top ? part.most[r] : top;
  const T shift = top == -kInfinity ? T{0} : top;
  for (const Part& part : parts) sum += part.sum[r] * std::exp(part.most[r] - shift);
  for (const T scale : {T{1}, down}) {
    std::fill(sums, sums + V, T{0});
    for (const Part& part : parts) {
      const T factor = std::exp(part.most[r] - shift) * (scale / *part.down);
      put_row(sums, part.out + r * V, V, factor, Put::kAdd);
    }
    put_row(out[0], sums, out.size, sum == 0 ? T{0} : 1 / (sum * scale), Put::kOver);
    if (all_finite(sums, V) || !std::isfinite(sum)) break;
  }
  *most = std::isnan(sum) ? sum : top;
  *log_sum = sum == 0 || std::isnan(sum) ? T{0} : std::log(sum);
}

template <typename E>
void decode(ffi::ThreadPool& pool, const Call<E>& call) {
  const Index threads = std::max<Index>(1, pool.num_threads());
  const Index R = call.group() * call.T_, H = call.H, V = up(call.V, kLanes);
  if (call.B * R == 0) return;
  // Heads that lie side by side are computed together.
  const bool together = call.keys.by_head < call.keys.by_token;
  const Index most = together ? kTogether / (R * std::max(H, V)) : 1;
  const Index heads = std::clamp<Index>(most, 1, call.K), runs = (call.K + heads - 1) / heads;
  const Index row = heads * call.keys.size * sizeof(E), units = call.B * runs;
  const Index turned = heads == 1 && R > kFewAlone ? kTurned : kLanes;
  const Index tile = std::min(kMostKeys, std::max<Index>(kTile / row / turned, 1) * turned);
  // There are enough parts for all threads to end together, and none of them is small.
  const Index wanted = (8 * threads + units - 1) / units;
  const Index length = up(std::max(kPart / row, (call.S + wanted - 1) / wanted), tile);
  const Index parts = (call.S + length - 1) / length, size = Part::size(heads * R, V);
  std::vector<T> memory(units * parts * size);
  const auto part = [&](Index i) { return Part(memory.data() + i * size, heads * R, V); };
  const T down = std::exp2(-std::ceil(std::log2(T(call.S))) - 1);
  parallel(pool, units * parts, [&](Index i) {
    const Index unit = i / parts, k = unit % runs * heads, from = i % parts * length;
    Reader<E>(call, unit / runs, k, std::min(heads, call.K - k), tile, part(i))
        .run(from, std::min(call.S, from + length), down);
  });
  parallel(pool, units, [&](Index unit) {
    const Index b = unit / runs, k = unit % runs * heads;
    std::vector<T> sums(V);
    std::vector<Part> own;
    for (Index i = 0; i < parts; ++i) own.push_back(part(unit * parts + i));
    for (Index r = 0; r < std::min(heads, call.K - k) * R; ++r) {
      const Index n = k * call.group() + r / call.T_, t = r % call.T_;
      const Index place = (b * call.T_ + t) * call.N + n, size = call.V;
      merge(own, r, V, down, sums.data(), {call.out + place * size, size, size},
            call.most + place, call.log_sum + place);
    }
  });
}

template <typename E>
Pages<E> pages(const Buffer& x, const Buffer& scales, const Buffer& table, Index B, bool by_token,
               Index read) {
  const Index P = axis(x, 4), size = axis(x, 1), M = axis(table, 1);
  const Index K = axis(x, by_token ? 2 : 3), page = axis(x, by_token ? 3 : 2);
  const bool found = table.element_count() > 0;
  return {static_cast<const E*>(x.untyped_data()),
          scales.element_count() ? static_cast<const float*>(scales.untyped_data()) : nullptr,
          found ? static_cast<const int32_t*>(table.untyped_data()) : nullptr,
          P, B / leading(x, 4), K, page, read, found ? M : 1,
          K * page * size, by_token ? size : page * size, by_token ? K * size : size};
}

ffi::Error run_decode(ffi::ThreadPool pool, Buffer q, Buffer keys, Buffer values, Buffer key_scales,
                      Buffer value_scales, Buffer table, Buffer allowed, Buffer bias, Out out,
                      Out most, Out log_sum, double scale, bool by_token) {
  const auto numbers = [](Out& x) { return static_cast<T*>(x->untyped_data()); };
  const auto run = [&](auto zero) {
    using E = decltype(zero);
    const Index B = leading(q, 3);
    const Pages<E> k = pages<E>(keys, key_scales, table, B, by_token, axis(keys, 1));
    const Index read = axis(*out, 1) / Stored<E>::kVectors;
    const Pages<E> v = pages<E>(values, value_scales, table, B, by_token, read);
    const Call<E> call{static_cast<const T*>(q.untyped_data()), k, v, {allowed, B, 2},
                       {bias, B, 2}, B, axis(q, 3), axis(q, 2), k.K, k.M * k.page, axis(q, 1),
                       v.size * Stored<E>::kVectors,
                       static_cast<T>(scale), numbers(out), numbers(most), numbers(log_sum)};
    decode(pool, call);
  };
  return reported([&] {
#if JATTN_SINGLE
    switch (keys.element_type()) {
      case ffi::BF16: return run(Bfloat16{});
      case ffi::S8: return run(Int8{});
      case ffi::F8E4M3FN: return run(Float8{});
      case ffi::U8: return run(Int4{});
      default: break;
    }
#endif
    run(T{});
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_decode, run_decode,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                                  .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                                  .Ret<Buffer>().Ret<Buffer>().Ret<Buffer>()
                                  .Attr<double>("scale").Attr<bool>("by_token"));
