// The functions that generated rules, for a mask and a score function, are made of.
//
// A rule changes a tile of scores in place, `[keys, width]` as in attention.cc: lanes are queries. It
// reads operands of one head: by query, by key, by their distance, or as a table. Backward it turns
// the cotangent of scores into that of products, and adds to gradients of operands.

#pragma once

#include "vector.h"

// A tile of one head: queries first .. first + count - 1 in `width` lanes, keys j .. j + keys - 1.
struct Place {
  Index first, count, width, j, keys, T, S;
  const void* const* operands;
  void* const* gradients;
};

namespace {

constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();

inline Ints whole(Index x) { return Ints{} + static_cast<Int>(x); }
inline Ints truth(bool x) { return whole(x ? -1 : 0); }
inline Ints load_truth(const Int* from) { return load<Ints>(from) != 0; }
inline Ints truth(Int x) { return truth(x != 0); }

inline Ints lanes() {
  Ints x;
  for (int l = 0; l < kLanes; ++l) x[l] = l;
  return x;
}
// The queries of a vector; lanes past the last query repeat it.
inline Ints queries(const Place& at, Index i) {
  const Ints x = lanes() + whole(at.first + i), last = whole(at.T - 1);
  return x > last ? last : x;
}

inline Vector pick(Ints which, Vector x, Vector y) { return which ? x : y; }
inline Ints pick(Ints which, Ints x, Ints y) { return (which & x) | (~which & y); }

// Integers of dtype I in lanes that may be wider.
template <typename I>
inline Ints wrapped(Ints x) {
  constexpr int kUnused = 8 * (sizeof(Int) - sizeof(I));
  if constexpr (std::is_unsigned_v<I>) return x & Int{std::numeric_limits<I>::max()};
  else return (x << kUnused) >> kUnused;
}

// Through memory, so that the compiler vectorises the loop.
template <typename F>
inline Vector each(Vector x, F f) {
  T all[kLanes];
  std::memcpy(all, &x, sizeof(x));
  for (int l = 0; l < kLanes; ++l) all[l] = f(all[l]);
  return load(all);
}
template <typename V, typename F>
inline V each(V x, V y, F f) {
  std::remove_reference_t<decltype(x[0])> left[kLanes], right[kLanes];
  std::memcpy(left, &x, sizeof(x));
  std::memcpy(right, &y, sizeof(y));
  for (int l = 0; l < kLanes; ++l) left[l] = f(left[l], right[l]);
  std::memcpy(&x, left, sizeof(x));
  return x;
}

// NaN if either argument is NaN, as in JAX.
template <typename V>
inline V greatest(V x, V y) { return pick((x > y) | (x != x), x, y); }
template <typename V>
inline V least(V x, V y) { return pick((x < y) | (x != x), x, y); }
template <typename I>
inline Ints clamped(Ints x) {
  using Limits = std::numeric_limits<I>;
  return least(greatest(x, whole(Limits::min())), whole(Limits::max()));
}

inline Vector abs_of(Vector x) { return (Vector)((Ints)x & std::numeric_limits<Int>::max()); }
inline Ints abs_of(Ints x) { return pick(x < 0, -x, x); }
inline Vector sign_of(Vector x) { return x > 0 ? all(1) : (x < 0 ? all(-1) : x); }
inline Ints sign_of(Ints x) { return (x < 0) - (x > 0); }

// Division of integers as in JAX: x / 0 is -1, and x rem 0 is x.
template <typename I>
inline I divided(I x, I y) {
  if (y == 0) return -1;
  return y == -1 ? static_cast<I>(-static_cast<std::make_unsigned_t<I>>(x)) : x / y;
}
template <typename I>
inline I rest(I x, I y) {
  return y == 0 ? x : y == -1 ? 0 : x % y;
}
template <typename I>
inline I sign(I x) {
  return (x > 0) - (x < 0);
}
template <typename I>
inline I floor_divided(I x, I y) {
  return divided(x, y) - (sign(x) != sign(y) && rest(x, y) != 0);
}
template <typename I>
inline I remaining(I x, I y) {
  y = y == 0 ? 1 : y;
  const I r = rest(x, y);
  return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
template <int kBits, typename I>
inline I shifted_left(I x, I by) {
  const auto shifted = static_cast<std::make_unsigned_t<I>>(x) << (by & (kBits - 1));
  return by < 0 || by >= kBits ? I{0} : static_cast<I>(shifted);
}
template <int kBits, typename I>
inline I shifted_right(I x, I by) {
  return x >> (by < 0 || by >= kBits ? I{kBits - 1} : by);
}
template <int kBits, typename I>
inline I shifted_right_as_bits(I x, I by) {
  using Bits = std::conditional_t<kBits <= 32, uint32_t, uint64_t>;
  constexpr Bits kAll = ~Bits{0} >> (8 * sizeof(Bits) - kBits);
  const Bits shifted = (static_cast<Bits>(x) & kAll) >> (by & (kBits - 1));
  return by < 0 || by >= kBits ? I{0} : static_cast<I>(shifted);
}

// A conversion is as_<kind of the result>(x), see text.py; booleans are converted from 0 and 1.
inline Vector as_f(Ints x) { return __builtin_convertvector(x, Vector); }
// Rounds towards 0 and clamps to the range of I; NaN becomes 0.
template <typename I, typename E>
inline I held(E x) {
  constexpr E kEnd = sizeof(I) == 4 ? E(2147483648.0) : E(9223372036854775808.0);
  return x != x       ? 0
         : x >= kEnd  ? std::numeric_limits<I>::max()
         : x <= -kEnd ? std::numeric_limits<I>::min()
                      : static_cast<I>(x);
}
template <typename I, typename V, typename F>
inline V held_each(F x) {
  std::remove_reference_t<decltype(V{}[0])> all[kLanes];  // GCC 12 cannot compile lanes here
  for (int l = 0; l < kLanes; ++l) all[l] = held<I>(x[l]);
  return load<V>(all);
}
inline Ints as_i(Vector x) { return held_each<int32_t, Ints>(x); }

// Floats and integers of another width than T and Int, one for each lane.
using Far = std::conditional_t<JATTN_SINGLE, double, float>;
typedef Far FarLanes __attribute__((vector_size(kLanes * sizeof(Far))));
typedef int64_t LongLanes __attribute__((vector_size(kLanes * sizeof(int64_t))));
typedef uint32_t WordLanes __attribute__((vector_size(kLanes * sizeof(uint32_t))));
struct Other {
  FarLanes x;
};
struct Long {
  LongLanes x;
};

#define JATTN_OPERATOR(V, op) \
  inline V operator op(V a, V b) { return {a.x op b.x}; }
#define JATTN_COMPARISON(V, op) \
  inline Ints operator op(V a, V b) { return __builtin_convertvector(a.x op b.x, Ints); }
#define JATTN_NUMBERS(V)                                                                \
  JATTN_OPERATOR(V, +) JATTN_OPERATOR(V, -) JATTN_OPERATOR(V, *)                        \
  JATTN_COMPARISON(V, <) JATTN_COMPARISON(V, <=) JATTN_COMPARISON(V, >)                 \
  JATTN_COMPARISON(V, >=) JATTN_COMPARISON(V, ==) JATTN_COMPARISON(V, !=)               \
  inline V operator-(V a) { return {-a.x}; }                                            \
  inline V pick(Ints which, V a, V b) {                                                 \
    return {__builtin_convertvector(which, decltype(a.x < b.x)) ? a.x : b.x};           \
  }                                                                                     \
  template <typename F>                                                                 \
  inline V each(V a, F f) {                                                             \
    for (int l = 0; l < kLanes; ++l) a.x[l] = f(a.x[l]);                                \
    return a;                                                                           \
  }                                                                                     \
  template <typename F>                                                                 \
  inline V each(V a, V b, F f) {                                                        \
    return {each(a.x, b.x, f)};                                                         \
  }
JATTN_NUMBERS(Other)
JATTN_NUMBERS(Long)
JATTN_OPERATOR(Other, /)
JATTN_OPERATOR(Long, &)
JATTN_OPERATOR(Long, |)
JATTN_OPERATOR(Long, ^)
inline Long operator~(Long a) { return {~a.x}; }

inline Other other(Far x) { return {x - FarLanes{}}; }
inline Long longs(int64_t x) { return {x - LongLanes{}}; }
inline Other operator/(int x, Other y) { return other(Far(x)) / y; }
inline Other operator+(Other x, int y) { return x + other(Far(y)); }
inline Long operator+(Long x, int y) { return x + longs(y); }
inline Other load_other(const Far* from) { return {load<FarLanes>(from)}; }
inline Long load_long(const int64_t* from) { return {load<LongLanes>(from)}; }
inline Long load_word(const uint32_t* from) {
  return {__builtin_convertvector(load<WordLanes>(from), LongLanes)};
}
template <typename V, typename E>
inline V gather_lanes(const E* table, Ints at) {
  V result;
  for (int l = 0; l < kLanes; ++l) result[l] = table[at[l]];
  return result;
}
inline Other gather_other(const Far* table, Ints at) { return {gather_lanes<FarLanes>(table, at)}; }
template <typename I>
inline Long gather_long(const I* table, Ints at) { return {gather_lanes<LongLanes>(table, at)}; }

inline Other abs_of(Other x) {
  return each(x, [](Far x) { return std::fabs(x); });
}
inline Long abs_of(Long x) { return pick(x < longs(0), -x, x); }
inline Other sign_of(Other x) {
  return pick(x > other(0), other(1), pick(x < other(0), other(-1), x));
}
inline Long sign_of(Long x) { return each(x, sign<int64_t>); }

inline Vector as_f(Other x) { return __builtin_convertvector(x.x, Vector); }
inline Vector as_f(Long x) { return __builtin_convertvector(x.x, Vector); }
inline Other as_d(Vector x) { return {__builtin_convertvector(x, FarLanes)}; }
inline Other as_d(Ints x) { return {__builtin_convertvector(x, FarLanes)}; }
inline Other as_d(Long x) { return {__builtin_convertvector(x.x, FarLanes)}; }
inline Long as_l(Ints x) { return {__builtin_convertvector(x, LongLanes)}; }
inline Long as_l(Vector x) { return {held_each<int64_t, LongLanes>(x)}; }
inline Long as_l(Other x) { return {held_each<int64_t, LongLanes>(x.x)}; }
inline Long as_l(Long x) { return x; }
inline Ints as_i(Other x) { return held_each<int32_t, Ints>(x.x); }
inline Ints as_i(Long x) { return __builtin_convertvector(x.x, Ints); }
constexpr int64_t kWord = std::numeric_limits<uint32_t>::max();
template <typename I>
inline Long wrapped(Long x) { return x & longs(kWord); }
inline Long as_u(Ints x) { return wrapped<uint32_t>(as_l(x)); }
inline Long as_u(Long x) { return wrapped<uint32_t>(x); }
template <typename V>
inline Long as_u(V x) { return least(greatest(as_l(x), longs(0)), longs(kWord)); }
#if !JATTN_SINGLE
inline Ints as_i_long(Vector x) { return held_each<int64_t, Ints>(x); }
inline Ints as_i_long(Other x) { return held_each<int64_t, Ints>(x.x); }
#endif

// Rounds to numbers without the last kBits digits, ties to even.
typedef float FloatLanes __attribute__((vector_size(kLanes * sizeof(float))));
template <int kBits>
inline FloatLanes shortened(FloatLanes x) {
  constexpr uint32_t kRest = (1u << kBits) - 1;
  const WordLanes bits = (WordLanes)x, odd = (bits >> kBits) & 1;
  return x == x ? (FloatLanes)((bits + (kRest >> 1) + odd) & ~kRest) : x;
}
inline Vector rounded_to_bfloat16(Vector x) {
  return __builtin_convertvector(shortened<16>(__builtin_convertvector(x, FloatLanes)), Vector);
}
// Numbers below 2^-14 become multiples of 2^-24, the last digit of floats from 0.5 to 1; those from
// 65520 on become infinite.
inline Vector rounded_to_float16(Vector x) {
  const FloatLanes y = __builtin_convertvector(x, FloatLanes);
  const WordLanes sign = (WordLanes)y & 0x80000000u;
  const FloatLanes size = (FloatLanes)((WordLanes)y ^ sign);
  const FloatLanes small = size < 0x1p-14f ? size + 0.5f - 0.5f : shortened<13>(size);
  const FloatLanes rounded = size < 65520.0f ? small : size * float(kInfinity);
  return __builtin_convertvector((FloatLanes)((WordLanes)rounded | sign), Vector);
}

// The product of `product` and x^N, by squares. JAX multiplies in the same order, so that both round
// alike however large N is.
template <uint64_t N, typename V>
inline V times_power(V product, V x) {
  if constexpr (N % 2 == 1) product = product * x;
  if constexpr (N > 1) return times_power<N / 2>(product, x * x);
  return product;
}
// x^0 is 1 whatever x is.
template <int64_t N, typename V>
inline V power(V x) {
  if constexpr (N < 0) return 1 / times_power<0 - static_cast<uint64_t>(N)>(V{} + 1, x);
  else return times_power<static_cast<uint64_t>(N)>(V{} + 1, x);
}
// Rounds halves away from 0, or to even.
template <int kMethod, typename V>
inline V rounded(V x) {
  using E = std::conditional_t<std::is_same_v<V, Vector>, T, Far>;
  return each(x, [](E x) { return kMethod == 0 ? std::round(x) : std::nearbyint(x); });
}

#if JATTN_SINGLE
// e^x for all x: `exponential` is for weights, and neither reaches infinity nor denormal numbers.
// Without AVX-512 the result is scaled by two powers of 2, as one might not be a normal number.
inline Vector exp_of(Vector x) {
  Vector shifted;
#if defined(__AVX512F__)
  const __m512 least = _mm512_set1_ps(-104.0f), most = _mm512_set1_ps(89.0f);
  const Vector near = (Vector)_mm512_max_ps(least, _mm512_min_ps(most, (__m512)x));  // NaN stays
  const Vector p = scaled_exponential(near, &shifted);
  return (Vector)_mm512_scalef_ps((__m512)p, (__m512)(shifted - 12583039.0f));
#else
  const Vector near = x > 89.0f ? all(89) : (x < -104.0f ? all(-104) : x);
  const Vector p = scaled_exponential(near, &shifted);
  const Ints n = (Ints)shifted - 0x4B40007F, half = n >> 1;  // the bits of 12583039
  return p * (Vector)((half + 127) << 23) * (Vector)((n - half + 127) << 23);
#endif
}
#if defined(__AVX512F__)
inline Vector log_of(Vector x) { return logarithm(x); }
#else
// log x for all x: `logarithm` does not accept denormal numbers.
inline Vector log_of(Vector x) {
  const Ints small = x < 1.17549435e-38f;
  const Vector usual = logarithm(small ? x * 8388608.0f : x);
  const Vector found = small ? usual - 15.9423847f : usual;
  const Vector end = x == 0.0f ? all(-kInfinity) : (x == kInfinity ? x : all(kNaN));
  return (x > 0.0f) & (x < kInfinity) ? found : end;
}
#endif
// The rounding error of u = 1 + x is added back, times 1 / u, which is about 2 - u near 1; elsewhere
// the error does not matter.
inline Vector log1p_of(Vector x) {
  const Vector u = 1.0f + x, lost = x - (u - 1.0f), found = log_of(u);
  return u < 2.0f ? found + lost * (2.0f - u) : found;
}
inline Vector expm1_of(Vector x) {
  const Vector u = exp_of(x), less = u - 1.0f;
  const Vector found = less * (x / log_of(u));
  return u == 1.0f ? x : ((less == -1.0f) | (u == kInfinity) ? less : found);
}
#else
inline Vector exp_of(Vector x) { return exponential(x); }
#endif
inline Vector tanh_of(Vector x) { return tangent(x); }
inline Vector logistic_of(Vector x) { return 1 / (1 + exp_of(-x)); }

#define JATTN_EACH(V, name) \
  inline V name##_of(V x) { return each(x, [](auto x) { return std::name(x); }); }
JATTN_EACH(Other, exp)
JATTN_EACH(Other, expm1)
JATTN_EACH(Other, log)
JATTN_EACH(Other, log1p)
JATTN_EACH(Other, tanh)
inline Other logistic_of(Other x) { return 1 / (exp_of(-x) + 1); }
#if !JATTN_SINGLE
JATTN_EACH(Vector, expm1)
JATTN_EACH(Vector, log)
JATTN_EACH(Vector, log1p)
#endif

// Whether indices are consecutive, as those of neighbouring queries often are: their entries are one
// vector, which is read in a fraction of the time.
inline bool in_a_row(Ints at) { return is_zero(at ^ (lanes() + at[0])); }

// Entries of a table.
#if defined(__AVX512F__) && JATTN_SINGLE
inline Vector gather_any(const T* table, Ints at) {
  return (Vector)_mm512_i32gather_ps((__m512i)at, table, 4);
}
inline Ints gather_any(const Int* table, Ints at) {
  return (Ints)_mm512_i32gather_epi32((__m512i)at, table, 4);
}
#else
template <typename E>
inline auto gather_any(const E* table, Ints at) {
  return gather_lanes<std::conditional_t<std::is_same_v<E, T>, Vector, Ints>>(table, at);
}
#endif
template <typename E>
inline auto gather(const E* table, Ints at) {
  return in_a_row(at) ? load<decltype(gather_any(table, at))>(table + at[0])
                      : gather_any(table, at);
}
inline Ints gather_truth(const Int* table, Ints at) { return gather(table, at) != 0; }

inline void add_to(T* to, Vector x) { store(to, load(to) + x); }
// Adds lanes to entries of a table; lanes from `count` on are 0.
inline void scatter(T* table, Ints at, Vector x, Index count) {
  if (in_a_row(at)) return add_to(table + at[0], x);
  for (int l = 0; l < kLanes && l < count; ++l) table[at[l]] += x[l];
}

inline T total(Vector x) {
  T sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += x[l];
  return sum;
}

}  // namespace
