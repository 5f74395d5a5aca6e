// In place of XLA's header, for a program without XLA: arrays that are just memory, and a pool of
// threads that sometimes cannot take a task.

#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace xla::ffi {

enum class ErrorCode { kOk, kResourceExhausted, kInternal, kFailedPrecondition };

class Error {
 public:
  Error() = default;
  Error(ErrorCode code, const std::string&) : code_(code) {}
  static Error Success() { return {}; }
  bool success() const { return code_ == ErrorCode::kOk; }
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_ = ErrorCode::kOk;
};

enum class DataType { F32, F64, BF16, F16, S8, U8, F8E4M3FN };
constexpr DataType BF16 = DataType::BF16, F16 = DataType::F16, S8 = DataType::S8;
constexpr DataType U8 = DataType::U8, F8E4M3FN = DataType::F8E4M3FN;

class AnyBuffer {
 public:
  AnyBuffer(void* data, std::vector<int64_t> sizes, DataType type)
      : data_(data), sizes_(std::move(sizes)), type_(type) {}
  DataType element_type() const { return type_; }
  void* untyped_data() const { return data_; }
  const std::vector<int64_t>& dimensions() const { return sizes_; }
  size_t element_count() const {
    size_t count = 1;
    for (int64_t size : sizes_) count *= size;
    return count;
  }

 private:
  void* data_;
  std::vector<int64_t> sizes_;
  DataType type_;
};

template <typename X>
class Result {
 public:
  explicit Result(X x) : x_(std::move(x)) {}
  X& operator*() { return x_; }
  const X& operator*() const { return x_; }
  X* operator->() { return &x_; }

 private:
  X x_;
};

inline size_t ByteWidth(DataType type) {
  return type == DataType::F64 ? 8 : type == DataType::F32 ? 4 : type == DataType::S8 ? 1 : 2;
}

// A value or an error; here always a value.
template <typename X>
class ErrorOr : public Result<X> {
 public:
  using Result<X>::Result;
  bool has_error() const { return false; }
  Error error() const { return {}; }
};

// The arguments or the results of a call that its signature leaves open.
template <template <typename> class Wrapped>
class Remaining {
 public:
  Remaining(std::vector<AnyBuffer> all = {}) : all_(std::move(all)) {}
  size_t size() const { return all_.size(); }
  template <typename X>
  auto get(size_t i) const { return ErrorOr<Wrapped<X>>(Wrapped<X>(all_[i])); }

 private:
  std::vector<AnyBuffer> all_;
};
template <typename X>
using Itself = X;
using RemainingArgs = Remaining<Itself>;
using RemainingRets = Remaining<Result>;

// Threads that end with the pool; copies are the same pool, as XLA's.
class ThreadPool {
 public:
  // Of tasks, each `refused`th is not taken, for want of memory; 0: all are.
  ThreadPool(int threads, int refused) : own_(new Own, &stop) {
    own_->refused = refused;
    for (int i = 0; i < threads; ++i) own_->threads.emplace_back(&ThreadPool::work, own_.get());
  }
  int64_t num_threads() const { return own_->threads.size(); }
  template <typename F>
  void Schedule(F&& f) {
    std::lock_guard<std::mutex> lock(own_->mutex);
    if (own_->refused && ++own_->asked % own_->refused == 0) throw std::bad_alloc();
    own_->tasks.emplace_back(std::forward<F>(f));
    own_->more.notify_one();
  }

 private:
  struct Own {
    std::mutex mutex;
    std::condition_variable more;
    std::deque<std::function<void()>> tasks;
    std::vector<std::thread> threads;
    bool ended = false;
    int refused = 0, asked = 0;
  };

  static void work(Own* own) {
    std::unique_lock<std::mutex> lock(own->mutex);
    for (;;) {
      own->more.wait(lock, [&] { return own->ended || !own->tasks.empty(); });
      if (own->tasks.empty()) return;
      const std::function<void()> task = std::move(own->tasks.front());
      own->tasks.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }
  static void stop(Own* own) {
    {
      std::lock_guard<std::mutex> lock(own->mutex);
      own->ended = true;
    }
    own->more.notify_all();
    for (std::thread& thread : own->threads) thread.join();
    delete own;
  }

  std::shared_ptr<Own> own_;
};

}  // namespace xla::ffi

#define XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, ...) \
  const auto name [[maybe_unused]] = function
#define XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(...) static_assert(true)
