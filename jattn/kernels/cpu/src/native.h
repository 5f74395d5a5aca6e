// What the kernels for CPUs share: vectors, products of small matrices, rows of arrays, memory and
// threads. Each source that includes this is a library of its own, for float or for double.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/ffi.h"

// What is called for a whole tile: compiled once, not into everyone who calls it.
#define JATTN_APART __attribute__((noinline, unused))

namespace {

namespace ffi = xla::ffi;
using Index = std::ptrdiff_t;

// ------------------------------------------------------------------------------------------------
// Vectors
// ------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kBytes = 64, kWide = 4;  // of a vector; vectors side by side in a product
#elif defined(__AVX__)
constexpr int kBytes = 32, kWide = 2;
#else
constexpr int kBytes = 16, kWide = 4;
#endif
constexpr int kHigh = 6;  // rows of a product; its sums stay in registers

// What is computed in, float or double: each is a library of its own.
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
// Past the caches, which would first read what is then overwritten; `fence` makes it seen by all.
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
inline Vector all(T x) { return x - Vector{}; }

inline Index up(Index size, Index multiple) { return (size + multiple - 1) / multiple * multiple; }

#if JATTN_SINGLE

// e^x within a unit of rounding for x < 88, and 0 below -87: 2^n times a polynomial in what is left
// of x, the minimax one (3e-9) whose first two terms are 1 + x. NaN for NaN.
inline Vector exponential(Vector x) {
  const Vector magic = all(12583039.0f);  // 1.5 × 2^23 + 127: adding it rounds, and biases exponents
  const Vector shifted = x * 1.44269504088896341f + magic;
  const Vector n = shifted - magic;
  Vector r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vector p = all(1.3814538252e-03f);
  p = p * r + 8.3687454462e-03f;
  p = p * r + 4.1668388993e-02f;
  p = p * r + 1.6666521132e-01f;
  p = p * r + 4.9999994040e-01f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const Vector power = (Vector)((Ints)shifted << 23);
  return x < -87.0f ? Vector{} : p * power;
}

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
  const Vector far = (1.0f - e) / (1.0f + e);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

#else

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

// ------------------------------------------------------------------------------------------------
// Products
// ------------------------------------------------------------------------------------------------

// c[m, :] (+)= sum over k of a(m, k) b[k, :] for M rows and N vectors; a(m, k) = a[m am + k ak].
template <int M, int N>
inline void small_product(Index depth, const T* a, Index am, Index ak, const T* b, Index bk, T* c,
                          Index cm, bool add) {
  constexpr int L = kLanes;
  Vector sums[M][N] = {};
  if (add)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = load(c + m * cm + n * L);
  for (Index k = 0; k < depth; ++k, a += ak, b += bk) {
    Vector row[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) row[n] = load(b + n * L);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const T x = a[m * am];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] += x * row[n];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(c + m * cm + n * L, sums[m][n]);
}

template <int N, int M>
JATTN_APART void rows_product(Index rows, Index depth, const T* a, Index am, Index ak, const T* b,
                              Index bk, T* c, Index cm, bool add) {
  for (; rows >= M; rows -= M, a += M * am, c += M * cm)
    small_product<M, N>(depth, a, am, ak, b, bk, c, cm, add);
  constexpr int kLess = M > 4 ? 4 : M / 2;
  if constexpr (kLess > 0)
    if (rows) rows_product<N, kLess>(rows, depth, a, am, ak, b, bk, c, cm, add);
}

// As small_product, for any number of rows, and columns that are whole vectors.
JATTN_APART void product(Index rows, Index columns, Index depth, const T* a, Index am, Index ak,
                         const T* b, Index bk, T* c, Index cm, bool add) {
  Index left = columns / kLanes;
  for (; left >= kWide; left -= kWide, b += kWide * kLanes, c += kWide * kLanes)
    rows_product<kWide, kHigh>(rows, depth, a, am, ak, b, bk, c, cm, add);
  for (; left >= 2; left -= 2, b += 2 * kLanes, c += 2 * kLanes)
    rows_product<2, kWide == 2 ? kHigh : 8>(rows, depth, a, am, ak, b, bk, c, cm, add);
  if (left) rows_product<1, 8>(rows, depth, a, am, ak, b, bk, c, cm, add);
}

// ------------------------------------------------------------------------------------------------
// Rows of arrays
// ------------------------------------------------------------------------------------------------

// Rows of `size` numbers, `stride` apart.
template <typename E>
struct Rows {
  E* start;
  Index stride;
  Index size;

