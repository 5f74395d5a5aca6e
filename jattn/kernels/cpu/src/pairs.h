// Products of attention in bfloat16 with sums in float32, by the matrix units of AMX or by the dot
// products of AVX512-BF16. Both take pairs of numbers that are consecutive along the axis of the sum,
// so one operand of each product is rows of bfloat16 and the other rows of pairs.
//
// If only the output is needed, weights are rounded to bfloat16, as in FlashAttention (Dao et al.
// 2022). For gradients each weight is two numbers of bfloat16, the rounded weight and the remainder,
// and so are the cotangents of scores, whose sums cancel.

#pragma once

#include "native.h"

#if JATTN_SINGLE && defined(__AVX512BF16__)
#define JATTN_PAIRS 1
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define JATTN_MATRICES 1
#endif
#endif

#if JATTN_PAIRS

namespace {

constexpr Index kDepth = 32;  // the length of a sum is a multiple of this

// --- Rows of bfloat16, and of pairs -------------------------------------------------------------

inline __mmask32 first_halves(Index count) { return count >= 32 ? ~0u : (1u << count) - 1; }

// Copies rows, padding them with 0; returns whether all numbers are finite.
inline bool copy(Rows<const Bfloat16> from, Index count, Bfloat16* to, Index width) {
  const __m512i exponent = _mm512_set1_epi16(0x7F80);
  __mmask32 bad = 0;
  for (Index i = 0; i < count; ++i, to += width)
    for (Index h = 0; h < width; h += 32) {
      const __mmask32 some = first_halves(std::max<Index>(0, from.size - h));
      const __m512i x = _mm512_maskz_loadu_epi16(some, from[i] + h);
      bad |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent);
      _mm512_storeu_si512(to + h, x);
    }
  return !bad;
}

// Rounds to bfloat16; the remainder.
inline __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
inline __m512 rest_of(__m512 x, __m256i rounded) {
  return _mm512_sub_ps(x, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
}

// Rounds the first `size` numbers of each row of T to bfloat16, padding them with 0 to `width`, and
// writes the remainders to `rest`, if given.
inline void narrow(const T* from, Index stride, Index count, Index size, Bfloat16* to, Index width,
                   Bfloat16* rest = nullptr) {
  for (Index i = 0; i < count; ++i, from += stride)
    for (Index h = 0; h < width; h += kLanes) {
      const Index left = std::clamp<Index>(size - h, 0, kLanes), here = i * width + h;
      const __m512 x = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << left) - 1), from + h);
      const __m256i rounded = narrowed(x);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + here), rounded);
      if (rest)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(rest + here), narrowed(rest_of(x, rounded)));
    }
}

// Interleaves two rows of bfloat16, one after the other, as one row of pairs.
inline __m512i interleaved(__m512i both) {
  alignas(64) static constexpr uint16_t kTurns[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kTurns), both);
}
inline __m512i paired(__m512 x, __m512 y) { return interleaved((__m512i)_mm512_cvtne2ps_pbh(y, x)); }
inline void store_pairs(__m256i x, __m256i y, Pair* to) {
  _mm512_storeu_si512(to, interleaved(_mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1)));
}

// Writes rows [count, width] as pairs [rows / 2, width], padded with 0, and remainders to `rest`.
inline void pair_rows(const T* from, Index count, Index width, Pair* to, Index rows,
                      Pair* rest = nullptr) {
  for (Index i = 0; i < rows; i += 2)
    for (Index h = 0; h < width; h += kLanes) {
      const T* here = from + i * width + h;
      const Index at = i / 2 * width + h;
      const __m512 x = i < count ? _mm512_loadu_ps(here) : __m512{};
      const __m512 y = i + 1 < count ? _mm512_loadu_ps(here + width) : __m512{};
      const __m256i low = narrowed(x), high = narrowed(y);
      store_pairs(low, high, to + at);
      if (rest) store_pairs(narrowed(rest_of(x, low)), narrowed(rest_of(y, high)), rest + at);
    }
}
inline void pair_rows(const Bfloat16* from, Index count, Index width, Pair* to, Index rows) {
  for (Index i = 0; i < rows; i += 2, to += width)
    for (Index h = 0; h < width; h += kLanes) {
      const Bfloat16* here = from + i * width + h;
      const __m256i x = i < count ? load<__m256i>(here) : __m256i{};
      const __m256i y = i + 1 < count ? load<__m256i>(here + width) : __m256i{};
      store_pairs(x, y, to + h);
    }
}

