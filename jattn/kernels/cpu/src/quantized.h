// The quantised numbers of caches, which have a scale for each token and head. They are converted to
// floats or, on processors with VNNI instructions, multiplied as integers.

#pragma once

#include "native.h"

#if JATTN_SINGLE && defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define JATTN_INTEGERS 1
#else
#define JATTN_INTEGERS 0
#endif

namespace {

// `kVectors`: the vectors of T that a load of `kLanes` elements gives, two for Int4.
// `kFactor`: what converted numbers are multiplied by, beside their scale.
// `kIntegers`: whether they can be multiplied as integers.
template <typename E>
struct Stored {
  static constexpr Index kVectors = 1;
  static constexpr T kFactor = 1;
  static constexpr bool kIntegers = false;
};

#if JATTN_SINGLE
// A byte of Int4 holds number h of a row of 2 n in its low and number n + h in its high half.
struct Int8 {
  int8_t bits;
};
struct Float8 {  // 4 bits of exponent and 3 of mantissa, finite
  int8_t bits;
};
struct Int4 {
  int8_t bits;
};
typedef int8_t Chars __attribute__((vector_size(kLanes)));
typedef int16_t SignedShorts __attribute__((vector_size(kLanes * 2)));

template <>
struct Stored<Int8> : Stored<T> {
  static constexpr bool kIntegers = JATTN_INTEGERS;
};
template <>
struct Stored<Float8> : Stored<T> {
  static constexpr T kFactor = 256;  // converted as float16, whose exponents are 8 greater
};
template <>
struct Stored<Int4> : Stored<Int8> {
  static constexpr Index kVectors = 2;
};

// GCC converts bytes to integers one by one, except by intrinsics or in two steps.
inline Ints integers(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(static_cast<const char*>(from)));
#else
  const Chars bytes = load<Chars>(static_cast<const char*>(from));
  return __builtin_convertvector(__builtin_convertvector(bytes, SignedShorts), Ints);
#endif
}
inline Vector widened(const Int8* from) { return __builtin_convertvector(integers(from), Vector); }
inline Vector widened(const Float8* from) {
  const SignedShorts bits = __builtin_convertvector(load<Chars>(from), SignedShorts);
  return widened((Shorts)((bits << 7) & ~0x4000), Float16{});
}
#endif

// Converts the numbers of a load; of Int4, those of the first and of the second half of a row.
template <typename E>
inline void widen(const E* from, Vector* to) {
  to[0] = widened(from);
}
#if JATTN_SINGLE
inline void widen(const Int4* from, Vector* to) {
  const Ints bits = integers(from);
  to[0] = __builtin_convertvector(bits << 28 >> 28, Vector);
  to[1] = __builtin_convertvector(bits >> 4, Vector);
}
#endif

// Rows widened to T, in `memory`.
template <typename E>
inline Rows<const T> widened(Rows<const E> from, Index count, T* memory) {
  constexpr Index n = Stored<E>::kVectors;
  const Index half = from.size, size = n * half;
  for (Index i = 0; i < count; ++i) {
    T* to = memory + i * size;
    Vector x[n];
    Index h = 0;
    for (; h + kLanes <= half; h += kLanes) {
      widen(from[i] + h, x);
      for (Index v = 0; v < n; ++v) store(to + v * half + h, x[v]);
    }
    if (h == half) continue;
    E some[kLanes] = {};
    std::memcpy(some, from[i] + h, (half - h) * sizeof(E));
    widen(some, x);
    for (Index v = 0; v < n; ++v) std::memcpy(to + v * half + h, x + v, (half - h) * sizeof(T));
  }
  return {memory, size, size};
}
inline Rows<const T> widened(Rows<const T> from, Index, T*) { return from; }

// --- Products by integers -----------------------------------------------------------------------

// Rows of floats as integers of 24 bits, relative to the greatest absolute value of the row: products
// err by up to 2^-25 of it for each stored number, far less than stored numbers by their rounding. An
// integer has three digits of base 256, which are unsigned for rows
// without negative numbers. A word is the same digit of four consecutive numbers, which a VNNI
// instruction multiplies by four stored numbers.
struct Digits {
  static constexpr Index kCount = 3;

