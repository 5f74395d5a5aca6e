// The distribution of a call over the threads of XLA: the queries and keys of heads for each of them.

#pragma once

#include "backward.h"
#include "call.h"
#include "forward.h"
#include "statistics.h"

namespace {

void forward_all(ffi::ThreadPool& pool, const Call& call, Outputs out, Heads<T> most,
                 Heads<T> log_sum, bool sums) {
  const Index N = call.N, enough = 4 * std::max<Index>(1, pool.num_threads());
  auto pieces_of = [&](Index size) { return (call.t + size - 1) / size; };
  Index size = kTogether * kQueries;
  while (size > kQueries && call.B * N * pieces_of(size) < enough) size /= 2;
  const Index pieces = pieces_of(size);
  const Put how = put_of(call.B * call.t * N * out.vectors.size);
  // With a causal mask the last queries see most keys, so they are computed first.
  parallel(pool, call.B * N * pieces, [&](Index task) {
    const Index n = task % N, b = task / N % call.B, piece = pieces - 1 - task / N / call.B;
    const Index first = piece * size;
    const Index count = std::min(size, call.t - first);
    const Results to = {out.at(b, n), most.at(b, n), log_sum.at(b, n), sums, how};
    const Head head = call.head(b, n);
    by_products(call, [&](auto products) {
      using Products = decltype(products);
      if (!call.normalizer.by_rows()) return forward<Products>(head, first, count, to);
      by_normalizer(call.normalizer, [&](auto normalizer) {
        forward_by_rows<Products>(head, normalizer, first, count, to.out, how);
      });
    });
  });
}

struct Gradients {
  Heads<const T> d_out, most, log_sum, delta;
  Heads<T> d_q, d_k, d_v;
  T* d_bias;
  Index diagonals;
  Put how;

  Back at(Index b, Index n, Index group) const {
    return {d_out.at(b, n), most.at(b, n),        log_sum.at(b, n),     delta.at(b, n),
            d_q.at(b, n),   d_k.at(b, n / group), d_v.at(b, n / group), how};
  }
  Head head(const Call& call, Index b, Index n) const {
    Head one = call.head(b, n);
    one.rules.d_bias = diagonals ? d_bias + (b * call.N + n) * diagonals : nullptr;
    return one;
  }
  bool has_parameters(const Call& call) const { return diagonals || call.own.has_gradients(); }
  // Sets the gradients of a head's parameters to 0.
  void clear_parameters(const Call& call, Index b, Index n) const {
    for (size_t i = 0; i < call.own.gradients.size(); ++i)
      if (char* sums = call.own.gradients[i])
        std::memset(sums + (b * call.N + n) * call.own.sizes[i], 0, call.own.sizes[i]);
    T* sums = head(call, b, n).rules.d_bias;
    if (sums) std::fill(sums, sums + diagonals, T{0});
  }
};

// If there are fewer heads than threads, the runs of a head's keys are divided into `count` parts. Each
// part sums its gradients of queries separately; the first part uses the result itself.
struct Parts {
  Index count, t, heads, size, each;  // [B, t, heads, size], of `each` numbers
  std::unique_ptr<T[]> sums;

  Parts(Index count, const Call& call)
      : count(count), t(call.t), heads(call.N), size(call.q.vectors.size),
        each(call.B * t * heads * size), sums(new T[(count - 1) * each]) {}

  Rows<T> at(Index part, Index b, Index n) const {
    return Heads<T>{{sums.get() + (part - 1) * each, size, size}, t, heads}.at(b, n);
  }
  // Forwards and backwards alternately, so that with a causal mask all parts have equal work.
  Index of(Index run) const {
    const Index turn = run / count, place = run % count;
    return turn % 2 ? count - 1 - place : place;
  }
  void add_to(Rows<T> d_q, Index b, Index n, Index i) const {
    for (Index part = 1; part < count; ++part) {
      const T* x = at(part, b, n)[i];
      for (Index h = 0; h < size; ++h) d_q[i][h] += x[h];
    }
  }
};

// One thread's part of the backward pass.
template <typename Products>
struct Worker {
  const Call& call;
  const Gradients& all;
  Index S, H, V, group;
  typename Products::Session session;
  Bench bench;
  Sums<Products> sums;

  Worker(const Call& call, const Gradients& all)
      : call(call),
        all(all),
        S(call.S),
        H(up(call.q.vectors.size, kLanes)),
        V(up(call.v.vectors.size, kLanes)),
        group(call.N / call.K),
        bench(Sums<Products>::size(H, V) + BackwardBlock<Products>::size(H, V)),
        sums(H, V, bench) {}

  Head head(Index b, Index n) const { return all.head(call, b, n); }