// Transposes rows [count, width] of bfloat16, as rows of pairs, to [width / 2, t].
inline void turn_pairs(const Bfloat16* from, Index count, Index width, Index t, Pair* to) {
  const Rows<const Pair> rows{reinterpret_cast<const Pair*>(from), width / 2, width / 2};
  transpose(rows, count, t, reinterpret_cast<T*>(to), T{1});
}

// --- Products -----------------------------------------------------------------------------------

#if JATTN_MATRICES

// Whether Linux lets this process use matrix units, which it must request.
inline bool has_matrix_units() {
  constexpr int kAsk = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
  return granted;
}

constexpr Index kSide = 16;  // rows and columns of a tile of sums

// c [16 M, 16 N] (+)= a b. Tiles 0 to 3 are sums, 4 and 5 rows of a, 6 and 7 pairs of b.
template <int M, int N>
inline void matrices(Index depth, const Bfloat16* a, Index am, const Pair* b, Index bk, T* c,
                     Index cm, bool add) {
  const Index a_bytes = am * 2, b_bytes = bk * 4, c_bytes = cm * 4;
  T* below = c + kSide * cm;
  if (add) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (N == 2) _tile_loadd(1, c + kSide, c_bytes);
    if constexpr (M == 2) _tile_loadd(2, below, c_bytes);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, below + kSide, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (Index k = 0; k < depth; k += kDepth, a += kDepth, b += kDepth / 2 * bk) {
    _tile_loadd(6, b, b_bytes);
    if constexpr (N == 2) _tile_loadd(7, b + kSide, b_bytes);
    _tile_loadd(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) _tile_dpbf16ps(1, 4, 7);
    if constexpr (M == 2) {
      _tile_loadd(5, a + kSide * am, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (N == 2) _tile_stored(1, c + kSide, c_bytes);
  if constexpr (M == 2) _tile_stored(2, below, c_bytes);
  if constexpr (M == 2 && N == 2) _tile_stored(3, below + kSide, c_bytes);
}

// The product of fewer rows than a tile has.
inline void few_rows(Index rows, Index depth, const Bfloat16* a, Index am, const Pair* b, Index bk,
                     T* c, Index cm, bool add) {
  alignas(64) T sums[kSide * kSide];
  matrices<1, 1>(depth, a, am, b, bk, sums, kSide, false);
  for (Index i = 0; i < rows; ++i) {
    const Vector x = load(sums + i * kSide);
    store(c + i * cm, add ? load(c + i * cm) + x : x);
  }
}

template <int N>
inline void matrix_columns(Index rows, Index depth, const Bfloat16* a, Index am, const Pair* b,
                           Index bk, T* c, Index cm, bool add) {
  for (; rows >= 2 * kSide; rows -= 2 * kSide, a += 2 * kSide * am, c += 2 * kSide * cm)
    matrices<2, N>(depth, a, am, b, bk, c, cm, add);
  if (rows >= kSide) {
    matrices<1, N>(depth, a, am, b, bk, c, cm, add);
    rows -= kSide, a += kSide * am, c += kSide * cm;
  }
  for (int n = 0; rows && n < N; ++n)
    few_rows(rows, depth, a, am, b + n * kSide, bk, c + n * kSide, cm, add);
}

inline void matrix_product(Index rows, Index columns, Index depth, const Bfloat16* a, Index am,
                           const Pair* b, Index bk, T* c, Index cm, bool add) {
  asm volatile("" ::: "memory");  // the compiler does not know that tiles are loaded
  Index left = columns;
  for (; left >= 2 * kSide; left -= 2 * kSide, b += 2 * kSide, c += 2 * kSide)
    matrix_columns<2>(rows, depth, a, am, b, bk, c, cm, add);
  if (left) matrix_columns<1>(rows, depth, a, am, b, bk, c, cm, add);
}

#else
inline bool has_matrix_units() { return false; }
inline void matrix_product(Index, Index, Index, const Bfloat16*, Index, const Pair*, Index, T*, Index,
                           bool) {}
#endif

// The steps of `small_product` of pairs.
template <>
struct Factors<Bfloat16> {
  static __m512bh row(const Pair* b) { return (__m512bh)load<Words>(b); }
  static __m512bh number(const Bfloat16* a) {
    return (__m512bh)_mm512_set1_epi32(load<int32_t>(a));
  }
  static Vector add(Vector sum, __m512bh x, __m512bh row) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, x, row);
  }
};

// c [rows, columns] (+)= a [rows, depth] b [depth / 2, columns]: a rows of bfloat16, `am` apart, b of
// pairs, `bk` apart; columns are whole vectors, depth is whole kDepth. Rows of a are read 16 at a time.
JATTN_APART void pair_product(Index rows, Index columns, Index depth, const Bfloat16* a, Index am,
                              const Pair* b, Index bk, T* c, Index cm, bool add) {
  if (has_matrix_units()) return matrix_product(rows, columns, depth, a, am, b, bk, c, cm, add);
  product(rows, columns, depth / 2, a, am, 2, b, bk, c, cm, add);
}

// --- Tiles and blocks, with the interface of `Wide` ---------------------------------------------

struct Pairs {
  static constexpr bool kScales = false;
  static constexpr Index kFewestLanes = kDepth;  // products over queries have whole depths
  static Index room(Index keys) { return up(keys, kDepth) / 2 * 3; }

  // Pairs of weights overwrite scores that have been read. If they are to be `exact`, pairs of their
  // remainders follow them.
  static constexpr int kKeys = 2;
  static constexpr bool kRounds = true;
  static Index rows(Index keys) { return up(keys, kDepth); }
  static void put_weights(const Vector* weights, T* scores, Index s, Index keys, Index t, bool exact) {
    const __m512 x = (__m512)weights[0], y = (__m512)weights[1];
    const __m512i pairs = paired(x, y);
    Pair* to = reinterpret_cast<Pair*>(scores) + s / 2 * t;
    _mm512_storeu_si512(to, pairs);
    if (!exact) return;
    const __m512 first = (__m512)_mm512_slli_epi32(pairs, 16);
    const __m512 second = (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(0xFFFF0000));
    _mm512_storeu_si512(to + rows(keys) * t, paired(x - first, y - second));
  }

  // The configuration of a thread's matrix units while it uses them.
  struct Session {
#if JATTN_MATRICES
    Session() {
      struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      } shape;
      if (has_matrix_units()) _tile_loadconfig(&shape);
    }
    ~Session() {
      if (has_matrix_units()) _tile_release();
    }
    Session(const Session&) = delete;
#endif
  };

  struct Tile {
    Index H, V;            // whole kDepth
    Index stride;          // of rows of `transposed`
    Bfloat16 *k, *v;       // [keys, H], [keys, V]
    Bfloat16* transposed;  // [H, keys] of keys in the backward pass, else [V, keys] of values; finite
    T down = 1;
    const T* nonfinite = nullptr;

    static Index size(Index H, Index V, Index keys) {
      return (keys + 2 * kDepth) * (3 * up(std::max(H, V), kDepth) + 1);
    }

    Tile(Index H, Index V, Index keys, bool backward, Bench& bench)
        : H(up(H, kDepth)), V(up(V, kDepth)), backward_(backward) {
      const Index rows = keys + kLanes, most = std::max(this->H, this->V);
      const Index places = most * (up(keys, kDepth) + kDepth);
      k = bench.take<Bfloat16>(rows * this->H), v = bench.take<Bfloat16>(rows * this->V);
      transposed = bench.take<Bfloat16>(places), pairs_ = bench.take<Pair>(places / 2);
      spare_ = bench.take<Bfloat16>(keys * this->H), memory_ = bench.take(keys);
    }

    void read(const Input& keys, const Input& values, Index count) {
      const Bfloat16* finite_k = k;
      if (!copy(keys.rows<Bfloat16>(), count, k, H) && backward_) {
        finite_k = std::copy(k, k + count * H, spare_) - count * H;
        zero_nonfinite(spare_, count, H, nullptr);
      }
      nonfinite = copy_finite(values.rows<Bfloat16>(), count, v, V, memory_);
      const Index width = backward_ ? H : V;
      stride = up(count, kDepth) + kDepth;  // a product may read kDepth zeros at the end
      pair_rows(backward_ ? finite_k : v, count, width, pairs_, stride);
      const Rows<const Pair> rows{pairs_, width, width};
      transpose(rows, stride / 2, stride / 2, reinterpret_cast<T*>(transposed), T{1});
    }

   private:
    bool backward_;
    Pair* pairs_;
    Bfloat16* spare_;
    T* memory_;
  };

  struct Forward {
    T* out;

    static Index size(Index width, Index H, Index V) {
      return width * (up(H, kDepth) + 2 * V);
    }

    Forward(const Input& q, Index count, Index width, Index H, Index V, T, Bench& bench)
        : t_(width), H_(up(H, kDepth)), V_(V) {
      auto* rows = bench.take<Bfloat16>(t_ * H_);
      q_ = bench.take<Pair>(H_ / 2 * t_), sums_ = bench.take(V * t_), out = bench.take(t_ * V);
      copy(q.rows<Bfloat16>(), count, rows, H_);
      turn_pairs(rows, count, H_, t_, q_);
    }

    void scores(const Tile& tile, Index at, Index keys, Lanes lanes, T* to) const {
      const Pair* q = q_ + lanes.first;
      pair_product(keys, lanes.size, H_, tile.k + at * H_, H_, q, t_, to, lanes.size, false);
    }
    void clear() { std::fill(sums_, sums_ + V_ * t_, T{0}); }
    // `weights` as written by `put_weights`.
    void add(const Tile& tile, Index at, Index keys, Lanes lanes, const T* weights, bool fresh,
             bool exact) {
      const Index depth = rows(keys), t = lanes.size;
      const Pair* pairs = reinterpret_cast<const Pair*>(weights);
      const Bfloat16* v = tile.transposed + at;
      T* sums = sums_ + lanes.first;
      pair_product(V_, t, depth, v, tile.stride, pairs, t, sums, t_, !fresh);
      if (exact) pair_product(V_, t, depth, v, tile.stride, pairs + depth * t, t, sums, t_, true);
    }
    void rescale(Lanes lanes, const T* factors) {
      for (Index h = 0; h < V_; ++h)
        for (Index i = lanes.first; i < lanes.end(); i += kLanes)
          store(sums_ + h * t_ + i, load(sums_ + h * t_ + i) * load(factors + i));
    }
    void settle() { transpose(Rows<const T>{sums_, t_, t_}, V_, V_, out, T{1}); }

   private:
    Index t_, H_, V_;
    Pair* q_;   // [H / 2, width]
    T* sums_;   // out transposed, [V, width]
  };

  struct Backward {
    T* d_query;

    static Index size(Index width, Index keys, Index H, Index V) {
      H = up(H, kDepth), V = up(V, kDepth), width = up(width, kDepth), keys = up(keys, kDepth);
      return width * (4 * H + 2 * V) + 3 * (keys + kLanes) * width;
    }

    Backward(Index width, Index keys, Index H, Index V, Bench& bench)
        : t_(width), rows_(up(width, kDepth)), own_H_(H), own_V_(V), H_(up(H, kDepth)),
          V_(up(V, kDepth)) {
      q_rows_ = bench.take<Bfloat16>(rows_ * H_), d_rows_ = bench.take<Bfloat16>(rows_ * V_);
      q_ = bench.take<Pair>(H_ / 2 * t_), d_out_ = bench.take<Pair>(V_ / 2 * t_);
      q_pairs_ = bench.take<Pair>(rows_ / 2 * H_), d_pairs_ = bench.take<Pair>(rows_ / 2 * V_);
      sums_ = bench.take(H * t_), d_query = bench.take(t_ * H);
      const Index some = up(keys, kDepth) + kLanes;
      left_ = bench.take<Bfloat16>(some * rows_), left_rest_ = bench.take<Bfloat16>(some * rows_);
      pairs_ = bench.take<Pair>(some / 2 * t_), pairs_rest_ = bench.take<Pair>(some / 2 * t_);
    }

    void read(const Input& q, Rows<const T> d_out, Index count, T) {
      count_ = count;
      const bool finite = copy(q.rows<Bfloat16>(), count, q_rows_, H_);
      turn_pairs(q_rows_, count, H_, t_, q_);
      if (!finite) zero_nonfinite(q_rows_, count, H_, nullptr);
      pair_rows(q_rows_, count, H_, q_pairs_, rows_);
      narrow(d_out.start, d_out.stride, count, d_out.size, d_rows_, V_);
      turn_pairs(d_rows_, count, V_, t_, d_out_);
      pair_rows(d_rows_, count, V_, d_pairs_, rows_);
      std::fill(sums_, sums_ + own_H_ * t_, T{0});
    }

    void products(const Tile& tile, Index at, Index keys, Lanes lanes, T* scores,
                  T* d_weights) const {
      const Pair *q = q_ + lanes.first, *d_out = d_out_ + lanes.first;
      const Index t = lanes.size;
      pair_product(keys, t, H_, tile.k + at * H_, H_, q, t_, scores, t, false);
      pair_product(keys, t, V_, tile.v + at * V_, V_, d_out, t_, d_weights, t, false);
    }
    void add_to_keys(Index keys, Lanes lanes, const T* weights, const T* d_scores, T* d_k, T* d_v) {
      const Index row = lanes.first / 2;
      add_to_keys(keys, lanes, weights, d_pairs_ + row * V_, V_, d_v, own_V_);
      add_to_keys(keys, lanes, d_scores, q_pairs_ + row * H_, H_, d_k, own_H_);
    }
    void add_to_queries(const Tile& tile, Index at, Index keys, Lanes lanes, const T* d_scores) {
      const Index depth = up(keys, kDepth), t = lanes.size;
      const Bfloat16* k = tile.transposed + at;
      pair_rows(d_scores, keys, t, pairs_, depth, pairs_rest_);
      for (const Pair* part : {pairs_, pairs_rest_})
        pair_product(own_H_, t, depth, k, tile.stride, part, t, sums_ + lanes.first, t_, true);
    }
    void settle() { transpose(Rows<const T>{sums_, t_, t_}, own_H_, own_H_, d_query, T{1}); }

   private:
    void add_to_keys(Index keys, Lanes lanes, const T* from, const Pair* pairs, Index stride, T* to,
                     Index size) {
      const Index count = std::min(count_, lanes.end()) - lanes.first, rows = up(lanes.size, kDepth);
      narrow(from, lanes.size, keys, count, left_, rows, left_rest_);
      for (const Bfloat16* part : {left_, left_rest_})
        pair_product(keys, size, rows, part, rows, pairs, stride, to, size, true);
    }

    Index t_, rows_, own_H_, own_V_, H_, V_, count_;
    Bfloat16 *q_rows_, *d_rows_;  // [rows, H], [rows, V]
    Pair *q_, *d_out_;            // [H / 2, width], [V / 2, width]
    Pair *q_pairs_, *d_pairs_;    // [rows / 2, H], [rows / 2, V]
    T* sums_;                     // d_query transposed
    Bfloat16 *left_, *left_rest_;  // [keys, rows]
    Pair *pairs_, *pairs_rest_;    // [keys / 2, width]
  };
};

}  // namespace

#endif
