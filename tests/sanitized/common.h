// Helpers of the programs that run the kernels without XLA: random shapes, arrays without slack,
// limited memory, and comparisons.

#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "xla/ffi/api/ffi.h"

// Allocations of this many bytes or more fail: no kernel may end the process for that.
static std::atomic<size_t> memory_limit{SIZE_MAX};

void* operator new(size_t size) {
  void* memory = size < memory_limit ? std::malloc(size) : nullptr;
  if (!memory) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

using Sizes = std::vector<int64_t>;

std::mt19937 generator;

Index below(Index n) { return std::uniform_int_distribution<Index>(0, n - 1)(generator); }
Index between(Index low, Index high) { return low + below(high - low + 1); }
bool once_in(Index n) { return below(n) == 0; }
double normal() { return std::normal_distribution<double>()(generator); }

// An array that ends where its memory does, sometimes at odd addresses.
template <typename E>
class Array {
 public:
  explicit Array(Sizes sizes) : sizes_(std::move(sizes)) {
    for (int64_t size : sizes_) count_ *= size;
    const size_t before = once_in(4) ? sizeof(E) : 0;
    if (posix_memalign(&memory_, 64, count_ * sizeof(E) + before)) std::abort();
    data_ = reinterpret_cast<E*>(static_cast<char*>(memory_) + before);
    // So that entries that are never written are noticed.
    for (Index i = 0; i < count_; ++i) data_[i] = static_cast<E>(1e30);
  }
  Array(Sizes sizes, double scale) : Array(std::move(sizes)) {
    for (Index i = 0; i < count_; ++i) data_[i] = static_cast<E>(scale * normal());
  }
  Array(const Array&) = delete;
  ~Array() { std::free(memory_); }

  E& operator[](Index i) { return data_[i]; }
  E operator[](Index i) const { return data_[i]; }
  E* data() const { return data_; }
  Index count() const { return count_; }
  xla::ffi::AnyBuffer buffer() const {
    using xla::ffi::DataType;
    const auto wide = sizeof(E) == 8 ? DataType::F64 : DataType::F32;
    return buffer(sizeof(E) == 2 ? DataType::BF16 : wide);
  }
  xla::ffi::AnyBuffer buffer(xla::ffi::DataType type) const { return {data_, sizes_, type}; }
  xla::ffi::Result<xla::ffi::AnyBuffer> result() const {
    return xla::ffi::Result<xla::ffi::AnyBuffer>(buffer());
  }

 private:
  Sizes sizes_;
  Index count_ = 1;
  void* memory_ = nullptr;
  E* data_;
};

// Rounds numbers to bfloat16, as many as `to` has room for.
void halve(Array<T>& x, Array<uint16_t>& to) {
  for (Index i = 0; i < to.count(); ++i) {
    float value = static_cast<float>(x[i]);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    to[i] = bits >> 16;
    bits &= 0xffff0000u;
    std::memcpy(&value, &bits, 4);
    x[i] = value;
  }
}

// Ends the program if a result is not close to the expected one.
void expect(const char* what, const Array<T>& got, const std::vector<double>& want) {
  const double close = sizeof(T) == 4 ? 1e-4 : 1e-12;
  for (Index i = 0; i < got.count(); ++i) {
    const double x = got[i], y = want[i];
    if (x == y || std::abs(x - y) <= close * (1 + std::abs(y))) continue;
    std::fprintf(stderr, "%s [%td]: %.9g, expected %.9g\n", what, i, x, y);
    std::exit(1);
  }
}

// Runs random calls from a seed. The argument of a round is whether memory is limited.
template <typename Round>
int rounds(int argc, char** argv, const Round& round) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 100, seed = argc > 2 ? std::atoi(argv[2]) : 0;
  int failed = 0;
  for (int i = 0; i < count; ++i) {
    generator.seed(seed * 100000 + i);
    xla::ffi::ThreadPool pool(between(1, 5), once_in(3) ? between(1, 3) : 0);
    const bool limited = once_in(4);
    failed += !round(pool, limited);
  }
  std::printf("%d calls as expected, %d of them out of memory\n", count, failed);
  return 0;
}

// Whether a call succeeds. It may run out of memory, but only if memory is limited.
template <typename Call>
bool runs(bool limited, const Call& call) {
  memory_limit = limited ? between(200, 60000) : SIZE_MAX;
  const xla::ffi::Error error = call();
  memory_limit = SIZE_MAX;
  if (error.success()) return true;
  if (limited && error.code() == xla::ffi::ErrorCode::kResourceExhausted) return false;
  std::fprintf(stderr, "a call failed with code %d\n", static_cast<int>(error.code()));
  std::exit(1);
}

}  // namespace
