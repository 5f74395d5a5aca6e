// A call: the arrays of all heads, the part of each head, and the rules of this process.

#pragma once

#include "block.h"
#include "pairs.h"
#include "rows.h"
#include "wide.h"

namespace {

// The heads (b, n) of [B, t, n, size], as rows R of tokens; size is 1 if there is no such axis.
template <typename R>
struct HeadsOf {
  R vectors;  // of all tokens and heads
  Index tokens, heads;

  R at(Index b, Index n) const {
    R one = vectors.from(b * tokens * heads + n);
    one.stride *= heads;
    return one;
  }
};
template <typename E>
using Heads = HeadsOf<Rows<E>>;
using Inputs = HeadsOf<Input>;
using Outputs = HeadsOf<Output>;

template <typename E = const T>
Heads<E> heads_of(const Buffer& x, bool vectors = true) {
  const Index size = vectors ? axis(x, 1) : 1;
  return {{static_cast<E*>(x.untyped_data()), size, size},
          axis(x, 2 + vectors), axis(x, 1 + vectors)};
}
Heads<T> heads_of(Out& x, bool vectors = true) { return heads_of<T>(*x, vectors); }

Inputs inputs_of(const Buffer& x) {
  const Index size = axis(x, 1);
  return {{static_cast<const char*>(x.untyped_data()), size, size, x.element_type()},
          axis(x, 3), axis(x, 2)};
}

Outputs outputs_of(Out& x) {
  const Index size = axis(*x, 1);
  return {{static_cast<char*>(x->untyped_data()), size, size, x->element_type()},
          axis(*x, 3), axis(*x, 2)};
}

// Results of a MiB or more do not stay in the caches until they are read.
Put put_of(Index size) { return size * sizeof(T) >= 1 << 20 ? Put::kPast : Put::kOver; }

// The rules of this process, in lists by the last bits of their numbers. Rules are added and never
// removed, so that compiled programs find theirs, and no lock is held when a process forks.
std::atomic<const Generated*> rules_by_number[256];

std::atomic<const Generated*>& rules_like(int64_t number) { return rules_by_number[number & 255]; }

std::atomic<void (*)(int64_t)> ask_for_rule{nullptr};

const Generated* rule_of(int64_t number) {
  const Generated* rule = rules_like(number);
  while (rule && rule->number != number) rule = rule->next;
  return rule;
}

// The rule of a call: `map`, then its operands; and the gradients of those that have one.
struct CallRule {
  const Generated* rule = nullptr;
  Index row = 0, chunk = 0;
  std::vector<Shared<char>> operands;  // in bytes
  std::vector<char*> gradients;        // [B, N, size] or null
  std::vector<Index> sizes;            // of gradients, in bytes for each head

  bool has_gradients() const {
    return std::any_of(gradients.begin(), gradients.end(), [](char* x) { return x != nullptr; });
  }
  HeadRule head(Index b, Index n, Index N, Index t, Index S) const {
    HeadRule own;
    if (!rule) return own;
    own.rule = rule;
    own.map = reinterpret_cast<const int8_t*>(operands[0].at(b, n));
    own.chunk = chunk, own.chunks = (S + chunk - 1) / chunk, own.row = row, own.t = t, own.S = S;
    for (size_t i = 1; i < operands.size(); ++i) own.operands[i - 1] = operands[i].at(b, n);
    for (size_t i = 0; i < gradients.size(); ++i)
      own.gradients[i] = gradients[i] ? gradients[i] + (b * N + n) * sizes[i] : nullptr;
    return own;
  }
};

// The arrays that every function of the kernel takes, in the order of `native.KernelArrays`.
struct Arrays {
  Buffer query, key, value;
  Buffer start, stop, q_ids, kv_ids, bias, seeds;  // see Rules
};

// The numbers that every function takes, see Rules. `rule` is the number of a generated rule, or 0;
// `row` and `chunk` are the sizes of its tile map, see HeadRule. `differentiated` has a bit for each
// operand whose gradient is computed; statistics sum the weights above `least`. `normalizer` and
// `constant` are a NormalizerRule.
struct Attributes {
  double scale, cap, dropout_scale;
  int64_t threshold, rule, row, chunk, differentiated;
  double least;
  int64_t normalizer;
  double constant;
};

// A call: everything but the inputs and outputs of each query.
struct Call {
  Inputs q, k, v;
  Index B, N, K, t, S;
  Shared<int32_t> start, stop, q_ids, kv_ids;
  Shared<T> bias;
  Shared<uint32_t> seeds;
  T scale, cap, dropout_scale;
  uint32_t threshold;
  NormalizerRule normalizer;
  CallRule own;

  Call(const Arrays& x, const Attributes& attributes)
      : q(inputs_of(x.query)),
        k(inputs_of(x.key)),
        v(inputs_of(x.value)),
        B(leading(x.query, 3)),
        N(q.heads),
        K(k.heads),
        t(q.tokens),
        S(k.tokens),
        start(x.start, B),
        stop(x.stop, B),
        q_ids(x.q_ids, B),
        kv_ids(x.kv_ids, B),
        bias(x.bias, B),
        seeds(x.seeds, B),
        scale(static_cast<T>(attributes.scale)),
        cap(static_cast<T>(attributes.cap)),
        dropout_scale(static_cast<T>(attributes.dropout_scale)),
        threshold(static_cast<uint32_t>(attributes.threshold)),
        normalizer{static_cast<Normalizer>(attributes.normalizer), attributes.constant} {}

  Head head(Index b, Index n) const {
    const uint32_t* seed = seeds.at(b, n);
    const Rules rules = {start.at(b, n), stop.at(b, n), q_ids.at(b, n), kv_ids.at(b, n),
                         bias.at(b, n),  nullptr,       cap,            seed ? *seed : 0,
                         threshold,      dropout_scale, S,              own.head(b, n, N, t, S),
                         normalizer};
    const Index g = n / (N / K);
    return {q.at(b, n), k.at(b, g), v.at(b, g), rules, scale};
  }
};

// Calls `run` with the kind of products for the dtypes of queries, keys and values.
template <typename Run>
void by_products(const Call& call, const Run& run) {
#if JATTN_PAIRS
  const auto is_half = [](const Inputs& x) { return x.vectors.type == ffi::BF16; };
  if (is_half(call.q) && is_half(call.k) && is_half(call.v)) return run(Pairs{});
#endif
  run(Wide{});
}

}  // namespace
