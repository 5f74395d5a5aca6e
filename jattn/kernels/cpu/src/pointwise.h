// Normalizers whose weights depend on the score of their pair only: functions of vectors of scores.

#pragma once

#include "rule.h"

namespace {

// The functions from scores to weights, numbered as in `built_in.Weights`. With kScores the scores, as
// a generated rule leaves them, are the weights. Those from kEntmax on need all scores of a query.
enum class Normalizer {
  kSoftmax, kScores, kSigmoid, kRelu, kSquaredRelu, kExp, kEntmax, kTopK, kStickBreaking
};

// The normalizer of a call. `constant` is the bias of kSigmoid, the factor of the two kRelu, the alpha
// of kEntmax and the k of kTopK.
struct NormalizerRule {
  Normalizer kind;
  double constant;

  bool by_rows() const { return kind >= Normalizer::kEntmax; }
  bool pointwise() const { return kind != Normalizer::kSoftmax && !by_rows(); }
};

// Weights, and their derivatives by scores. A masked pair has the score -infinity and the weight 0.
struct Weighted {
  Vector weight, slope;
};

#if JATTN_SINGLE && defined(__AVX512DQ__)

// e^x for all x.
inline Vector exp_weight(Vector x) {
  const auto [high, r, slope] = power_of_two(x * kLog2e);
  return high * (1 + r * slope);
}

// 1 / (1 + e^-(x + bias)) for all x.
inline Vector sigmoid_weight(Vector x, T bias) {
  const auto [high, r, slope] = power_of_two(x * -kLog2e - bias * kLog2e);
  return 1 / (1 + high * (1 + r * slope));
}

#else

inline Vector exp_weight(Vector x) { return exp_of(x); }
inline Vector sigmoid_weight(Vector x, T bias) {
  x += bias;
#if JATTN_SINGLE
  const Vector found = reciprocal(1 + exponential(-x));  // e^-x may overflow
  return x < -87 ? Vector{} : found;
#else
  return logistic_of(x);
#endif
}

#endif

template <Normalizer kKind>
inline Weighted weighted(Vector x, T constant) {
  constexpr bool kIsRelu = kKind == Normalizer::kRelu, kSquared = kKind == Normalizer::kSquaredRelu;
  if constexpr (kKind == Normalizer::kSigmoid) {
    const Vector w = sigmoid_weight(x, constant);
    return {w, w - w * w};
  } else if constexpr (kIsRelu) {
    return {greatest(x, Vector{}) * constant, x > 0 ? all(constant) : Vector{}};
  } else if constexpr (kSquared) {
    const Vector y = greatest(x, Vector{});
    return {y * y * constant, y * (2 * constant)};
  } else if constexpr (kKind == Normalizer::kExp) {
    const Vector w = exp_weight(x);
    return {w, w};
  } else {
    return {x == -kInfinity ? Vector{} : x, all(1)};
  }
}

// Calls `run` with the kind of a normalizer, which is not the softmax, as a constant.
template <typename Run>
inline void by_kind(Normalizer kind, const Run& run) {
  using N = Normalizer;
  switch (kind) {
    case N::kSigmoid: return run(std::integral_constant<N, N::kSigmoid>{});
    case N::kRelu: return run(std::integral_constant<N, N::kRelu>{});
    case N::kSquaredRelu: return run(std::integral_constant<N, N::kSquaredRelu>{});
    case N::kExp: return run(std::integral_constant<N, N::kExp>{});
    default: return run(std::integral_constant<N, N::kScores>{});
  }
}

}  // namespace