  // Computes the gradients of keys from .. until - 1 of key head k, and their part of the queries'.
  template <Of kOf>
  void keys(Index b, Index k, Index from, Index until, const Parts* parts = nullptr,
            Index part = 0) {
    std::fill(sums.d_k, sums.d_k + (until - from) * H, T{0});
    std::fill(sums.d_v, sums.d_v + (until - from) * V, T{0});
    for (Index n = k * group; n < (k + 1) * group; ++n) {
      const Head one = head(b, n);
      if (n == k * group) sums.tile.read(one.k.from(from), one.v.from(from), until - from);
      Back to = all.at(b, n, group);
      to.begin = part * kRun;
      if (part) to.d_q = parts->at(part, b, n);
      backward<kOf>(one, to, 0, call.t, from, until, sums, H, V, bench);
    }
    const Back to = all.at(b, k * group, group);
    put(to.d_k.from(from), sums.d_k, until - from, H, call.scale, all.how);
    put(to.d_v.from(from), sums.d_v, until - from, V, T{1}, all.how);
  }

  // Computes all gradients of key head k and its query heads.
  void heads(Index b, Index k) {
    for (Index n = k * group; n < (k + 1) * group; ++n) all.clear_parameters(call, b, n);
    for (Index from = 0; from < S; from += kRun) keys<Of::kAll>(b, k, from, std::min(S, from + kRun));
  }

  // Computes the gradients of one part of the keys of key head k, and their part of the queries'.
  void share(Index b, Index k, const Parts& parts, Index part) {
    for (Index from = 0; from < S; from += kRun)
      if (parts.of(from / kRun) == part)
        keys<Of::kAll>(b, k, from, std::min(S, from + kRun), &parts, part);
  }

  // Computes the gradients of queries first .. last - 1 alone.
  void queries(Index b, Index n, Index first, Index last) {
    const Head one = head(b, n);
    const Back to = all.at(b, n, group);
    for (Index from = 0; from < S; from += kRun) {
      const Index until = std::min(S, from + kRun);
      sums.tile.read(one.k.from(from), one.v.from(from), until - from);
      backward<Of::kQueries>(one, to, first, last, from, until, sums, H, V, bench);
    }
  }
};

// Returns the number of parts of the keys of each head that gives all threads equal work; 0 if it is
// too large: each part needs the memory of the queries' gradients.
Index parts_of(Index units, Index threads, Index runs) {
  for (Index parts = 1; parts <= 8 && (parts == 1 || parts <= runs); ++parts)
    if (units * parts >= 4 * threads || units * parts % threads == 0) return parts;
  return 0;
}

template <typename Products>
void backward_all(ffi::ThreadPool& pool, const Call& call, const Gradients& all) {
  using OneWorker = Worker<Products>;
  const Index K = call.K, N = call.N, units = call.B * K, t = call.t, S = call.S;
  const Index runs = (S + kRun - 1) / kRun, blocks = (t + kRun - 1) / kRun;
  const Index threads = std::max<Index>(1, pool.num_threads());
  const Index count = all.has_parameters(call) ? 1 : parts_of(units, threads, runs);
  if (count == 1) {
    parallel(pool, units, [&](Index i) { OneWorker(call, all).heads(i / K, i % K); });
    return;
  }
  // Calls `work` for each block of queries of all heads, the last block first.
  auto each_block = [&](auto work) {
    parallel(pool, call.B * N * blocks, [&](Index i) {
      const Index head = i / blocks, first = (blocks - 1 - i % blocks) * kRun;
      work(head / N, head % N, first, std::min(t, first + kRun));
    });
  };
  if (count) {
    const Parts parts(count, call);
    parallel(pool, units * count, [&](Index i) {
      const Index unit = i % units;
      OneWorker(call, all).share(unit / K, unit % K, parts, i / units);
    });
    each_block([&](Index b, Index n, Index first, Index last) {
      for (Index i = first; i < last; ++i) parts.add_to(all.d_q.at(b, n), b, n, i);
    });
    return;
  }
  // There are many more threads than heads: runs of keys are computed first, then runs of queries.
  // Weights are computed twice, so that no two threads add to the same place.
  parallel(pool, units * runs, [&](Index i) {
    const Index unit = i % units, from = i / units * kRun;
    const Index until = std::min(S, from + kRun);
    OneWorker(call, all).template keys<Of::kKeys>(unit / K, unit % K, from, until);
  });
  each_block([&](Index b, Index n, Index first, Index last) {
    OneWorker(call, all).queries(b, n, first, last);
  });
}

// The gradients of keys or values that parts of the queries sum separately, like the result of the
// first part, to which they are added.
struct KeyParts {
  Heads<T> result;
  Index each;  // numbers of one part
  std::unique_ptr<T[]> sums;

  KeyParts(const Heads<T>& result, Index B, Index count)
      : result(result), each(B * result.tokens * result.heads * result.vectors.size),
        sums(new T[(count - 1) * each]) {}