  E* operator[](Index i) const { return start + i * stride; }
  Rows from(Index i) const { return {start + i * stride, stride, size}; }
};

// Copies rows to the width of whole vectors, and says whether all of them are finite.
JATTN_APART bool copy(Rows<const T> from, Index count, T* to, Index width) {
  constexpr int L = kLanes;
  Ints bits = {};  // the bits of x - x: 0, or those of NaN
  for (Index i = 0; i < count; ++i, to += width) {
    const T* row = from[i];
    Index h = 0;
    for (; h + L <= from.size; h += L) {
      Vector x = load(row + h);
      bits |= (Ints)(x - x);
      store(to + h, x);
    }
    if (h < width) {
      Vector x = {};
      std::memcpy(&x, row + h, (from.size - h) * sizeof(T));
      bits |= (Ints)(x - x);
      store(to + h, x);
    }
  }
  bool finite = true;
  for (int l = 0; l < L; ++l) finite &= bits[l] == 0;
  return finite;
}

// Whether all of so many numbers, whole vectors, are finite.
inline bool all_finite(const T* x, Index size) {
  Ints bits = {};  // the bits of x - x: 0, or those of NaN
  for (Index i = 0; i < size; i += kLanes) {
    const Vector one = load(x + i);
    bits |= (Ints)(one - one);
  }
  bool finite = true;
  for (int l = 0; l < kLanes; ++l) finite &= bits[l] == 0;
  return finite;
}

// Takes what is not finite as 0, and adds NaN to `nonfinite`, if given, for rows that hold such.
inline void zero_nonfinite(T* x, Index count, Index width, T* nonfinite) {
  for (Index i = 0; i < count; ++i) {
    for (Index h = 0; h < width; ++h) {
      T& one = x[i * width + h];
      if (std::isfinite(one)) continue;
      if (nonfinite) nonfinite[i] = std::numeric_limits<T>::quiet_NaN();
      one = 0;
    }
  }
}

// How results are written: over what was there, added to it, or past the caches.
enum class Put { kOver, kAdd, kPast };

// to[i] = x[i] × factor, or += it, for rows x of whole vectors.
inline void put_row(T* to, const T* x, Index size, T factor, Put how) {
  constexpr int L = kLanes;
  // Only whole lines are faster past the caches.
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

#if defined(__clang__)
inline Vector choose(Vector x, Vector y, Ints lanes) {
  Vector chosen;
  for (int l = 0; l < kLanes; ++l) chosen[l] = lanes[l] < kLanes ? x[lanes[l]] : y[lanes[l] - kLanes];
  return chosen;
}
#else
inline Vector choose(Vector x, Vector y, Ints lanes) { return __builtin_shuffle(x, y, lanes); }
#endif

// Transposes a square of vectors: halves of blocks change places, of twice the size at each step.
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

// [count, size] as [size, t] times a factor; t is whole vectors, and filled up with 0.
JATTN_APART void transpose(Rows<const T> from, Index count, Index t, T* to, T factor) {
  constexpr int L = kLanes;
  for (Index i = 0; i < t; i += L)
    for (Index h = 0; h < from.size; h += L) {
      Vector square[L];
      const Index rows = std::min<Index>(L, count - i), columns = std::min<Index>(L, from.size - h);
      if (rows == L && columns == L) {
#pragma GCC unroll 16
        for (int l = 0; l < L; ++l) square[l] = load(from[i + l] + h) * factor;
      } else {
        for (int l = 0; l < L; ++l) {
          square[l] = Vector{};
          if (l < rows)
            for (Index n = 0; n < columns; ++n) square[l][n] = from[i + l][h + n] * factor;
        }
      }
      turn_square(square);
      for (Index n = 0; n < columns; ++n) store(to + (h + n) * t + i, square[n]);
    }
}

// ------------------------------------------------------------------------------------------------
// Memory and threads
// ------------------------------------------------------------------------------------------------

// A thread's own memory for tiles, kept between calls: it is as small as the caches.
class Bench {
 public:
  explicit Bench(Index size) {
    thread_local std::vector<char> memory;
    const Index bytes = (size + 64 * kBytes) * sizeof(T);
    if (static_cast<Index>(memory.size()) < bytes) {
      std::vector<char>().swap(memory);  // what is too small is given back first
      memory.resize(bytes);
    }
    next_ = reinterpret_cast<T*>(up(reinterpret_cast<uintptr_t>(memory.data()), kBytes));
  }
  T* take(Index size) {
    T* here = next_;
    next_ += up(size, kLanes);
    return here;
  }

 private:
  T* next_;
};

// Does work(i) for all i < n on the threads of XLA, some that follow one another by the same: heads
// that do lie side by side. Towards the end it is fewer, so that all threads end together. The caller
// works too, so that it never waits for a thread that has not begun. Threads that cannot allocate
// what they need go on counting, without working, and the caller throws when all is counted: no
// exception may leave a thread of XLA.
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
  }  // those that could be scheduled help
  run();
  while (count->done.load(std::memory_order_acquire) < n)
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
  if (count->failed) throw std::bad_alloc();
}

// What XLA is told of a call: an exception that reached it would end the process.
template <typename Run>
ffi::Error reported(const Run& run) {
  try {
    run();
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return {ffi::ErrorCode::kResourceExhausted, "jattn: no memory for the tiles of its kernel in C++"};
  } catch (const std::exception& error) {
    return {ffi::ErrorCode::kInternal, std::string("jattn: ") + error.what()};
  }
}

}  // namespace
