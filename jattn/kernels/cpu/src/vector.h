// Vectors and functions of vectors, for the kernels for CPUs and the rules generated for them.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

// The rules of users' functions include this file: intrinsics would make their builds three times as
// long.
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// Marks a function of a whole tile, which is compiled once and not inlined.
#define JATTN_APART __attribute__((noinline, unused))

namespace {

using Index = std::ptrdiff_t;

#if defined(__AVX512F__)
constexpr int kBytes = 64, kWide = 4;  // bytes of a vector; vectors side by side in a product
#elif defined(__AVX__)
constexpr int kBytes = 32, kWide = 2;
#else
constexpr int kBytes = 16, kWide = 4;
#endif
constexpr int kHigh = 6;  // rows of a product; its sums stay in registers

// The dtype of sums, float or double: each has its own library.
#if JATTN_SINGLE
using T = float;
#else
using T = double;
#endif
using Int = std::conditional_t<JATTN_SINGLE, int32_t, int64_t>;  // as wide as T
constexpr int kLanes = kBytes / sizeof(T);
constexpr T kInfinity = std::numeric_limits<T>::infinity();

typedef T Vector __attribute__((vector_size(kBytes)));
typedef Int Ints __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));

template <typename V = Vector, typename E>
inline V load(const E* from) {
  V x;
  std::memcpy(&x, from, sizeof(V));
  return x;
}
inline void store(T* to, Vector x) {
  std::memcpy(to, &x, sizeof(x));
}
inline Vector all(T x) { return x - Vector{}; }

// Whether all bits are 0.
inline bool is_zero(Ints x) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) == 0;
#elif defined(__AVX__)
  typedef long long Quads __attribute__((vector_size(32)));
  return __builtin_ia32_ptestz256((Quads)x, (Quads)x);
#else
  Int bits = 0;
  for (int l = 0; l < kLanes; ++l) bits |= x[l];
  return bits == 0;
#endif
}

inline Index up(Index size, Index multiple) { return (size + multiple - 1) / multiple * multiple; }

// x / y, where `inverse` is 1 / y rounded, and both are normal numbers. The remainder corrects the
// rounding to that of a division, in a third of its time.
inline Vector quotient(Vector x, Vector y, Vector inverse) {
#if defined(__FMA__) || defined(__aarch64__)
  const Vector q = x * inverse;
  const Vector found = q + (x - q * y) * inverse;
  return q - q == 0 ? found : q;
#else
  return x / y;
#endif
}

#if JATTN_SINGLE

// e^x = 2^n times a polynomial in the remainder of x, the minimax polynomial (3e-9) with the first two
// terms 1 + x. The lowest bits of `shifted` hold n + 127.
inline Vector scaled_exponential(Vector x, Vector* shifted) {
  const Vector magic = all(12583039.0f);  // 1.5 × 2^23 + 127: adding it rounds, and biases exponents
  *shifted = x * 1.44269504088896341f + magic;
  const Vector n = *shifted - magic;
  Vector r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vector p = all(1.3814538252e-03f);
  p = p * r + 8.3687454462e-03f;
  p = p * r + 4.1668388993e-02f;
  p = p * r + 1.6666521132e-01f;
  p = p * r + 4.9999994040e-01f;
  p = p * r + 1.0f;
  return p * r + 1.0f;
}

#if defined(__AVX512DQ__)

constexpr float kLog2e = 1.44269504088896341f;

// 2^(n / 32).
alignas(64) constexpr float kPowers[32] = {
    1.0f, 1.02189715f, 1.04427378f, 1.067140401f, 1.0905077f, 1.11438674f, 1.1387886f, 1.1637249f,
    1.1892071f, 1.2152474f, 1.2418578f, 1.269051f, 1.2968396f, 1.32523664f, 1.3542555f, 1.38391f,
    1.41421356f, 1.4451808f, 1.47682615f, 1.5091644f, 1.5422108f, 1.57598085f, 1.6104903f, 1.6457555f,
    1.6817928f, 1.7186193f, 1.7562522f, 1.7947091f, 1.8340081f, 1.87416763f, 1.9152066f, 1.9571441f};

// 2^x = high (1 + r slope) for all x: high is 2^(floor(32 x) / 32), r is below 1 / 32, and 1 + r slope
// is the polynomial of degree 2 that is 1 at 0 and has the least relative error, 1.1 units of rounding.
struct Power {
  Vector high, r, slope;
};

