// The common parts of the kernels for CPUs: products of small matrices, rows of arrays, memory and
// threads. Each source that includes this file is compiled once for float and once for double.

#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

using Buffer = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

// The size of an axis, counted from 1 at the end.
Index axis(const Buffer& x, int from_end) {
  return x.dimensions()[x.dimensions().size() - from_end];
}

// The product of the sizes of all axes but the last `own`.
Index leading(const Buffer& x, int own) {
  Index size = 1;
  for (size_t a = 0; a + own < x.dimensions().size(); ++a) size *= x.dimensions()[a];
  return size;
}

// --- Products -----------------------------------------------------------------------------------

// The steps of a product with numbers A on the left: of T, and in pairs.h of bfloat16.
template <typename A>
struct Factors {
  static Vector row(const T* b) { return load(b); }
  template <typename B>
  static Vector row(const B* b) {
    return widened(b);
  }
  static T number(const T* a) { return *a; }
  static Vector add(Vector sum, T x, Vector row) { return sum + x * row; }
};

// Does nothing before each row of b.
struct Nothing {
  void step() const {}
};

// c[m, :] (+)= sum over k of a(m, k) b[k, :] for M rows and N vectors; a(m, k) = a[m am + k ak].
template <int M, int N, typename A, typename B, typename Before>
inline void small_product(Index depth, const A* a, Index am, Index ak, const B* b, Index bk, T* c,
                          Index cm, bool add, Before& before) {
  using F = Factors<A>;
  constexpr int L = kLanes;
  Vector sums[M][N] = {};
  if (add)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = load(c + m * cm + n * L);
  for (Index k = 0; k < depth; ++k, a += ak, b += bk) {
    before.step();
    decltype(F::row(b)) row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) row[n] = F::row(b + n * L);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto x = F::number(a + m * am);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = F::add(sums[m][n], x, row[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(c + m * cm + n * L, sums[m][n]);
}

template <int N, int M, typename A, typename B, typename Before = const Nothing>
JATTN_APART void rows_product(Index rows, Index depth, const A* a, Index am, Index ak, const B* b,
                              Index bk, T* c, Index cm, bool add, Before& before = {}) {
  for (; rows >= M; rows -= M, a += M * am, c += M * cm)
    small_product<M, N>(depth, a, am, ak, b, bk, c, cm, add, before);
  constexpr int kLess = M > 4 ? 4 : M / 2;
  if constexpr (kLess > 0)
    if (rows) rows_product<N, kLess>(rows, depth, a, am, ak, b, bk, c, cm, add, before);
}

// The same product for any number of rows, at most kMost at a time, and for columns that are whole
// vectors.
template <int kMost = 8, typename A, typename B, typename Before = const Nothing>
JATTN_APART void product(Index rows, Index columns, Index depth, const A* a, Index am, Index ak,
                         const B* b, Index bk, T* c, Index cm, bool add, Before& before = {}) {
  constexpr int kFirst = std::min(kHigh, kMost), kSecond = std::min(kWide == 2 ? kHigh : 8, kMost);
  Index left = columns / kLanes;
  for (; left >= kWide; left -= kWide, b += kWide * kLanes, c += kWide * kLanes)
    rows_product<kWide, kFirst>(rows, depth, a, am, ak, b, bk, c, cm, add, before);
  for (; left >= 2; left -= 2, b += 2 * kLanes, c += 2 * kLanes)
    rows_product<2, kSecond>(rows, depth, a, am, ak, b, bk, c, cm, add, before);
  if (left) rows_product<1, kMost>(rows, depth, a, am, ak, b, bk, c, cm, add, before);
}

// --- Rows of arrays -----------------------------------------------------------------------------

// Rows of `size` numbers, `stride` apart.
template <typename E>
struct Rows {
  E* start;
  Index stride;
  Index size;

  E* operator[](Index i) const { return start + i * stride; }
  Rows from(Index i) const { return {start + i * stride, stride, size}; }
};

// 16-bit numbers, which are widened when they are loaded.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Two consecutive bfloat16 numbers.
using Pair = uint32_t;

inline Vector widened(const T* from) { return load(from); }
#if JATTN_SINGLE
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));

