// Linear attention, called from XLA: the pairs within a chunk of tokens, and a state of all earlier
// tokens. For the queries q [c, F], keys k [c, F] and values v [c, V] of a chunk
//
//   out   [c, V] = ((q · kT) ∘ between) · v + (q ∘ before) · state
//   state [F, V] = total ∘ state + (k ∘ after)T · v
//
// where `between` are the products of the decays after token j up to token i, `before` those from the
// chunk's start to token i, `after` those from token j to the chunk's end, and `total` those of the
// chunk. They are built token by token by multiplications alone, so that a decay of 0 is exact.

#include "native.h"
#include "rule.h"

namespace {

constexpr Index kTokens = 32;           // tokens of a chunk
constexpr Index kTokensByFeature = 16;  // the same if decays differ by feature
constexpr auto kEachLane = std::make_integer_sequence<int, kLanes>();

// The arrays of a call. Tokens have d = 1 or d = F log decays, and none if `logs` is null.
struct LinearCall {
  const T *q, *k, *v, *logs, *values, *keys;
  T *out, *denominators, *new_values, *new_keys;
  Index B, t, N, K, F, V, d;
  bool maps, divides, strict;  // see `xla.linear.Formula`

  Rows<const T> tokens(const T* x, Index b, Index n, Index heads, Index size) const {
    return {x + (b * t * heads + n) * size, heads * size, size};
  }
};

// elu(x) + 1.
inline Vector elu_plus_one(Vector x) {
  return x > 0 ? x + 1 : exp_of(x > 0 ? Vector{} : x);
}

// Key heads that lie side by side, with their query heads: chunk after chunk of tokens, and the state
// before the chunk.
template <bool kByFeature>
class Scan {
  static constexpr Index L = kLanes, C = kByFeature ? kTokensByFeature : kTokens;
  static constexpr Index kKeys = (C + L - 1) / L * L;  // of a row of weights

 public:
  Scan(const LinearCall& call, Index b, Index first, Index heads)
      : call_(call), b_(b), first_(first), heads_(heads), G_(call.N / call.K), F_(up(call.F, L)),
        V_(up(call.V, L)),
        bench_(heads * (call.F * V_ + F_) + call.F * kKeys + (1 + C) * F_ + 2 * C * V_ +
               G_ * C * (F_ + kKeys) + kKeys) {
    states_ = bench_.take(heads * (call.F * V_ + F_));
    keys_ = bench_.take(C * F_), values_ = bench_.take(C * V_), total_ = bench_.take(F_);
    queries_ = bench_.take(G_ * C * F_), weights_ = bench_.take(G_ * C * kKeys);
    transposed_ = bench_.take(call.F * kKeys);
    out_ = bench_.take(C * V_), denominators_ = bench_.take(kKeys);
  }

  void run() {
    const Index F = call_.F, V = call_.V;
    const auto each_head = [&](const auto& work) {
      for (Index k = first_; k < first_ + heads_; ++k) {
        k_ = k, state_ = states_ + (k - first_) * (F * V_ + F_), sums_ = state_ + F * V_;
        work(b_ * call_.K + k);
      }
    };
    each_head([&](Index head) {
      copy(Rows<const T>{call_.values + head * F * V, V, V}, F, state_, V_);
      copy(Rows<const T>{call_.keys + head * F, F, F}, 1, sums_, F_);
    });
    for (Index i = 0; i < call_.t; i += C)
      each_head([&](Index) { chunk(i, std::min(C, call_.t - i)); });
    each_head([&](Index head) {
      put({call_.new_values + head * F * V, V, V}, state_, F, V_, T{1}, Put::kOver);
      put({call_.new_keys + head * F, F, F}, sums_, 1, F_, T{1}, Put::kOver);
    });
  }

