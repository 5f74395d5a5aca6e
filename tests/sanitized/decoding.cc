// Compares the kernel for decoding, without XLA, with the plain formula in double precision, on
// random caches, under a sanitizer.

#include "../../jattn/kernels/cpu/src/decode.cc"

#include "common.h"

namespace {

constexpr ffi::DataType kTypes[] = {ffi::S8, ffi::F8E4M3FN, ffi::U8};  // the last of int4

// Random quantised vectors of `size` numbers, and the numbers that they stand for.
void quantise(int type, Index size, Array<T>& x, Array<uint8_t>& bytes, Array<float>& scales) {
  for (Index i = 0; i < bytes.count(); ++i)
    while (((bytes[i] = below(256)) & 127) == 127) {}  // NaN of float8
  for (Index row = 0; row < scales.count(); ++row) {
    scales[row] = static_cast<float>(between(1, 100)) / (type == 0 ? 8000 : type == 1 ? 20000 : 400);
    for (Index h = 0; h < size; ++h) {
      const Index half = size / 2;
      const int byte = bytes[type == 2 ? row * half + h % half : row * size + h];
      const int exponent = byte >> 3 & 15, part = byte & 7, nibble = h < half ? byte & 15 : byte >> 4;
      double number = byte - (byte > 127 ? 256 : 0);
      if (type == 1) {
        number = exponent ? std::ldexp(8 + part, exponent - 10) : std::ldexp(part, -9);
        if (byte > 127) number = -number;
      }
      if (type == 2) number = nibble - (nibble > 7 ? 16 : 0);
      x[row * size + h] = static_cast<T>(number * scales[row]);
    }
  }
}

bool one_call(ffi::ThreadPool& pool, bool limited) {
  const bool by_token = once_in(3), half = sizeof(T) == 4 && once_in(3);
  const bool dense = by_token || once_in(2), masked = once_in(2), biased = once_in(2), by_head = once_in(2);
  const Index B = between(1, 3), t = between(1, 3), K = between(1, 3), group = between(1, 4);
  const bool quantised = sizeof(T) == 4 && !half && !by_token && once_in(2);
  const int type = quantised ? below(3) : 0, per_byte = type == 2 ? 2 : 1;
  const Index N = K * group;
  const Index H = once_in(2) ? 32 * between(1, 2) : per_byte * between(1, 20);
  const Index V = once_in(2) ? 32 * between(1, 2) : per_byte * between(1, 20);
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
  const Index some = quantised ? pages : 0;
  Array<uint8_t> bytes_k({some, K, page, H / per_byte}), bytes_v({some, K, page, V / per_byte});
  Array<float> scales_k({some, K, page}), scales_v({some, K, page});
  quantise(type, H, k, bytes_k, scales_k), quantise(type, V, v, bytes_v, scales_v);
  const auto stored = [&](Array<T>& x, Array<uint16_t>& halves, Array<uint8_t>& bytes) {
    return quantised ? bytes.buffer(kTypes[type]) : half ? halves.buffer() : x.buffer();
  };
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
  const auto decode = [&] {
    return run_decode(pool, q.buffer(), stored(k, half_k, bytes_k), stored(v, half_v, bytes_v),
                      scales_k.buffer(), scales_v.buffer(),
                      by_token ? no_table.buffer() : table.buffer(), allowed.buffer(),
                      bias.buffer(), out.result(), most.result(), log_sum.result(), scale,
                      by_token);
  };
  if (!runs(limited, decode)) return false;
  expect("out", out, want);
  for (Index i = 0; i < most.count(); ++i) most[i] += log_sum[i];
  expect("lse", most, sums);
  return true;
}

}  // namespace

int main(int argc, char** argv) { return rounds(argc, argv, one_call); }