inline Vector widened(const Bfloat16* from) {
  return (Vector)(__builtin_convertvector(load<Shorts>(from), Words) << 16);
}
inline Vector widened(Shorts from, Float16) {
#if defined(__AVX512F__)
  return (Vector)_mm512_cvtph_ps((__m256i)from);
#elif defined(__F16C__)
  return (Vector)_mm256_cvtph_ps((__m128i)from);
#else
  const Words bits = __builtin_convertvector(from, Words);
  const Words size = (bits & 0x7FFF) << 13, exponent = bits & 0x7C00;
  const Words usual = size + (112 << 23), far = size + (224 << 23);
  // Denormal numbers: 2^-14 (1 + m) - 2^-14.
  const Words near = (Words)((Vector)(size + (113 << 23)) - 6.103515625e-05f);
  const Words found = exponent == 0 ? near : (exponent == 0x7C00 ? far : usual);
  return (Vector)(found | (bits & 0x8000) << 16);
#endif
}
inline Vector widened(const Float16* from) { return widened(load<Shorts>(from), Float16{}); }
inline Vector widened(const Pair* from) { return (Vector)load<Words>(from); }
#endif
// The first `count` numbers of a vector, and 0 in the other lanes.
template <typename E>
inline Vector widened(const E* from, Index count) {
  E some[kLanes] = {};
  std::memcpy(some, from, count * sizeof(E));
  return widened(some);
}

#if JATTN_SINGLE
// Rounds to 16 bits, halves to even.
inline Shorts narrowed(Vector x, Bfloat16) {
#if defined(__AVX512BF16__)
  return (Shorts)_mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x, rounded = bits + 0x7FFF + ((bits >> 16) & 1);
  return __builtin_convertvector((x == x ? rounded : bits | 0x400000) >> 16, Shorts);
#endif
}
inline Shorts narrowed(Vector x, Float16) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Words size = (Words)x & 0x7FFFFFFF, sign = (Words)x >> 16 & 0x8000;
  const Words usual = (size + 0xFFF + ((size >> 13) & 1) - (112 << 23)) >> 13;
  // Denormal numbers: adding 1/2 rounds to multiples of 2^-24.
  const Words near = (Words)((Vector)size + 0.5f) - 0x3F000000;
  const Words far = size > 0x7F800000 ? Words{} + 0x7E00 : Words{} + 0x7C00;
  const Words found = size < 0x38800000 ? near : (size < 0x477FF000 ? usual : far);
  return __builtin_convertvector(found | sign, Shorts);
#endif
}
#endif

// Copies rows, padding them with 0 to whole vectors; returns whether all numbers are finite. Rows are
// requested early, as a load waits for earlier stores to addresses with the same last 12 bits.
template <typename E>
JATTN_APART bool copy(Rows<const E> from, Index count, T* to, Index width) {
  constexpr int L = kLanes;
  Ints bits = {};  // the bits of x - x: 0, or those of NaN
  for (Index i = 0; i < count; ++i, to += width) {
    const E* row = from[i];
    Index h = 0;
    for (; h + L <= from.size; h += L) {
      __builtin_prefetch(row + 4 * from.stride + h);
      const Vector x = widened(row + h);
      bits |= (Ints)(x - x);
      store(to + h, x);
    }
    if (h < width) {
      const Vector x = widened(row + h, from.size - h);
      bits |= (Ints)(x - x);
      store(to + h, x);
    }
  }
  return is_zero(bits);
}

// Whether `size` numbers, which are whole vectors, are all finite.
inline bool all_finite(const T* x, Index size) {
  Ints bits = {};  // the bits of x - x: 0, or those of NaN
  for (Index i = 0; i < size; i += kLanes) {
    const Vector one = load(x + i);
    bits |= (Ints)(one - one);
  }
  return is_zero(bits);
}