inline Power power_of_two(Vector x) {
  constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  // The last bits of a sum with 1.5 × 2^18 count 1 / 32.
  const __m512i n = (__m512i)_mm512_add_round_ps((__m512)x, _mm512_set1_ps(393216.0f), kDown);
  const __m512 power = _mm512_permutex2var_ps(_mm512_load_ps(kPowers), n, _mm512_load_ps(kPowers + 16));
  const Vector r = (Vector)_mm512_reduce_ps((__m512)x, 5 << 4 | kDown);  // 0 of infinities
  return {(Vector)_mm512_scalef_ps(power, (__m512)x), r, r * 2.4265269935e-01f + 6.9312375784e-01f};
}

// e^x for x < 88. The relative error is up to 3 + 1.5 |x| units of rounding; unless kExact, for weights
// that are rounded to bfloat16, 1e-4. What is below 2^-126 is 0, as XLA's threads flush such numbers.
template <bool kExact = true>
inline Vector exponential(Vector x) {
  x *= kLog2e;
  if constexpr (kExact) {
    const auto [high, r, slope] = power_of_two(x);
    return high + high * (r * slope);
  } else {
    const Vector r = (Vector)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);
    Vector p = all(7.8024521e-02f);
    p = p * r + 2.2606716e-01f;
    p = p * r + 6.9583356e-01f;
    return (Vector)_mm512_scalef_ps((__m512)(p * r + 9.9992522e-01f), (__m512)x);
  }
}

#else

// e^x within a unit of rounding for x < 88, and 0 below -87. NaN for NaN.
template <bool = true>
inline Vector exponential(Vector x) {
  Vector shifted;
  const Vector p = scaled_exponential(x, &shifted);
  const Vector power = (Vector)((Ints)shifted << 23);
  return x < -87.0f ? Vector{} : p * power;
}

#endif

#if defined(__AVX512F__)

// log x for all x: of x = 2^n (1 + y) with 1 + y in [0.75, 1.5), by the polynomial of least relative
// error (5e-9) after y - y^2 / 2. Of 0 and of infinity n is infinite, of negative numbers y is NaN.
inline Vector logarithm(Vector x) {
  const __m512 part = _mm512_getmant_ps((__m512)x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_nan);
  const Vector n = (Vector)_mm512_getexp_ps((__m512)x) - (Vector)_mm512_getexp_ps(part);
  const Vector y = (Vector)part - 1.0f, square = y * y;
  Vector p = all(-4.5074467090e-2f);
  p = p * y + 1.0462995714e-1f;
  p = p * y - 1.3161196531e-1f;
  p = p * y + 1.4478400496e-1f;
  p = p * y - 1.6647312344e-1f;
  p = p * y + 1.9990860860e-1f;
  p = p * y - 2.5000095829e-1f;
  p = p * y + 3.3333449120e-1f;
  return n * 0.693147181f + (y + square * (p * y - 0.5f));
}

// 1 / x of a normal number whose reciprocal is one too, within a unit of rounding.
inline Vector reciprocal(Vector x) {
  const Vector r = (Vector)_mm512_rcp14_ps((__m512)x);
  return r + r * (1.0f - x * r);
}

#else

// log x for x >= 1: of x = 2^n (1 + y) with y around 0 (Cephes, logf). NaN for NaN.
inline Vector logarithm(Vector x) {
  const Ints bits = (Ints)x;
  const Vector half = (Vector)((bits & 0x007FFFFF) | 0x3F000000);  // in [0.5, 1)
  const Ints low = half < 0.707106781f;                            // -1 where true
  const Vector n = __builtin_convertvector((bits >> 23) - 126 + low, Vector);
  const Vector y = half - 1.0f + (low ? half : Vector{}), square = y * y;
  Vector p = all(7.0376836292e-2f);
  p = p * y - 1.1514610310e-1f;
  p = p * y + 1.1676998740e-1f;
  p = p * y - 1.2420140846e-1f;
  p = p * y + 1.4249322787e-1f;
  p = p * y - 1.6668057665e-1f;
  p = p * y + 2.0000714765e-1f;
  p = p * y - 2.4999993993e-1f;
  p = p * y + 3.3333331174e-1f;
  p = p * y * square - n * 2.12194440e-4f - 0.5f * square;
  return x - x + (y + p + n * 0.693359375f);
}

inline Vector reciprocal(Vector x) { return 1.0f / x; }

#endif

// tanh: an odd polynomial near 0 (Cephes, tanhf), elsewhere by e^-2|x|.
inline Vector tangent(Vector x) {
  const Vector size = x < 0.0f ? -x : x, square = x * x;
  Vector p = all(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vector near = p * square * x + x;
  const Vector e = exponential(-2.0f * size);
  const Vector far = (1.0f - e) * reciprocal(1.0f + e);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

#else

template <bool = true>
inline Vector exponential(Vector x) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::exp(x[i]);
  return x;
}
inline Vector logarithm(Vector x) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::log(x[i]);
  return x;
}
inline Vector tangent(Vector x) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::tanh(x[i]);
  return x;
}

#endif

}  // namespace
