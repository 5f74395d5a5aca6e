// The kernel for decoding without XLA, on random caches, beside the plain formula in double
// precision: for the sanitizers.

#include "../../jattn/kernels/cpu/src/decode.cc"

#include "common.h"

namespace {

bool one_call(ffi::ThreadPool& pool, bool limited) {
  const bool dense = once_in(2), masked = once_in(2), biased = once_in(2), by_head = once_in(2);
  const Index B = between(1, 3), t = between(1, 3), K = between(1, 3), group = between(1, 4);
  const Index N = K * group, H = once_in(2) ? 16 * between(1, 3) : between(1, 40);
  const Index V = once_in(2) ? 16 * between(1, 3) : between(1, 40);
  const Index page = dense ? between(1, once_in(3) ? 6000 : 700) : 16 * between(1, 4);
  const Index M = dense ? 1 : between(1, 12), pages = dense ? B : between(1, B * M);
  const Index S = M * page;
  const double scale = 1 / std::sqrt(H);
  const Array<T> q({B, t, N, H}, 2), k({pages, K, page, H}, 2), v({pages, K, page, V}, 1);
  Array<int32_t> table({B, M});
  for (Index i = 0; i < B * M; ++i)
    table[i] = dense ? i : once_in(4) ? (once_in(2) ? -1 : pages + below(3)) : below(pages);
  Array<uint8_t> allowed({masked ? B : 1, masked && by_head ? N : 1, masked ? t : 1, masked ? S : 0});
  const Index from = below(S + 1), until = below(S + 1);
  for (Index i = 0; i < allowed.count(); ++i)
    allowed[i] = i % S >= std::min(from, until) && i % S < std::max(from, until) && !once_in(5);
  const Array<T> bias({1, biased ? N : 1, biased ? t : 1, biased ? S : 0}, 1);

  Array<T> out({B, t, N, V}), lse({B, N, t});
  std::vector<double> want(B * t * N * V), sums(B * N * t), scores(S);
  for (Index b = 0; b < B; ++b)
    for (Index i = 0; i < t; ++i)
      for (Index n = 0; n < N; ++n) {
        double most = -INFINITY, sum = 0;
        const Index g = n / group;
        auto token = [&](Index j) { return (table[b * M + j / page] * K + g) * page + j % page; };
        for (Index j = 0; j < S; ++j) {
          scores[j] = -INFINITY;
          const int32_t held = table[b * M + j / page];
          if (held < 0 || held >= pages) continue;
          if (masked && !allowed[((b * (by_head ? N : 1) + (by_head ? n : 0)) * t + i) * S + j])
            continue;
          scores[j] = biased ? bias[(n * t + i) * S + j] : 0;
          for (Index h = 0; h < H; ++h)
            scores[j] += scale * q[((b * t + i) * N + n) * H + h] * k[token(j) * H + h];
          most = std::max(most, scores[j]);
        }
        for (Index j = 0; j < S; ++j) sum += scores[j] == -INFINITY ? 0 : std::exp(scores[j] - most);
        for (Index j = 0; j < S; ++j) {
          if (scores[j] == -INFINITY) continue;
          const double weight = std::exp(scores[j] - most) / sum;
          for (Index h = 0; h < V; ++h)
            want[((b * t + i) * N + n) * V + h] += weight * v[token(j) * V + h];
        }
        sums[(b * N + n) * t + i] = most + std::log(sum);
      }
  {
    Shortage shortage(limited);
    const ffi::Error error =
        run_decode(pool, q.buffer(), k.buffer(), v.buffer(), table.buffer(), allowed.buffer(),
                   bias.buffer(), out.result(), lse.result(), scale);
    if (!went_well(error, limited)) return false;
  }
  expect("out", out, want);
  expect("lse", lse, sums);
  return true;
}

}  // namespace

int main(int argc, char** argv) { return rounds(argc, argv, one_call); }