  Rows<T> at(Index part, Index b, Index k) const {
    Heads<T> heads = result;
    if (part) heads.vectors.start = sums.get() + (part - 1) * each;
    return heads.at(b, k);
  }
  void join(Index count, Index b, Index k) const {
    const Rows<T> to = at(0, b, k);
    for (Index part = 1; part < count; ++part)
      for (Index j = 0; j < result.tokens; ++j)
        for (Index h = 0; h < to.size; ++h) to[j][h] += at(part, b, k)[j][h];
  }
};

// The gradients of a call with a normalizer of rows. If there are fewer heads than threads, the blocks
// of queries are divided into parts.
template <typename Products>
void backward_all_by_rows(ffi::ThreadPool& pool, const Call& call, const Gradients& all) {
  const Index K = call.K, group = call.N / K, units = call.B * K, t = call.t, S = call.S;
  const Index H = up(call.q.vectors.size, kLanes), V = up(call.v.vectors.size, kLanes);
  const Index threads = std::max<Index>(1, pool.num_threads());
  const Index blocks = (t + kQueries - 1) / kQueries, most = parts_of(units, threads, blocks);
  const Index count = all.has_parameters(call) ? 1 : most ? most : std::min<Index>(8, blocks);
  const KeyParts d_k(all.d_k, call.B, count), d_v(all.d_v, call.B, count);
  parallel(pool, units * count, [&](Index task) {
    const Index unit = task % units, b = unit / K, k = unit % K, part = task / units;
    const typename Products::Session session;
    RowSums<Products> sums(H, V, S);
    if (S) sums.tile.read(call.k.at(b, k), call.v.at(b, k), S);
    for (Index n = k * group; n < (k + 1) * group; ++n) {
      if (!part) all.clear_parameters(call, b, n);
      const Head head = all.head(call, b, n);
      const Back to = all.at(b, n, group);
      by_normalizer(call.normalizer, [&](auto normalizer) {
        for (Index turn = 0, m; (m = turn * count + (turn % 2 ? count - 1 - part : part)) < blocks; ++turn)
          backward_by_rows(head, normalizer, to.d_out, to.d_q, m * kQueries,
                           std::min(kQueries, t - m * kQueries), all.how, sums);
      });
    }
    put(d_k.at(part, b, k), sums.d_k, S, H, call.scale, Put::kOver);
    put(d_v.at(part, b, k), sums.d_v, S, V, T{1}, Put::kOver);
  });
  if (count > 1) parallel(pool, units, [&](Index i) {
    d_k.join(count, i / K, i % K), d_v.join(count, i / K, i % K);
  });
}

// The question and the destinations of the statistics of a call; missing statistics have no rows.
struct Statistics {
  Heads<const T> maximum, log_total;
  Shared<int32_t> q_positions, kv_positions;
  Shared<T> marks;
  T threshold;
  Heads<T> entropy, greatest, distance, on_keys, above;
  Heads<int32_t> place;
  T* received;  // [B, N, S]

  Asked asked(Index b, Index n) const {
    return {maximum.at(b, n),      log_total.at(b, n), q_positions.at(b, n),
            kv_positions.at(b, n), marks.at(b, n),     threshold};
  }
  Found at(Index b, Index n) const {
    return {entropy.at(b, n), greatest.at(b, n), distance.at(b, n),
            on_keys.at(b, n), above.at(b, n),    place.at(b, n)};
  }
};

// Divides a head's queries into enough pieces to keep the threads busy. The weights that keys receive
// are summed for each piece, and then over all pieces.
void statistics_all(ffi::ThreadPool& pool, const Call& call, const Statistics& all) {
  const Index N = call.N, units = call.B * N, S = call.S, group = kTogether * kQueries;
  const Index enough = 4 * std::max<Index>(1, pool.num_threads());
  const Index most = std::max<Index>(1, (call.t + kQueries - 1) / kQueries);
  const Index wanted = std::clamp<Index>((enough + units - 1) / std::max<Index>(1, units), 1, most);
  const Index size = up((call.t + wanted - 1) / wanted, kQueries);
  const Index pieces = std::max<Index>(1, (call.t + size - 1) / std::max<Index>(1, size));
  std::vector<T> apart(pieces > 1 ? pieces * units * S : 0);
  std::fill(all.received, all.received + units * S, T{0});
  T* sums = pieces > 1 ? apart.data() : all.received;
  parallel(pool, units * pieces, [&](Index task) {
    const Index unit = task % units, n = unit % N, b = unit / N, piece = pieces - 1 - task / units;
    const Index end = std::min(call.t, (piece + 1) * size);
    const Head head = call.head(b, n);
    for (Index first = piece * size; first < end; first += group)
      by_products(call, [&](auto products) {
        statistics<decltype(products)>(head, all.asked(b, n), first, std::min(group, end - first),
                                       all.at(b, n), sums + (piece * units + unit) * S);
      });
  });
  if (pieces == 1) return;
  for (Index piece = 0; piece < pieces; ++piece)
    for (Index i = 0; i < units * S; ++i) all.received[i] += apart[piece * units * S + i];
}

}  // namespace
