// Compares the kernel of linear attention, without XLA, with the recurrence in double precision, on
// random tokens, under a sanitizer.

#include "../../jattn/kernels/cpu/src/linear.cc"

#include "common.h"

namespace {

bool one_call(ffi::ThreadPool& pool, bool limited) {
  const bool maps = once_in(2), divides = once_in(2), strict = once_in(3);
  const Index B = between(1, 3), t = between(1, 70), K = between(1, 4), group = between(1, 3);
  const Index N = K * group, F = between(1, 40), V = between(1, 40), kind = below(3);
  const Index d = kind == 0 ? 0 : kind == 1 ? 1 : F;
  const Array<T> q({B, t, N, F}, 1), k({B, t, K, F}, 1), v({B, t, K, V}, 1);
  Array<T> logs({d ? B : 1, d ? t : 1, d ? K : 1, d});
  const double choices[] = {-INFINITY, -50, -1, -0.1, -1e-3, 0};
  for (Index i = 0; i < logs.count(); ++i)
    logs[i] = static_cast<T>(once_in(8) ? choices[below(2)] : choices[between(2, 5)]);
  Array<T> values({B, K, F, V}, 1), keys({B, K, F});
  for (Index i = 0; i < keys.count(); ++i) keys[i] = static_cast<T>(1 + std::abs(normal()));

  Array<T> out({B, t, N, V}), denominators({B, t, N}), last_values({B, K, F, V}), last_keys({B, K, F});
  std::vector<double> want(B * t * N * V), sums(B * t * N), state(B * K * F * V), total(B * K * F);
  for (Index i = 0; i < values.count(); ++i) state[i] = values[i];
  for (Index i = 0; i < keys.count(); ++i) total[i] = keys[i];
  const auto feature = [&](double x) { return !maps ? x : x > 0 ? x + 1 : std::exp(x); };
  for (Index b = 0; b < B; ++b)
    for (Index i = 0; i < t; ++i)
      for (Index n = 0; n < N; ++n) {
        const Index g = n / group, at = (b * t + i) * K + g;
        double* own = &total[(b * K + g) * F];
        double* products = &state[(b * K + g) * F * V];
        const auto add = [&](Index f) {
          own[f] += feature(k[at * F + f]);
          for (Index c = 0; c < V; ++c) products[f * V + c] += feature(k[at * F + f]) * v[at * V + c];
        };
        for (Index f = 0; f < F; ++f) {
          const double decay = d ? std::exp(double(logs[at * d + (d > 1 ? f : 0)])) : 1;
          if (n % group == 0) {
            own[f] *= decay;
            for (Index c = 0; c < V; ++c) products[f * V + c] *= decay;
            if (!strict) add(f);
          }
          const double x = feature(q[((b * t + i) * N + n) * F + f]);
          sums[(b * t + i) * N + n] += x * own[f];
          for (Index c = 0; c < V; ++c) want[((b * t + i) * N + n) * V + c] += x * products[f * V + c];
        }
        for (Index f = 0; strict && n % group == group - 1 && f < F; ++f) add(f);
      }
  const auto linear = [&] {
    return run_linear(pool, q.buffer(), k.buffer(), v.buffer(), logs.buffer(), values.buffer(),
                      keys.buffer(), out.result(), denominators.result(), last_values.result(),
                      last_keys.result(), maps, divides, strict);
  };
  if (!runs(limited, linear)) return false;
  // Without the map, denominators may be close to 0: quotients are compared times them.
  for (Index i = 0; divides && i < out.count(); ++i) out[i] *= denominators[i / V];
  expect("out", out, want), expect("denominators", denominators, sums);
  expect("values", last_values, state), expect("keys", last_keys, total);
  return true;
}

}  // namespace

int main(int argc, char** argv) { return rounds(argc, argv, one_call); }
