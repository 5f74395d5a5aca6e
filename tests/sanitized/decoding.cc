// Compares the kernel for decoding, without XLA, with the plain formula in double precision, on
// random caches, under a sanitizer.

#include "../../jattn/kernels/cpu/src/decode.cc"

#include "common.h"

namespace {

bool one_call(ffi::ThreadPool& pool, bool limited) {
  const bool by_token = once_in(3), half = sizeof(T) == 4 && once_in(3);
  const bool dense = by_token || once_in(2), masked = once_in(2), biased = once_in(2), by_head = once_in(2);
  const Index B = between(1, 3), t = between(1, 3), K = between(1, 3), group = between(1, 4);
  const Index N = K * group, H = once_in(2) ? 16 * between(1, 3) : between(1, 40);
  const Index V = once_in(2) ? 16 * between(1, 3) : between(1, 40);
  const Index page = dense ? between(1, once_in(3) ? 6000 : 700) : 16 * between(1, 4);
  const Index M = dense ? 1 : between(1, 12), pages = dense ? B : between(1, B * M);
  const Index S = M * page;
  const double scale = 1 / std::sqrt(H);
  const Array<T> q({B, t, N, H}, 2);
  const Index first = by_token ? page : K, second = by_token ? K : page;
  Array<T> k({pages, first, second, H}, 2), v({pages, first, second, V}, 1);
  Array<uint16_t> half_k({half ? pages : 0, first, second, H});
  Array<uint16_t> half_v({half ? pages : 0, first, second, V});
  halve(k, half_k), halve(v, half_v);
  Array<int32_t> table({B, M});
  for (Index i = 0; i < B * M; ++i)
    table[i] = dense ? i : once_in(4) ? (once_in(2) ? -1 : pages + below(3)) : below(pages);
  const Array<int32_t> no_table({B, 0});
  Array<uint8_t> allowed({masked ? B : 1, masked && by_head ? N : 1, masked ? t : 1, masked ? S : 0});
  const Index from = below(S + 1), until = below(S + 1);
  for (Index i = 0; i < allowed.count(); ++i)
    allowed[i] = i % S >= std::min(from, until) && i % S < std::max(from, until) && !once_in(5);
  const Array<T> bias({1, biased ? N : 1, biased ? t : 1, biased ? S : 0}, 1);

  Array<T> out({B, t, N, V}), most({B, t, N}), log_sum({B, t, N});
  std::vector<double> want(B * t * N * V), sums(B * N * t), scores(S);
  for (Index b = 0; b < B; ++b)
    for (Index i = 0; i < t; ++i)
      for (Index n = 0; n < N; ++n) {
        double top = -INFINITY, sum = 0;
        const Index g = n / group;
        auto token = [&](Index j) {
          if (by_token) return (b * page + j) * K + g;
          return (table[b * M + j / page] * K + g) * page + j % page;
        };
        for (Index j = 0; j < S; ++j) {
          scores[j] = -INFINITY;
          const int32_t held = table[b * M + j / page];
          if (held < 0 || held >= pages) continue;
          if (masked && !allowed[((b * (by_head ? N : 1) + (by_head ? n : 0)) * t + i) * S + j])
            continue;
          scores[j] = biased ? bias[(n * t + i) * S + j] : 0;
          for (Index h = 0; h < H; ++h)
            scores[j] += scale * q[((b * t + i) * N + n) * H + h] * k[token(j) * H + h];
          top = std::max(top, scores[j]);
        }
        for (Index j = 0; j < S; ++j) sum += scores[j] == -INFINITY ? 0 : std::exp(scores[j] - top);
        for (Index j = 0; j < S; ++j) {
          if (scores[j] == -INFINITY) continue;
          const double weight = std::exp(scores[j] - top) / sum;
          for (Index h = 0; h < V; ++h)
            want[((b * t + i) * N + n) * V + h] += weight * v[token(j) * V + h];
        }
        sums[(b * t + i) * N + n] = top + std::log(sum);
      }
  {
    Shortage shortage(limited);
    const ffi::Error error =
        run_decode(pool, q.buffer(), half ? half_k.buffer() : k.buffer(),
                   half ? half_v.buffer() : v.buffer(),
                   by_token ? no_table.buffer() : table.buffer(), allowed.buffer(), bias.buffer(),
                   out.result(), most.result(), log_sum.result(), scale, by_token);
    if (!went_well(error, limited)) return false;
  }
  expect("out", out, want);
  for (Index i = 0; i < most.count(); ++i) most[i] += log_sum[i];
  expect("lse", most, sums);
  return true;
}

}  // namespace

int main(int argc, char** argv) { return rounds(argc, argv, one_call); }
