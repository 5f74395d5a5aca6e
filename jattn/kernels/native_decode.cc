// A few queries against a cache, called from XLA: every key and value is read once, at several places
// of the memory in turn, which answers faster then than to one who reads on and on.
//
// A step of decoding does two operations for each number that it reads, so reading is all that
// counts. The rows of one key head, its group's heads × tokens, go together; a tile of keys is
// transposed on the way, so that lanes are keys and a row's maximum and sum are nearly free. Long
// caches are cut into parts, put together by their sums (Dao et al. 2023, Flash-Decoding). Tiles
// that nobody sees are not read.

#include "native.h"

namespace {

constexpr Index kKeys = 512;   // of a tile
constexpr Index kTurned = 64;  // keys that are transposed at a time
constexpr Index kFewRows = 6;  // for which sums across lanes are cheaper than transposing keys
constexpr Index kStreams = 8;  // places of a tile that are read in turn: memory is faster at several

// One vector of the lanes' sums of each of `kLanes` vectors: halves of pairs are added at each step.
template <int s, int... l>
inline Vector add_lanes(Vector* x, std::integer_sequence<int, l...> lanes) {
  constexpr Ints low = {(l & s ? kLanes + l - s : l)...};
  constexpr Ints high = {(l & s ? kLanes + l : l + s)...};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2 * s)
    x[i] = choose(x[i], x[i + s], low) + choose(x[i], x[i + s], high);
  if constexpr (2 * s < kLanes) return add_lanes<2 * s>(x, lanes);
  return x[0];
}

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

// Keys and values [P, K, page, size], found by a table [B, M].
struct Pages {
  const T* start;
  const int32_t* table;
  Index pages, K, page, size, M;

  // Token j of row b and those after it in its page; nothing where the row has no such page.
  Rows<const T> at(Index b, Index k, Index j) const {
    const Index p = table[b * M + j / page];
    if (p < 0 || p >= pages) return {nullptr, size, size};
    return {start + ((p * K + k) * page + j % page) * size, size, size};
  }
};

// An operand [b, n, T, S] whose first two axes may be 1.
template <typename E>
struct Scores {
  const E* start;  // null: there is none
  Index B, N, T_, S;

  const E* at(Index b, Index n, Index t) const {
    return start + (((B > 1 ? b : 0) * N + (N > 1 ? n : 0)) * T_ + t) * S;
  }
};

struct Call {
  const T* q;  // [B, T, N, H]
  Pages keys, values;
  Scores<uint8_t> allowed;
  Scores<T> bias;
  Index B, T_, N, K, S;
  T scale;
};

// What some keys contribute to the R = G × T rows of a key head.
struct Part {
  T *most, *sum, *out;  // [R], [R], [R, V]

  static Index size(Index R, Index V) { return R * (V + 2); }
  Part(T* memory, Index R) : most(memory), sum(memory + R), out(memory + 2 * R) {}
};

class Walk {
 public:
  Walk(const Call& call, Index b, Index k, Part part)
      : call_(call),
        b_(b),
        k_(k),
        group_(call.N / call.K),
        R_(group_ * call.T_),
        H_(call.keys.size),
        V_(up(call.values.size, kLanes)),
        bench_(R_ * (H_ + kKeys) + kTurned * H_ + kKeys * V_),
        part_(part) {
    q_ = bench_.take(R_ * H_), scores_ = bench_.take(R_ * kKeys);
    turned_ = bench_.take(H_ * kTurned), values_ = bench_.take(kKeys * V_);
    for (Index r = 0; r < R_; ++r) {
      const T* from = call.q + ((b * call.T_ + r % call.T_) * call.N + head(r)) * H_;
      for (Index h = 0; h < H_; ++h) q_[r * H_ + h] = from[h] * call.scale;
    }
    std::fill(part.most, part.most + R_, -kInfinity);
    std::fill(part.sum, part.sum + R_, T{0});
    std::fill(part.out, part.out + R_ * V_, T{0});
  }