 private:
  // Computes the results of `count` tokens from `first` on, and the state after them.
  void chunk(Index first, Index count) {
    read_features(call_.k, k_, call_.K, first, count, keys_);
    copy(call_.tokens(call_.v, b_, k_, call_.K, call_.V).from(first), count, values_, V_);
    for (Index g = 0; g < G_; ++g)
      read_features(call_.q, k_ * G_ + g, call_.N, first, count, queries_ + g * C * F_);
    if constexpr (kByFeature) {
      weigh_and_decay(call_.tokens(call_.logs, b_, k_, call_.K, call_.F).from(first), count);
    } else {
      weigh(count);
      if (call_.logs) decay(call_.tokens(call_.logs, b_, k_, call_.K, 1).from(first), count);
    }
    for (Index g = 0; g < G_; ++g) write(g, first, count);
    if (call_.logs) {
      for (Index f = 0; f < call_.F; ++f) scale(state_ + f * V_, V_, total_[f]);
      multiply(sums_, total_);
    }
    product(call_.F, V_, count, keys_, 1, F_, values_, V_, state_, V_, true);
    for (Index j = 0; j < count; ++j) put_row(sums_, keys_ + j * F_, F_, T{1}, Put::kAdd);
  }

  // Reads the features of queries or keys, padded with 0 to whole vectors.
  void read_features(const T* x, Index n, Index heads, Index first, Index count, T* to) const {
    copy(call_.tokens(x, b_, n, heads, call_.F).from(first), count, to, F_);
    if (!call_.maps) return;
    for (Index i = 0; i < count; ++i, to += F_) {
      for (Index f = 0; f < F_; f += L) store(to + f, elu_plus_one(load(to + f)));
      std::fill(to + call_.F, to + F_, T{0});
    }
  }

  void multiply(T* x, const T* factors) const {
    for (Index f = 0; f < F_; f += L) store(x + f, load(x + f) * load(factors + f));
  }

  // Computes the weights of all pairs, without decays.
  void weigh(Index count) {
    transpose(Rows<const T>{keys_, F_, call_.F}, count, kKeys, transposed_, T{1});
    for (Index g = 0; g < G_; ++g)
      product(count, kKeys, call_.F, queries_ + g * C * F_, F_, 1, transposed_, kKeys,
              weights_ + g * C * kKeys, kKeys, false);
  }

  // Multiplies weights, queries and keys by decays, given one log for each token.
  void decay(Rows<const T> logs, Index count) {
    alignas(kBytes) T between[kKeys] = {};  // for each key, up to token i
    T before = 1;
    for (Index i = 0; i < count; ++i) {
      const T factor = std::exp(*logs[i]);
      before *= factor;
      scale(between, kKeys, factor);
      between[i] = 1;
      for (Index at = i; at < G_ * C; at += C) {
        scale(queries_ + at * F_, F_, before);
        T* weights = weights_ + at * kKeys;
        for (Index j = 0; j < kKeys; j += L)
          store(weights + j, load(weights + j) * load(between + j));
      }
    }
    for (Index j = 0; j < count; ++j) scale(keys_ + j * F_, F_, between[j]);
    std::fill(total_, total_ + F_, before);
  }

  // Does the work of `weigh` and `decay`, given a log for each feature: at token i, the keys are those
  // up to i, multiplied by their decays up to i.
  void weigh_and_decay(Rows<const T> logs, Index count) {
    T* factors = transposed_;
    std::fill(total_, total_ + F_, T{1});
    for (Index i = 0; i < count; ++i) {
      copy(logs.from(i), 1, factors, F_);
      for (Index f = 0; f < F_; f += L) store(factors + f, exp_of(load(factors + f)));
      multiply(total_, factors);
      for (Index j = 0; j < i; ++j) multiply(keys_ + j * F_, factors);
      for (Index at = i; at < G_ * C; at += C) {
        T* query = queries_ + at * F_;
        for (Index j = 0; j < kKeys; j += L) {
          Vector sums[L] = {};
          for (Index l = 0; l < std::min(L, i + 1 - j); ++l)
            for (Index f = 0; f < F_; f += L)
              sums[l] += load(query + f) * load(keys_ + (j + l) * F_ + f);
          store(weights_ + at * kKeys + j, add_lanes<1>(sums, kEachLane));
        }
        multiply(query, total_);
      }
    }
  }

