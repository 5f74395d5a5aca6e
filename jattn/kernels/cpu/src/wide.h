// Products of attention in T, and the operands that a tile of keys and a block of queries hold.

#pragma once

#include "native.h"

namespace {

struct Wide {
  static constexpr bool kScales = true;  // whether queries come multiplied with the scale
  static constexpr Index kFewestLanes = kLanes;  // of a product
  static Index room(Index keys) { return keys; }  // numbers for the scores or weights of one query

  // Weights of kKeys keys are written together, for `rows(keys)` keys in all: zeros for the last ones.
  static constexpr int kKeys = 1;
  static constexpr bool kRounds = false;  // whether weights that need not be exact are rounded
  static Index rows(Index keys) { return keys; }
  static void put_weights(const Vector* weights, T* scores, Index s, Index, Index t, bool) {
    store(scores + s * t, weights[0]);
  }

  // The state of a thread while it computes products: none.
  struct Session {
    ~Session() {}
  };

  // Copies of some keys and values without the other heads, which lie between them in the arrays.
  // Values that are not finite are 0; `nonfinite` makes the queries that attend to them NaN.
  struct Tile {
    Index H, V;
    T *k, *v, *finite_k;           // finite_k: k with 0 for what is not finite
    T down = 1;                    // the factor of values, so that sums do not overflow
    const T* nonfinite = nullptr;  // null if all is finite

    static Index size(Index H, Index V, Index keys) { return keys * (2 * H + V + 1); }

    Tile(Index H, Index V, Index keys, bool, Bench& bench)
        : H(H), V(V), k(bench.take(keys * H)), v(bench.take(keys * V)) {
      memory_ = bench.take(keys), spare_ = bench.take(keys * H);
    }

    void read(const Input& keys, const Input& values, Index count) {
      depth_k = keys.size, depth_v = values.size;
      finite_k = k;
      if (!copy(keys, count, k, H)) {
        finite_k = std::copy(k, k + count * H, spare_) - count * H;
        zero_nonfinite(finite_k, count, H, nullptr);
      }
      nonfinite = copy_finite(values, count, v, V, memory_);
      if (down != 1) scale(v, count * V, down);
    }

    Index depth_k, depth_v;

   private:
    T *memory_, *spare_;
  };

  // A block of queries, and its sums of values.
  struct Forward {
    T* out;  // [width, V], times the sum of weights

    static Index size(Index width, Index H, Index V) { return width * (H + V); }

    Forward(const Input& q, Index count, Index width, Index H, Index V, T scale, Bench& bench)
        : count_(count), t_(width), V_(V), transposed_(bench.take(H * width)) {
      out = bench.take(width * V);
      transpose(q, count, width, transposed_, scale);
    }

    void scores(const Tile& tile, Index at, Index keys, Lanes lanes, T* to) const {
      product(keys, lanes.size, tile.depth_k, tile.k + at * tile.H, tile.H, 1,
              transposed_ + lanes.first, t_, to, lanes.size, false);
    }
    void clear() { std::fill(out, out + t_ * V_, T{0}); }
    void add(const Tile& tile, Index at, Index keys, Lanes lanes, const T* weights, bool fresh, bool) {
      const Index count = std::min(count_, lanes.end()) - lanes.first;
      product(count, V_, keys, weights, 1, lanes.size, tile.v + at * V_, V_, out + lanes.first * V_, V_,
              !fresh);
    }
    void rescale(Lanes lanes, const T* factors) {
      for (Index i = lanes.first; i < std::min(count_, lanes.end()); ++i)
        for (Index h = 0; h < V_; h += kLanes)
          store(out + i * V_ + h, load(out + i * V_ + h) * factors[i]);
    }
    // Called when all is added, before `out` is read.
    void settle() {}

   private:
    Index count_, t_, V_;
    T* transposed_;  // scale q, [H, width]
  };

  // A block of queries with the cotangent of its outputs, and the queries' gradients.
  struct Backward {
    T* d_query;  // [width, H]

    static Index size(Index width, Index, Index H, Index V) { return width * (3 * H + 2 * V); }

    Backward(Index width, Index, Index H, Index V, Bench& bench) : t_(width), H_(H), V_(V) {
      q_ = bench.take(t_ * H), d_out_ = bench.take(t_ * V), d_query = bench.take(t_ * H);
      q_transposed_ = bench.take(t_ * H), d_transposed_ = bench.take(t_ * V);
    }

    void read(const Input& q, Rows<const T> d_out, Index count, T scale) {
      count_ = count;
      if (!copy(q, count, q_, H_)) zero_nonfinite(q_, count, H_, nullptr);
      copy(d_out, count, d_out_, V_);
      transpose(q, count, t_, q_transposed_, scale);
      transpose(d_out, count, t_, d_transposed_, T{1});
      std::fill(d_query, d_query + t_ * H_, T{0});
    }

    // q k and d_out v.
    void products(const Tile& tile, Index at, Index keys, Lanes lanes, T* scores,
                  T* d_weights) const {
      const T *k = tile.k + at * H_, *v = tile.v + at * V_;
      const T *q = q_transposed_ + lanes.first, *d_out = d_transposed_ + lanes.first;
      product(keys, lanes.size, tile.depth_k, k, H_, 1, q, t_, scores, lanes.size, false);
      product(keys, lanes.size, tile.depth_v, v, V_, 1, d_out, t_, d_weights, lanes.size, false);
    }
    void add_to_keys(Index keys, Lanes lanes, const T* weights, const T* d_scores, T* d_k, T* d_v) {
      const Index n = count(lanes), t = lanes.size;
      product(keys, V_, n, weights, t, 1, d_out_ + lanes.first * V_, V_, d_v, V_, true);
      product(keys, H_, n, d_scores, t, 1, q_ + lanes.first * H_, H_, d_k, H_, true);
    }
    void add_to_queries(const Tile& tile, Index at, Index keys, Lanes lanes, const T* d_scores) {
      product(count(lanes), H_, keys, d_scores, 1, lanes.size, tile.finite_k + at * H_, H_,
              d_query + lanes.first * H_, H_, true);
    }
    void settle() {}

   private:
    Index count(Lanes lanes) const { return std::min(count_, lanes.end()) - lanes.first; }

    Index t_, H_, V_, count_;
    T *q_, *d_out_;                    // [width, H], [width, V]
    T *q_transposed_, *d_transposed_;  // scale q, d_out: [H, width], [V, width]
  };
};

}  // namespace