  Index size = 0;         // the numbers of a row, in whole vectors
  Int* words = nullptr;   // [R, size / 16, kCount, 4]
  T* greatest = nullptr;  // [R]: the number that the integer `largest` stands for
  Int* sums = nullptr;    // [R, kCount]: the sums of signed digits; null if digits are unsigned

  void take(Bench& bench, Index R, Index numbers, bool is_signed) {
    size = numbers;
    words = bench.take<Int>(R * size / 4 * kCount), greatest = bench.take(R);
    sums = is_signed ? bench.take<Int>(R * kCount) : nullptr;
  }
  // Less than 127 (1 + 256 + 256^2) and 256^3 - 1, so that rounding does not exceed these.
  T largest() const { return sums ? 8355000 : 16770000; }
  // The words of numbers i .. i + 15, for i a multiple of 16: four words for each digit.
  Int* at(Index r, Index i) const { return words + (r * size + i) / 16 * (4 * kCount); }
  bool write(Index r, const T* x);
};

// scores[r, :] = q[r] · each of `count` keys, up to kLanes. M rows at a time, and then the others.
template <int M, typename E, typename Before>
void multiply_integers(Index rows, const Digits& q, Index r, Rows<const E> keys, Index count,
                       T* scores, Index stride, Before& before);

// out[r, :] += weights[r] · the values of `count` keys. M rows at a time, and then the others.
template <int M, typename E, typename Before>
void weigh_integers(Index rows, const Digits& weights, Index r, Rows<const E> values, Index count,
                    T* out, Index width, Before& before);

#if JATTN_INTEGERS

// Converts row r. Returns false if it has numbers that are not finite or close to overflow, negative
// ones where digits are unsigned, or signed ones of which many are small beside the greatest. If the
// greatest absolute value is a denormal number, integers are 0.
inline bool Digits::write(Index r, const T* x) {
  Ints bits = {};
  Vector most = {};
  for (Index i = 0; i < size; i += kLanes) {
    const Vector one = load(x + i), positive = one < 0.0f ? -one : one;
    bits |= (Ints)(one - one);
    if (!sums) bits |= one < 0.0f;
    most = positive > most ? positive : most;
  }
  const T top = greatest[r] = _mm512_reduce_max_ps((__m512)most);
  if (!is_zero(bits) || top > 1e37f) return false;
  const T inverse = top < std::numeric_limits<T>::min() ? T{0} : 1 / top;
  Ints small = {};
  for (Index i = 0; i < size; i += kLanes) {
    const Vector part = load(x + i) * inverse;
    small -= (part < 1 / 256.0f) & (part > -1 / 256.0f) & (part != 0.0f);
    __m512i left = _mm512_cvtps_epi32((__m512)(part * largest()));
    for (int d = 0; d < kCount; ++d) {
      const __m128i bytes = _mm512_cvtepi32_epi8(left);
      std::memcpy(at(r, i) + 4 * d, &bytes, sizeof(bytes));
      if (sums) left = _mm512_add_epi32(left, _mm512_set1_epi32(128));  // digits are -128 to 127
      left = _mm512_srai_epi32(left, 8);
    }
  }
  if (sums && 8 * _mm512_reduce_add_epi32((__m512i)small) > size) return false;
  for (int d = 0; sums && d < kCount; ++d) {
    Int& sum = sums[r * kCount + d] = 0;
    for (Index i = 0; i < size; i += 16)
      for (Index b = 0; b < 16; ++b) sum += reinterpret_cast<const int8_t*>(at(r, i) + 4 * d)[b];
  }
  return true;
}

// The products with row r, from those with each of its digits.
inline Vector joined(const __m512i* products, const Digits& digits, Index r) {
  const __m512 base = _mm512_set1_ps(256);
  __m512 sum = _mm512_cvtepi32_ps(products[2]);
  sum = _mm512_fmadd_ps(sum, base, _mm512_cvtepi32_ps(products[1]));
  sum = _mm512_fmadd_ps(sum, base, _mm512_cvtepi32_ps(products[0]));
  return (Vector)sum * (1 / digits.largest()) * digits.greatest[r];
}

// The first `size` bytes, and 0 after them.
template <typename E>
inline __m512i bytes(const E* from, Index size) {
  return _mm512_maskz_loadu_epi8(size < 64 ? (__mmask64{1} << size) - 1 : ~__mmask64{0}, from);
}