inline bool is_finite(T x) { return std::isfinite(x); }
inline bool is_finite(Bfloat16 x) { return (x.bits & 0x7F80) != 0x7F80; }

// Replaces numbers that are not finite by 0, and sets `nonfinite` of their rows, if given, to NaN.
template <typename E>
inline void zero_nonfinite(E* x, Index count, Index width, T* nonfinite) {
  for (Index i = 0; i < count; ++i) {
    for (Index h = 0; h < width; ++h) {
      E& one = x[i * width + h];
      if (is_finite(one)) continue;
      if (nonfinite) nonfinite[i] = std::numeric_limits<T>::quiet_NaN();
      one = E{};
    }
  }
}

// Copies values, with 0 for those that are not finite; returns `nonfinite`, which is NaN for rows with
// such values and 0 for the others, or null if all are finite.
template <typename From, typename E>
const T* copy_finite(const From& from, Index count, E* to, Index width, T* nonfinite) {
  if (copy(from, count, to, width)) return nullptr;
  std::fill(nonfinite, nonfinite + count, T{0});
  zero_nonfinite(to, count, width, nonfinite);
  return nonfinite;
}

// Multiplies numbers, which are whole vectors, by a factor.
inline void scale(T* x, Index size, T factor) {
  for (Index i = 0; i < size; i += kLanes) store(x + i, load(x + i) * factor);
}

// Consecutive queries of a block, which are lanes of vectors.
struct Lanes {
  Index first, size;
  Index end() const { return first + size; }
};

// The way results are written: overwriting, adding, or overwriting memory past the caches.
enum class Put { kOver, kAdd, kPast };

// Stores past the caches, which would first read the line; `fence` makes the data visible to all.
#if defined(__x86_64__)
inline void store_past(T* to, Vector x) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)x);
#elif defined(__AVX__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)x);
#else
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)x);
#endif
}
inline void fence() { _mm_sfence(); }
#else
inline void store_past(T* to, Vector x) { store(to, x); }
inline void fence() {}
#endif

// to[i] = x[i] × factor, or += it, for rows x of whole vectors.
inline void put_row(T* to, const T* x, Index size, T factor, Put how) {
  constexpr int L = kLanes;
  // Writing past the caches is only faster for whole cache lines.
  const bool lines = (reinterpret_cast<uintptr_t>(to) | (size * sizeof(T))) % 64 == 0;
  Index h = 0;
  if (how == Put::kPast && lines) {
    for (; h < size; h += L) store_past(to + h, load(x + h) * factor);
    return;
  }
  const bool add = how == Put::kAdd;
  for (; h + L <= size; h += L) {
    Vector now = load(x + h) * factor;
    if (add) now += load(to + h);
    store(to + h, now);
  }
  for (; h < size; ++h) to[h] = add ? to[h] + x[h] * factor : x[h] * factor;
}
inline void put(Rows<T> to, const T* x, Index count, Index width, T factor, Put how) {
  for (Index i = 0; i < count; ++i) put_row(to[i], x + i * width, to.size, factor, how);
}

#if JATTN_SINGLE
template <typename E>
inline void put_narrowed(E* to, const T* x, Index size, T factor) {
  Index h = 0;
  for (; h + kLanes <= size; h += kLanes) {
    const Shorts row = narrowed(load(x + h) * factor, E{});
    std::memcpy(to + h, &row, sizeof(row));
  }
  for (; h < size; ++h) to[h].bits = narrowed(all(x[h] * factor), E{})[0];
}
#endif

#if defined(__clang__)
inline Vector choose(Vector x, Vector y, Ints lanes) {
  Vector chosen;
  for (int l = 0; l < kLanes; ++l) chosen[l] = lanes[l] < kLanes ? x[lanes[l]] : y[lanes[l] - kLanes];
  return chosen;
}
#else
inline Vector choose(Vector x, Vector y, Ints lanes) { return __builtin_shuffle(x, y, lanes); }
#endif

