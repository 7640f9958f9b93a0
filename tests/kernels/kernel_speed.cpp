// Not a test: times attention beside OpenBLAS's sgemm, in turns, on one thread. docs/performance.md says what
// it gave.
//   kernel_speed [queries=8192] [repeats=5]
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "core/clock.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/common/isa.hpp"
#include "kernels/matmul/matmul.hpp"

using namespace longhalo;

namespace {

std::vector<float> normal(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution;
  std::vector<float> x(static_cast<size_t>(count));
  for (float& value : x)
    value = distribution(generator);
  return x;
}

void attention_beside_sgemm(int64_t n, int64_t heads, int64_t kv_heads, int64_t d, int64_t window,
                            int64_t stride, int repeats) {
  const auto q = normal(n * heads * d, 1), k = normal(n * kv_heads * d, 2), v = normal(n * kv_heads * d, 3);
  const auto kbar = normal(n / stride * kv_heads * d, 4), vbar = normal(n / stride * kv_heads * d, 5);
  std::vector<float> out(q.size()), lse(static_cast<size_t>(heads * n)),
      bias(static_cast<size_t>(heads), -3.0F);
  const BandKeys<float> bands[] = {{{1, 0, window}, k.data(), v.data(), 0, n},
                                   {{stride, window, kUnlimited}, kbar.data(), vbar.data(), 0, n / stride}};
  Attention<float> p;
  p.heads = heads, p.kv_heads = kv_heads, p.head_dim = d, p.scale = 1.0F / 8;
  p.queries = n, p.q = q.data(), p.bands = bands, p.landmark_bias = bias.data();
  p.out = out.data(), p.lse = lse.data();
  const double flops = 4.0 * static_cast<double>(d * heads * visible_pairs(p));
  std::vector<double> attention, sgemm, ratio;
  attention_forward(p);
  for (int i = 0; i < repeats; ++i) {
    sgemm.push_back(measure_matmul_rate(0.5) * 1e-9);
    const Stopwatch watch;
    attention_forward(p);
    attention.push_back(flops / watch.seconds() * 1e-9);
    ratio.push_back(attention.back() / sgemm.back());
  }
  for (auto* x : {&attention, &sgemm, &ratio})
    std::sort(x->begin(), x->end());
  const auto middle = static_cast<size_t>(repeats / 2);
  std::printf(
      "%-8s n %6ld H %2ld/%ld d %3ld W %ld S %ld: attention %6.1f (best %6.1f), sgemm %6.1f (best %6.1f) "
      "GFLOP/s, ratio %.3f\n",
      isa_name(current_isa()), n, heads, kv_heads, d, window, stride, attention[middle], attention.back(),
      sgemm[middle], sgemm.back(), ratio[middle]);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoll(argv[1]) : 8192;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 5;
  set_kernel_threads(1);
  attention_beside_sgemm(n, 9, 3, 64, 2048, 256, repeats);
  attention_beside_sgemm(n, 8, 2, 128, 2048, 256, repeats);
  return 0;
}
