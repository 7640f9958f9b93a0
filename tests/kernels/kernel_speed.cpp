// Not a test: times the CPU kernels on one thread, in CPU seconds (another job on the core does not count).
// What each number means, and what it was, is in docs/performance.md.
//   kernel_speed [queries=4096] [repeats=9]
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <vector>

#include "kernels/attention/attention.hpp"
#include "kernels/attention/attention_backward.hpp"
#include "kernels/common/isa.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"
#include "kernels/landmark_pool/landmark_pool.hpp"
#include "kernels/logits/logits.hpp"
#include "kernels/matmul/matmul.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/swiglu/swiglu.hpp"
#include "numbers.hpp"

using namespace longhalo;
using longhalo::testing::normal;

namespace {

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// CPU seconds of one call: the least of `repeats`, each of as many calls as fill 20 ms.
template <class Work>
double least_seconds(int repeats, const Work& work) {
  work();
  double least = std::numeric_limits<double>::max();
  for (int i = 0; i < repeats; ++i) {
    const double start = cpu_seconds();
    int calls = 0;
    do
      work();
    while (++calls, cpu_seconds() - start < 0.02);
    least = std::min(least, (cpu_seconds() - start) / calls);
  }
  return least;
}

// Attention and sgemm in turns, so that a change of the clock or of the neighbours meets both.
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
  const auto pair_flops = static_cast<double>(d * heads * visible_pairs(p));

  const auto d_out = normal(n * heads * d, 8);
  std::vector<float> dq(q.size()), dk(k.size()), dv(v.size()), d_kbar(kbar.size()), d_vbar(vbar.size()),
      d_bias(bias.size());
  const BandGradient<float> d_bands[] = {{dk.data(), dv.data()}, {d_kbar.data(), d_vbar.data()}};
  AttentionGradient<float> gradient;
  gradient.forward = p, gradient.d_out = d_out.data(), gradient.dq = dq.data(), gradient.d_bands = d_bands;
  gradient.d_landmark_bias = d_bias.data();

  constexpr int64_t kSide = 1536;
  const auto a = normal(kSide * kSide, 6), w = normal(kSide * kSide, 7);
  std::vector<float> c(a.size());
  const double sgemm_flops = 2.0 * kSide * kSide * kSide;

  std::vector<double> forward, backward, sgemm, forward_ratio, backward_ratio;
  attention_forward(p);
  matmul(kSide, kSide, kSide, a.data(), w.data(), c.data());
  for (int i = 0; i < repeats; ++i) {
    const double start = cpu_seconds();
    matmul(kSide, kSide, kSide, a.data(), w.data(), c.data());
    const double multiplied = cpu_seconds();
    attention_forward(p);
    const double attended = cpu_seconds();
    attention_backward(gradient);
    const double end = cpu_seconds();
    sgemm.push_back(sgemm_flops / (multiplied - start) * 1e-9);
    forward.push_back(4 * pair_flops / (attended - multiplied) * 1e-9);
    backward.push_back(10 * pair_flops / (end - attended) * 1e-9);
    forward_ratio.push_back(forward.back() / sgemm.back());
    backward_ratio.push_back(backward.back() / sgemm.back());
  }
  for (auto* x : {&forward, &backward, &sgemm, &forward_ratio, &backward_ratio})
    std::sort(x->begin(), x->end());
  const auto middle = static_cast<size_t>(repeats / 2);
  std::printf(
      "%-8s attention n %6ld H %ld/%ld d %3ld W %ld S %ld: GFLOP/s forward %6.1f, backward %6.1f, sgemm "
      "%6.1f; "
      "ratio forward %.3f, backward %.3f (best %.1f, %.1f, %.1f)\n",
      isa_name(current_isa()), n, heads, kv_heads, d, window, stride, forward[middle], backward[middle],
      sgemm[middle], forward_ratio[middle], backward_ratio[middle], forward.back(), backward.back(),
      sgemm.back());
}

// One token over a full window and its landmarks: bytes of keys and values a second.
void decode(int64_t heads, int64_t kv_heads, int64_t d, int repeats) {
  const int64_t window = 2048, stride = 256, landmarks = 512, first = 131072 + window;
  const auto q = normal(heads * d, 1), k = normal(window * kv_heads * d, 2),
             v = normal(window * kv_heads * d, 3);
  const auto kbar = normal(landmarks * kv_heads * d, 4);
  std::vector<float> out(q.size());
  const BandKeys<float> bands[] = {{{1, 0, window}, k.data(), v.data(), first - window + 1, window},
                                   {{stride, window, kUnlimited}, kbar.data(), kbar.data(), 0, landmarks}};
  Attention<float> p;
  p.heads = heads, p.kv_heads = kv_heads, p.head_dim = d, p.scale = 1.0F / 8;
  p.queries = 1, p.first_query = first, p.q = q.data(), p.bands = bands, p.out = out.data();
  const double bytes = 8.0 * static_cast<double>(visible_pairs(p) * kv_heads * d);
  const double seconds = least_seconds(repeats, [&] { attention_forward(p); });
  std::printf("decode attention H %ld/%ld d %ld, %ld keys: %.0f us, %.1f GB/s\n", heads, kv_heads, d,
              visible_pairs(p), seconds * 1e6, bytes / seconds * 1e-9);
}

void few_rows(int64_t out, int64_t in, int repeats) {
  const auto w = normal(out * in, 1), a = normal(16 * in, 2);
  std::vector<float> c(static_cast<size_t>(16 * out));
  std::printf("matmul [m, %ld] by [%ld, %ld], GB/s of weights:", in, out, in);
  for (int64_t m : {1, 2, 3, 4, 5, 8, 16}) {
    const double seconds = least_seconds(repeats, [&] { matmul(m, out, in, a.data(), w.data(), c.data()); });
    std::printf("  m %ld: %.1f", m, 4e-9 * static_cast<double>(out * in) / seconds);
  }
  std::printf("\n");
}