// Transposes a square of vectors: each step swaps halves of blocks, which double in size.
template <int s, int... l>
inline void turn_blocks(Vector* rows, std::integer_sequence<int, l...> lanes) {
  constexpr int L = kLanes;
  constexpr Ints low = {(l & s ? L + l - s : l)...}, high = {(l & s ? L + l : l + s)...};
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    if (i & s) continue;
    const Vector x = rows[i], y = rows[i + s];
    rows[i] = choose(x, y, low);
    rows[i + s] = choose(x, y, high);
  }
  if constexpr (2 * s < kLanes) turn_blocks<2 * s>(rows, lanes);
}
inline void turn_square(Vector* rows) {
  turn_blocks<1>(rows, std::make_integer_sequence<int, kLanes>());
}

// Returns the sum of the lanes of each of `kLanes` vectors; each step adds halves of pairs.
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

// Transposes [count, size] to [size, t], times a factor; t is whole vectors, padded with 0. Pairs are
// not multiplied.
template <typename E>
JATTN_APART void transpose(Rows<const E> from, Index count, Index t, T* to, T factor) {
  constexpr int L = kLanes;
  const auto moved = [factor](Vector x) {
    if constexpr (std::is_same_v<E, Pair>) return x;
    return x * factor;
  };
  for (Index i = 0; i < t; i += L)
    for (Index h = 0; h < from.size; h += L) {
      Vector square[L];
      const Index rows = std::min<Index>(L, count - i), columns = std::min<Index>(L, from.size - h);
      if (rows == L && columns == L) {
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) {
          __builtin_prefetch(from[i + L + l] + h);
          square[l] = moved(widened(from[i + l] + h));
        }
      } else {
        for (int l = 0; l < L; ++l)
          square[l] = l < rows ? moved(widened(from[i + l] + h, columns)) : Vector{};
      }
      turn_square(square);
      for (Index n = 0; n < columns; ++n) store(to + (h + n) * t + i, square[n]);
    }
}

// Rows of an array of the caller, whose numbers may have 16 bits.
struct Input {
  const char* start;
  Index stride, size;  // in numbers
  ffi::DataType type;

  Input from(Index i) const {
    return {start + i * stride * static_cast<Index>(ffi::ByteWidth(type)), stride, size, type};
  }
  template <typename E>
  Rows<const E> rows() const {
    return {reinterpret_cast<const E*>(start), stride, size};
  }
  template <typename Run>
  auto read(const Run& run) const {
#if JATTN_SINGLE
    if (type == ffi::BF16) return run(rows<Bfloat16>());
    if (type == ffi::F16) return run(rows<Float16>());
#endif
    return run(rows<T>());
  }
};

// Rows of an array of results, whose numbers may have 16 bits.
struct Output {
  char* start;
  Index stride, size;  // in numbers
  ffi::DataType type;

  template <typename E>
  E* row(Index i) const {
    return reinterpret_cast<E*>(start) + i * stride;
  }
  Output from(Index i) const {
    return {start + i * stride * static_cast<Index>(ffi::ByteWidth(type)), stride, size, type};
  }
  void put(Index i, const T* x, T factor, Put how) const {
#if JATTN_SINGLE
    if (type == ffi::BF16) return put_narrowed(row<Bfloat16>(i), x, size, factor);
    if (type == ffi::F16) return put_narrowed(row<Float16>(i), x, size, factor);
#endif
    put_row(row<T>(i), x, size, factor, how);
  }
};

bool copy(const Input& from, Index count, T* to, Index width) {
  return from.read([&](auto rows) { return copy(rows, count, to, width); });
}
void transpose(const Input& from, Index count, Index t, T* to, T factor) {
  from.read([&](auto rows) { transpose(rows, count, t, to, factor); });
}