  void run(Index from, Index until) {
    for (Index j = from; j < until;) {
      const Index in_page = call_.keys.page - j % call_.keys.page;
      const Index keys = std::min({kKeys, until - j, in_page});
      if (seen(j, keys)) visit(j, keys);
      j += keys;
    }
  }

 private:
  Index head(Index r) const { return k_ * group_ + r / call_.T_; }

  bool seen(Index j, Index keys) const {
    if (!call_.keys.at(b_, k_, j).start) return false;
    if (!call_.allowed.start) return true;
    for (Index r = 0; r < (call_.allowed.N > 1 ? R_ : call_.T_); ++r)
      if (std::memchr(call_.allowed.at(b_, head(r), r % call_.T_) + j, 1, keys)) return true;
    return false;
  }

  void visit(Index j, Index keys) {
    const Rows<const T> rows = call_.keys.at(b_, k_, j);
    const Index width = up(keys, kLanes);
    if (R_ <= kFewRows && H_ % kLanes == 0 && keys % kLanes == 0) {
      multiply(rows, keys);
    } else {
      for (Index s = 0; s < keys; s += kTurned) {
        const Index here = std::min(kTurned, keys - s), wide = up(here, kLanes);
        turn(rows.from(s), here, wide, turned_, T{1});
        product(R_, wide, H_, q_, H_, 1, turned_, wide, scores_ + s, kKeys, false);
      }
    }
    for (Index r = 0; r < R_; ++r) soften(r, j, keys, width);
    weigh(call_.values.at(b_, k_, j), keys);
  }

  // In how many equal runs a tile is read side by side.
  static Index streams(Index keys) {
    Index n = kStreams;
    while (keys % (n * kLanes)) n /= 2;
    return n;
  }

  // q k for few rows: keys as they lie.
  void multiply(Rows<const T> rows, Index keys) {
    constexpr auto lanes = std::make_integer_sequence<int, kLanes>();
    const Index n = streams(keys), run = keys / n;
    for (Index j = 0; j < run; j += kLanes)
      for (Index r = 0; r < R_; ++r) {
        Vector sums[kStreams][kLanes];
        for (Index s = 0; s < kLanes; ++s)
          for (Index i = 0; i < n; ++i) {
            const T* row = rows[i * run + j + s];
            sums[i][s] = load(row) * load(q_ + r * H_);
            for (Index h = kLanes; h < H_; h += kLanes)
              sums[i][s] += load(row + h) * load(q_ + r * H_ + h);
          }
        for (Index i = 0; i < n; ++i)
          store(scores_ + r * kKeys + i * run + j, add_lanes<1>(sums[i], lanes));
      }
  }

  void weigh(Rows<const T> rows, Index keys) {
    const bool straight = rows.size == V_;
    if (!straight) copy(rows, keys, values_, V_);
    if (R_ > kFewRows || !straight || keys % kLanes) {
      const T* values = straight ? rows.start : values_;
      product(R_, V_, keys, scores_, kKeys, 1, values, V_, part_.out, V_, true);
      return;
    }
    const Index n = streams(keys), run = keys / n;
    for (Index j = 0; j < run; ++j)
      product(R_, V_, n, scores_ + j, kKeys, run, rows[j], run * V_, part_.out, V_, true);
  }