// Makes stored numbers unsigned by adding `raised_by` to them; of Int4, in both halves of a row.
constexpr Int raised_by(Int8) { return 128; }
constexpr Int raised_by(Int4) { return 8; }
inline void raise(__m512i x, __m512i* to, Int8) {
  to[0] = _mm512_xor_si512(x, _mm512_set1_epi8(-128));
}
inline void raise(__m512i x, __m512i* to, Int4) {
  x = _mm512_xor_si512(x, _mm512_set1_epi8(-120));
  to[0] = _mm512_and_si512(x, _mm512_set1_epi8(15));
  to[1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
}

// Adds four products of an unsigned and a signed byte to each lane. (For the intrinsic GCC 12 copies
// the sums to other registers and to memory.)
inline void add_products(__m512i& sums, __m512i bytes, __m512i signed_bytes) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(signed_bytes));
}

// Transposes a square of 4 × 4 quarters of vectors.
inline void turn_quarters(__m512i* x) {
  const __m512i a = _mm512_shuffle_i32x4(x[0], x[1], 0x44), b = _mm512_shuffle_i32x4(x[2], x[3], 0x44);
  const __m512i c = _mm512_shuffle_i32x4(x[0], x[1], 0xEE), d = _mm512_shuffle_i32x4(x[2], x[3], 0xEE);
  x[0] = _mm512_shuffle_i32x4(a, b, 0x88), x[1] = _mm512_shuffle_i32x4(a, b, 0xDD);
  x[2] = _mm512_shuffle_i32x4(c, d, 0x88), x[3] = _mm512_shuffle_i32x4(c, d, 0xDD);
}