// An operand [b, n, ...] with `own` further axes. If b or n is less than in the call, rows or heads
// share a part.
template <typename E>
struct Shared {
  const E* start;  // null if there is none
  Index same, heads, size;

  Shared(const Buffer& x, Index B, int own = 1, Index bytes = 1)
      : heads(axis(x, own + 1)), size(bytes) {
    for (int a = 1; a <= own; ++a) size *= axis(x, a);
    const Index rows = leading(x, own + 1);
    start = rows && heads && size ? static_cast<const E*>(x.untyped_data()) : nullptr;
    same = rows ? B / rows : 1;
  }
  const E* at(Index b, Index n) const {
    return start ? start + (b / same * heads + (heads > 1 ? n : 0)) * size : nullptr;
  }
};

// --- Memory and threads -------------------------------------------------------------------------

// A thread's memory for tiles. It is kept between calls if it is as small as the caches; else it is
// `own` memory of the caller.
class Bench {
 public:
  explicit Bench(Index size) {
    thread_local std::vector<char> memory;
    const Index bytes = bytes_of(size);
    if (static_cast<Index>(memory.size()) < bytes) {
      std::vector<char>().swap(memory);  // frees the memory before it allocates more
      memory.resize(bytes);
    }
    start(memory.data());
  }
  Bench(Index size, std::unique_ptr<char[]>& own) {
    own.reset(new char[bytes_of(size)]);
    start(own.get());
  }
  template <typename E = T>
  E* take(Index size) {
    T* here = next_;
    next_ += up(size * static_cast<Index>(sizeof(E)), kBytes) / static_cast<Index>(sizeof(T));
    return reinterpret_cast<E*>(here);
  }

 private:
  static Index bytes_of(Index size) { return (size + 64 * kBytes) * sizeof(T); }
  void start(char* memory) {
    next_ = reinterpret_cast<T*>(up(reinterpret_cast<uintptr_t>(memory), kBytes));
  }

  T* next_;
};

// Does work(i) for all i < n on the threads of XLA. A thread takes several consecutive i, whose heads
// lie side by side, and fewer towards the end, so that all threads end together. The caller works too,
// so that it never waits for a thread that has not begun. After a failed allocation threads go on
// counting without working, and the caller throws at the end: no exception may leave a thread of XLA.
template <typename Work>
void parallel(ffi::ThreadPool& pool, Index n, const Work& work) {
  struct Count {
    std::atomic<Index> next{0}, done{0};
    std::atomic<bool> failed{false};
  };
  const Index threads = std::max<Index>(1, pool.num_threads());
  auto count = std::make_shared<Count>();
  auto run = [count, n, threads, &work] {
    for (Index i = count->next.load(); i < n;) {
      const Index end = i + std::clamp<Index>((n - i) / (2 * threads), 1, 8);
      if (!count->next.compare_exchange_weak(i, end)) continue;
      try {
        for (Index at = i; at < end && !count->failed; ++at) work(at);
      } catch (...) {
        count->failed = true;
      }
      fence();
      count->done.fetch_add(end - i, std::memory_order_release);
      i = count->next.load();
    }
  };
  const Index helpers = std::min(threads, n) - 1;
  try {
    for (Index i = 0; i < helpers; ++i) pool.Schedule(decltype(run)(run));
  } catch (...) {
  }  // the threads that could be scheduled help
  run();
  while (count->done.load(std::memory_order_acquire) < n)
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
  if (count->failed) throw std::bad_alloc();
}

// Runs a call and returns its error to XLA: an exception that reached XLA would end the process.
template <typename Run>
ffi::Error reported(const Run& run) {
  try {
    run();
    return ffi::Error::Success();
  } catch (const ffi::Error& error) {
    return error;
  } catch (const std::bad_alloc&) {
    return {ffi::ErrorCode::kResourceExhausted, "jattn: no memory for the tiles of its kernel in C++"};
  } catch (const std::exception& error) {
    return {ffi::ErrorCode::kInternal, std::string("jattn: ") + error.what()};
  }
}

}  // namespace