  // Products of one row become weights.
  void soften(Index r, Index j, Index keys, Index width) {
    T* scores = scores_ + r * kKeys;
    const Index n = head(r), t = r % call_.T_;
    std::fill(scores + keys, scores + width, -kInfinity);
    if (call_.bias.start) {
      const T* bias = call_.bias.at(b_, n, t) + j;
      Index s = 0;
      for (; s + kLanes <= keys; s += kLanes) store(scores + s, load(scores + s) + load(bias + s));
      for (; s < keys; ++s) scores[s] += bias[s];
    }
    if (call_.allowed.start) {
      const uint8_t* allowed = call_.allowed.at(b_, n, t) + j;
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
  }

  const Call& call_;
  Index b_, k_, group_, R_, H_, V_;
  Bench bench_;
  Part part_;
  T *q_, *scores_, *turned_, *values_;
};

// Row r of all parts as one: out and lse.
void merge(const std::vector<Part>& parts, Index r, Index V, Rows<T> out, T* lse) {
  T most = -kInfinity, sum = 0;
  for (const Part& part : parts) most = part.most[r] > most ? part.most[r] : most;
  const T shift = most == -kInfinity ? T{0} : most;
  std::fill(out[0], out[0] + out.size, T{0});
  for (const Part& part : parts) {
    const T factor = std::exp(part.most[r] - shift);
    sum += part.sum[r] * factor;
    put_row(out[0], part.out + r * V, out.size, factor, Put::kAdd);
  }
  const T share = sum == 0 ? T{0} : 1 / sum;
  for (Index h = 0; h < out.size; ++h) out[0][h] *= share;
  *lse = sum == 0 ? -kInfinity : shift + std::log(sum);
}

void decode(ffi::ThreadPool& pool, const Call& call, T* out, T* lse) {
  const Index units = call.B * call.K, threads = std::max<Index>(1, pool.num_threads());
  const Index group = call.N / call.K, R = group * call.T_, V = up(call.values.size, kLanes);
  // Enough parts for all threads to end together, none of them small.
  const Index wanted = units % threads == 0 ? 1 : (4 * threads + units - 1) / units;
  const Index length = std::max(8 * kKeys, up((call.S + wanted - 1) / wanted, kKeys));
  const Index parts = (call.S + length - 1) / length;
  std::vector<T> memory(units * parts * Part::size(R, V));
  const auto part = [&](Index i) { return Part(memory.data() + i * Part::size(R, V), R); };
  parallel(pool, units * parts, [&](Index i) {
    const Index unit = i / parts, from = i % parts * length;
    Walk(call, unit / call.K, unit % call.K, part(i)).run(from, std::min(call.S, from + length));
  });
  for (Index unit = 0; unit < units; ++unit) {
    std::vector<Part> own;
    for (Index i = 0; i < parts; ++i) own.push_back(part(unit * parts + i));
    for (Index r = 0; r < R; ++r) {
      const Index b = unit / call.K, n = unit % call.K * group + r / call.T_, t = r % call.T_;
      const Index size = call.values.size;
      merge(own, r, V, {out + ((b * call.T_ + t) * call.N + n) * size, size, size},
            lse + (b * call.N + n) * call.T_ + t);
    }
  }
}

using Buffer = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

Pages pages(const Buffer& x, const Buffer& table) {
  const auto size = x.dimensions(), held = table.dimensions();
  return {static_cast<const T*>(x.untyped_data()),
          static_cast<const int32_t*>(table.untyped_data()),
          size[0], size[1], size[2], size[3], held[1]};
}

template <typename E>
Scores<E> scores(const Buffer& x) {
  const auto size = x.dimensions();
  const E* start = x.element_count() ? static_cast<const E*>(x.untyped_data()) : nullptr;
  return {start, size[0], size[1], size[2], size[3]};
}

ffi::Error run_decode(ffi::ThreadPool pool, Buffer q, Buffer keys, Buffer values, Buffer table,
                      Buffer allowed, Buffer bias, Out out, Out lse, double scale) {
  const auto size = q.dimensions();
  const Pages k = pages(keys, table), v = pages(values, table);
  const Call call{static_cast<const T*>(q.untyped_data()), k, v, scores<uint8_t>(allowed),
                  scores<T>(bias), size[0], size[1], size[2], k.K, k.M * k.page,
                  static_cast<T>(scale)};
  T *to = static_cast<T*>(out->untyped_data()), *sums = static_cast<T*>(lse->untyped_data());
  return reported([&] { decode(pool, call, to, sums); });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_decode, run_decode,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                                  .Arg<Buffer>().Arg<Buffer>().Ret<Buffer>().Ret<Buffer>()
                                  .Attr<double>("scale"));