void small_kernels(int repeats) {
  const int64_t n = 512, hidden = 576, ffn = 1536, heads = 9, kv_heads = 3, d = 64, vocabulary = 49152;
  auto x = normal(n * hidden, 1);
  const auto weight = normal(hidden, 2), gate_up = normal(n * 2 * ffn, 3),
             logits = normal(16 * vocabulary, 4);
  std::vector<float> out(static_cast<size_t>(n * ffn));
  std::vector<double> sums(16);
  const auto frequencies = rotary_frequencies(d, 100000);
  const auto print = [](const char* what, double seconds, int64_t elements) {
    std::printf("%-44s %8.1f us, %.3f ns an element\n", what, seconds * 1e6,
                seconds * 1e9 / static_cast<double>(elements));
  };
  print("rmsnorm [512, 576]",
        least_seconds(repeats, [&] { rmsnorm(n, hidden, x.data(), weight.data(), 1e-5F, out.data()); }),
        n * hidden);
  print("swiglu [512, 1536]", least_seconds(repeats, [&] { swiglu(n, ffn, gate_up.data(), out.data()); }),
        n * ffn);
  print("rotary [512, 9, 64]",
        least_seconds(repeats, [&] { rotary(n, heads, d, frequencies, 4096, 1, x.data()); }), n * hidden);
  print("rotary [1, 9, 64]",
        least_seconds(repeats, [&] { rotary(1, heads, d, frequencies, 4097, 1, x.data()); }), hidden);
  print("log_sum_exp [16, 49152]",
        least_seconds(repeats, [&] { log_sum_exp(16, vocabulary, logits.data(), sums.data()); }),
        16 * vocabulary);
  print("argmax [49152]",
        least_seconds(repeats, [&] { sums[0] += static_cast<double>(argmax(vocabulary, logits.data())); }),
        vocabulary);
  print("sample_top_p [49152], T 0.7, p 0.95",
        least_seconds(
            repeats,
            [&] { sums[0] += static_cast<double>(sample_top_p(vocabulary, logits.data(), 0.7, 0.95, 0.5)); }),
        vocabulary);
  std::vector<float> d_gate_up(gate_up.size()), d_weight(weight.size());
  print("rmsnorm_backward [512, 576]",
        least_seconds(repeats,
                      [&] {
                        rmsnorm_backward(n, hidden, x.data(), weight.data(), 1e-5F, gate_up.data(),
                                         out.data(), d_weight.data());
                      }),
        n * hidden);
  print(
      "swiglu_backward [512, 1536]",
      least_seconds(repeats, [&] { swiglu_backward(n, ffn, gate_up.data(), out.data(), d_gate_up.data()); }),
      n * ffn);
  const LandmarkPool pool{kv_heads, d, 256, weight.data()};
  print("landmark_pool_backward [512, 3, 64], stride 256",
        least_seconds(repeats,
                      [&] {
                        landmark_pool_backward(pool, n, x.data(), x.data(), weight.data(), weight.data(),
                                               d_gate_up.data(), d_gate_up.data() + n * hidden,
                                               d_weight.data());
                      }),
        n * kv_heads * d);
  LandmarkPoolState state(kv_heads, d);
  print(
      "landmark_pool [512, 3, 64], stride 256",
      least_seconds(
          repeats, [&] { landmark_pool(pool, n, x.data(), x.data(), state, out.data(), out.data() + 4096); }),
      n * kv_heads * d);
}

// Loss and gradients beside the three products that they are made of.
void loss_beside_products(int repeats) {
  const int64_t n = 256, hidden = 576, vocabulary = 49152;
  const auto x = normal(n * hidden, 1), head = normal(vocabulary * hidden, 2, 0.02F);
  std::vector<int32_t> labels(n, 7);
  std::vector<float> d_x(x.size()), d_head(head.size()), logits(static_cast<size_t>(n * vocabulary));
  const CrossEntropy<float> p{n, hidden, vocabulary, x.data(),     head.data(), labels.data(),
                              0, 1e-6F,  d_x.data(), d_head.data()};
  double least = std::numeric_limits<double>::max(), products = least;
  for (int i = 0; i < repeats; ++i) {
    const double start = cpu_seconds();
    cross_entropy(p);
    const double between = cpu_seconds();
    matmul(n, vocabulary, hidden, x.data(), head.data(), logits.data());
    matmul_input_gradient(n, vocabulary, hidden, logits.data(), head.data(), d_x.data());
    matmul_weight_gradient(n, vocabulary, hidden, logits.data(), x.data(), d_head.data());
    const double end = cpu_seconds();
    least = std::min(least, between - start);
    products = std::min(products, end - between);
  }
  std::printf("cross_entropy [256, 576] by [49152, 576]: %.0f ms, its products alone %.0f ms\n", least * 1e3,
              products * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t n = argc > 1 ? std::atoll(argv[1]) : 4096;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 9;
  set_kernel_threads(1);
  attention_beside_sgemm(n, 9, 3, 64, 2048, 256, repeats);
  attention_beside_sgemm(n, 8, 2, 128, 2048, 256, repeats);
  attention_beside_sgemm(n, 4, 4, 64, 2048, 256, repeats);
  decode(9, 3, 64, repeats);
  decode(32, 8, 128, repeats);
  few_rows(49152, 576, repeats);
  few_rows(576, 1536, repeats);
  small_kernels(repeats);
  loss_beside_products(repeats);
  return 0;
}
