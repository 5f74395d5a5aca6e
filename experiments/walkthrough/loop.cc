// Attention of one head: out = softmax(Q K' / sqrt(d)) V, for n words of d numbers.
// The loop over rows runs in parallel. In it are loops for the scores, for the exponentials and
// for the sums.

#include <algorithm>
#include <cmath>
#include <vector>

// extern "C" keeps the name of the function, by which Python calls it.
extern "C" void attend(const float* q, const float* k, const float* v, float* out, int n, int d) {
#pragma omp parallel for
  for (int i = 0; i < n; i++) {
    std::vector<float> score(n);
    float most = -INFINITY, sum = 0;
    for (int j = 0; j < n; j++) {
      float product = 0;
// Several products at once, each with a sum of its own; then these sums are added.
#pragma omp simd reduction(+ : product)
      for (int c = 0; c < d; c++) product += q[i * d + c] * k[j * d + c];
      score[j] = product / std::sqrt(static_cast<float>(d));  // d as a number of type float
      most = std::max(most, score[j]);
    }
    // First the score becomes its exponential, then that is added to the sum.
    for (int j = 0; j < n; j++) sum += score[j] = std::exp(score[j] - most);
    for (int c = 0; c < d; c++) out[i * d + c] = 0;
    for (int j = 0; j < n; j++)
      for (int c = 0; c < d; c++) out[i * d + c] += score[j] / sum * v[j * d + c];
  }
}