// Transposes the quarters of four vectors of four words.
inline void turn_words(__m512i* x) {
  const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpacklo_epi32(x[2], x[3]);
  const __m512i c = _mm512_unpackhi_epi32(x[0], x[1]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi64(a, b), x[1] = _mm512_unpackhi_epi64(a, b);
  x[2] = _mm512_unpacklo_epi64(c, d), x[3] = _mm512_unpackhi_epi64(c, d);
}

// Keys are transposed so that each has a lane, and no sum goes across lanes.
template <int M, typename E, typename Before>
JATTN_APART void multiply_integers(Index rows, const Digits& q, Index r, Rows<const E> keys,
                                   Index count, T* scores, Index stride, Before& before) {
  constexpr Index n = Stored<E>::kVectors, D = Digits::kCount;
  for (; rows >= M; rows -= M, r += M, scores += M * stride) {
    __m512i sums[M][D];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
      for (int d = 0; d < D; ++d)
        sums[m][d] = _mm512_set1_epi32(-raised_by(E{}) * q.sums[(r + m) * D + d]);
    const Int* words[M][n];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (Index v = 0; v < n; ++v) words[m][v] = q.at(r + m, v * q.size / n);
    for (Index h = 0; h < keys.size; h += 64) {
      __m512i x[4][4];
#pragma GCC unroll 4
      for (Index i = 0; i < 4; ++i) {
        before.step();
#pragma GCC unroll 4
        for (Index j = 0; j < 4; ++j)
          x[i][j] = bytes(keys[std::min(4 * i + j, count - 1)] + h, keys.size - h);
        turn_words(x[i]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m512i square[4] = {x[0][j], x[1][j], x[2][j], x[3][j]};
        turn_quarters(square);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {  // square[i] has word 4 i + j of all keys
          if (h + 16 * i >= keys.size) break;
          __m512i stored[n];
          raise(square[i], stored, E{});
#pragma GCC unroll 4
          for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
            for (Index v = 0; v < n; ++v) {
              const Int* word = words[m][v] + (h / 16 + i) * 4 * D + j;
#pragma GCC unroll 3
              for (int d = 0; d < D; ++d)
                add_products(sums[m][d], stored[v], _mm512_set1_epi32(word[4 * d]));
            }
        }
      }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) store(scores + m * stride, joined(sums[m], q, r + m));
  }
  if constexpr (M > 1)
    if (rows) multiply_integers<M / 2>(rows, q, r, keys, count, scores, stride, before);
}

// Interleaves the bytes of four rows: lane l of result i has those of column 16 (l / 4) + 4 i + l % 4,
// for `kCount` results i from `kFirst` on.
template <int kFirst, int kCount>
inline void interleave(const __m512i* x, __m512i* to) {
  if constexpr (kFirst == 0) {
    const __m512i a = _mm512_unpacklo_epi8(x[0], x[1]), b = _mm512_unpacklo_epi8(x[2], x[3]);
    to[0] = _mm512_unpacklo_epi16(a, b), to[1] = _mm512_unpackhi_epi16(a, b);
  }
  if constexpr (kFirst + kCount == 4) {
    const __m512i a = _mm512_unpackhi_epi8(x[0], x[1]), b = _mm512_unpackhi_epi8(x[2], x[3]);
    to[kCount - 2] = _mm512_unpacklo_epi16(a, b), to[kCount - 1] = _mm512_unpackhi_epi16(a, b);
  }
}

// Stored numbers as signed bytes; of Int4, those of both halves.
inline void extend(__m512i x, __m512i* to, Int8) { to[0] = x; }
inline void extend(__m512i x, __m512i* to, Int4) {
  raise(x, to, Int4{});
  for (int v = 0; v < 2; ++v) to[v] = _mm512_sub_epi8(to[v], _mm512_set1_epi8(8));
}

// The weighted sums of 64 columns for M rows, in the order of `interleave`.
template <int M, int kFirst, int kCount, typename E, typename Before>
inline void sum_columns(const Digits& weights, Index r, Rows<const E> values, Index h, Index count,
                        __m512i (*sums)[Stored<E>::kVectors][4], Before& before) {
  constexpr Index n = Stored<E>::kVectors, D = Digits::kCount;
  __m512i products[M][n][kCount][D] = {};
  const Int* words[M];
  for (int m = 0; m < M; ++m) words[m] = weights.at(r + m, 0);
  for (Index s = 0; s < count; s += 16) {
#pragma GCC unroll 4
    for (Index w = 0; w < 4; ++w) {
      if constexpr (kFirst == 0) before.step();
      __m512i row[4], x[kCount], stored[kCount][n];
#pragma GCC unroll 4
      for (Index i = 0; i < 4; ++i)
        row[i] = bytes(values[std::min(s + 4 * w + i, count - 1)] + h, values.size - h);
      interleave<kFirst, kCount>(row, x);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) extend(x[i], stored[i], E{});
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 3
        for (int d = 0; d < D; ++d) {
          const __m512i word = _mm512_set1_epi32(words[m][4 * d + w]);
#pragma GCC unroll 2
          for (Index v = 0; v < n; ++v)
#pragma GCC unroll 4
            for (int i = 0; i < kCount; ++i)
              add_products(products[m][v][i][d], word, stored[i][v]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) words[m] += 4 * D;
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (Index v = 0; v < n; ++v)
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i)
        sums[m][v][kFirst + i] = (__m512i)joined(products[m][v][i], weights, r + m);
}

template <int M, typename E, typename Before>
JATTN_APART void weigh_integers(Index rows, const Digits& weights, Index r, Rows<const E> values,
                                Index count, T* out, Index width, Before& before) {
  constexpr Index n = Stored<E>::kVectors;
  for (; rows >= M; rows -= M, r += M, out += M * width)
    for (Index h = 0; h < values.size; h += 64) {
      __m512i sums[M][n][4];
      if constexpr (M * n <= 2) {
        sum_columns<M, 0, 4>(weights, r, values, h, count, sums, before);
      } else {  // more sums would not stay in registers
        sum_columns<M, 0, 2>(weights, r, values, h, count, sums, before);
        sum_columns<M, 2, 2>(weights, r, values, h, count, sums, before);
      }
      for (int m = 0; m < M; ++m)
        for (Index v = 0; v < n; ++v) {
          turn_quarters(sums[m][v]);  // to the order of columns
          T* to = out + m * width + v * values.size + h;
          for (int i = 0; i < 4 && h + i * kLanes < values.size; ++i)
            store(to + i * kLanes, load(to + i * kLanes) + (Vector)sums[m][v][i]);
        }
    }
  if constexpr (M > 1)
    if (rows) weigh_integers<M / 2>(rows, weights, r, values, count, out, width, before);
}

#endif

}  // namespace