  // Writes the results of one query head, from the weights and the state before the chunk.
  void write(Index g, Index first, Index count) {
    const T* queries = queries_ + g * C * F_;
    T* weights = weights_ + g * C * kKeys;
    for (Index from = 0; from < count; from += L) {
      Vector sums[L] = {};
      for (Index i = from; i < std::min(count, from + L); ++i) {
        std::fill(weights + i * kKeys + i + !call_.strict, weights + (i + 1) * kKeys, T{0});
        Vector& sum = sums[i - from];
        for (Index j = 0; j < kKeys; j += L) sum += load(weights + i * kKeys + j);
        for (Index f = 0; f < F_; f += L) sum += load(queries + i * F_ + f) * load(sums_ + f);
      }
      store(denominators_ + from, add_lanes<1>(sums, kEachLane));
    }
    product(count, V_, count, weights, kKeys, 1, values_, V_, out_, V_, false);
    product(count, V_, call_.F, queries, F_, 1, state_, V_, out_, V_, true);
    const Index at = (b_ * call_.t + first) * call_.N + k_ * G_ + g, V = call_.V;
    for (Index i = 0; i < count; ++i) {
      const T sum = denominators_[i];
      T* row = out_ + i * V_;
      if (call_.divides)  // 1 / sum might not be a normal number
        for (Index h = 0; h < V_; h += L) store(row + h, sum == 0 ? Vector{} : load(row + h) / sum);
      put_row(call_.out + (at + i * call_.N) * V, row, V, T{1}, Put::kOver);
      call_.denominators[at + i * call_.N] = sum;
    }
  }

  const LinearCall& call_;
  Index b_, first_, heads_, G_, F_, V_;
  Bench bench_;
  T* states_;         // of each head
  Index k_;           // the head that is computed
  T *state_, *sums_;  // its state, [F, V] and [F]
  T *queries_, *keys_, *values_, *total_;  // [G, C, F], [C, F], [C, V], [F]
  T *weights_, *transposed_;               // [G, C, kKeys], [F, kKeys]
  T *out_, *denominators_;                 // [C, V], [C]
};

ffi::Error run_linear(ffi::ThreadPool pool, Buffer q, Buffer k, Buffer v, Buffer logs, Buffer values,
                      Buffer keys, Out out, Out denominators, Out new_values, Out new_keys, bool maps,
                      bool divides, bool strict) {
  const auto read = [](const Buffer& x) { return static_cast<const T*>(x.untyped_data()); };
  const auto written = [](Out& x) { return static_cast<T*>(x->untyped_data()); };
  return reported([&] {
    const LinearCall call{read(q), read(k), read(v), logs.element_count() ? read(logs) : nullptr,
                    read(values), read(keys), written(out), written(denominators),
                    written(new_values), written(new_keys), leading(q, 3), axis(q, 3), axis(q, 2),
                    axis(k, 2), axis(k, 1), axis(v, 1), axis(logs, 1), maps, divides, strict};
    const bool by_feature = call.logs && call.d > 1;
    // Heads that lie side by side are computed together, if that leaves enough parts for all threads.
    const Index enough = 2 * std::max<Index>(1, pool.num_threads());
    const Index parts = std::min(call.K, (enough + call.B - 1) / std::max<Index>(call.B, 1));
    const Index heads = (call.K + parts - 1) / parts, runs = (call.K + heads - 1) / heads;
    parallel(pool, call.B * runs, [&](Index i) {
      const Index b = i / runs, k = i % runs * heads, count = std::min(heads, call.K - k);
      by_feature ? Scan<true>(call, b, k, count).run() : Scan<false>(call, b, k, count).run();
    });
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jattn_linear, run_linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<Buffer>().Arg<Buffer>().Arg<Buffer>().Arg<Buffer>()
                                  .Arg<Buffer>().Arg<Buffer>()
                                  .Ret<Buffer>().Ret<Buffer>().Ret<Buffer>().Ret<Buffer>()
                                  .Attr<bool>("maps").Attr<bool>("divides").Attr<bool>("strict"));
