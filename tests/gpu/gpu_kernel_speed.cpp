// gpu_kernel_speed: what each kernel besides attention reaches on this GPU, one line a shape. Not a test.
//
// Row kernels: bytes that the algorithm must move (each input read once, each output written once) a second,
// and their share of the device-to-device copy measured in the same run. Matrix products: 2 * m * out * in
// FLOPs a second, and their share of the fastest product of the same operand type in the same run. Times are
// medians of single launches between events, over buffers that together exceed the L2 cache several times.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.hpp"
#include "core/text.hpp"
#include "device/device.hpp"
#include "device/device_buffer.hpp"
#include "kernels/adamw/adamw_step.hpp"
#include "kernels/chunk_sums/chunk_sums.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"
#include "kernels/elementwise/elementwise.hpp"
#include "kernels/embedding/embedding.hpp"
#include "kernels/finite/first_not_finite.hpp"
#include "kernels/landmark_pool/rotate_and_pool.hpp"
#include "kernels/logits/logits.hpp"
#include "kernels/matmul/device_matmul.hpp"
#include "kernels/quantize/quantize.hpp"
#include "kernels/random/fill_normal.hpp"
#include "kernels/rmsnorm/rmsnorm.hpp"
#include "kernels/rotary/rotary.hpp"
#include "kernels/swiglu/swiglu.hpp"

namespace longhalo {
namespace {

constexpr int kWarmUps = 3, kRepeats = 15;

double median_seconds(cudaStream_t stream, const std::function<void(int turn)>& work) {
  std::vector<double> seconds;
  Event begin(Timing::kOn), end(Timing::kOn);
  for (int turn = 0; turn < kWarmUps + kRepeats; ++turn) {
    begin.record(stream);
    work(turn % 2);
    end.record(stream);
    end.synchronize();
    if (turn >= kWarmUps) seconds.push_back(seconds_between(begin, end));
  }
  std::nth_element(seconds.begin(), seconds.begin() + kRepeats / 2, seconds.end());
  return seconds[kRepeats / 2];
}

class Bench {
 public:
  explicit Bench(cudaStream_t stream) : stream_(stream), matmul_(stream) {}

  void run() {
    std::printf("%-44s %12s %12s %8s\n", "kernel and shape", "microseconds", "GB/s", "of copy");
    copy();
    for (int64_t n : {16384, 131072}) {
      rows(n, 4096);
      ffn_rows(n, 14336);
    }
    pooling(131072, {2048}, nullptr);
    pooling(1048576, {2048}, nullptr);
    pooling(1048576, {64, 2048}, nullptr);
    const DeviceBuffer<float> query = zeros(8 * 128);
    pooling(1048576, {2048}, query.data());
    append();
    logits(1024, 128256);
    row_gradients(16384, 4096, 14336);
    pooling_gradient(262144, {2048});
    pooling_gradient(262144, {64, 2048});
    loss(2048, 128256);
    parameters(int64_t{1} << 28);
    std::printf("\n%-44s %12s %12s %8s\n", "matrix product [m, out, in]", "microseconds", "TFLOP/s",
                "of best");
    products(16384);
    product_gradients(16384);
    for (const auto& line : lines_)
      std::printf("%-44s %12.1f %12.1f %7.1f%%\n", line.name.c_str(), line.seconds * 1e6, line.rate,
                  100 * line.rate / best_[line.type]);
  }

 private:
  struct Line {
    std::string name;
    double seconds, rate;
    std::string type;
  };

  DeviceBuffer<BFloat16> random(int64_t count) {
    DeviceBuffer<BFloat16> x(count, "bench input", stream_);
    fill_normal(stream_, count, 1, static_cast<uint64_t>(++made_), 1, x.data());
    return x;
  }
  DeviceBuffer<float> zeros(int64_t count) {
    return to_device<float>(std::vector<float>(static_cast<size_t>(count)), "bench input", stream_);
  }
  void report(const std::string& name, double bytes, const std::function<void(int)>& work) {
    const double seconds = median_seconds(stream_, work), rate = bytes / seconds;
    if (copy_rate_ == 0) copy_rate_ = rate;
    std::printf("%-44s %12.1f %12.0f %7.1f%%\n", name.c_str(), seconds * 1e6, rate * 1e-9,
                100 * rate / copy_rate_);
    std::fflush(stdout);
  }

  void copy() {
    constexpr int64_t kCount = int64_t{1} << 30;
    DeviceBuffer<BFloat16> from = random(kCount), to = random(kCount);
    report("copy of 2 GiB", 4.0 * kCount, [&](int) { copy_async(to.data(), from.data(), kCount, stream_); });
  }

  void rows(int64_t n, int64_t d) {
    DeviceBuffer<BFloat16> x[2] = {random(n * d), random(n * d)}, out = random(n * d),
                           table = random(32768 * d);
    DeviceBuffer<uint8_t> small(n * d, "bench output", stream_);
    DeviceBuffer<float> weight = zeros(d), scales = zeros(n);
    DeviceBuffer<int64_t> first(1, "bench output", stream_);
    const Fp8Rows fp8{reinterpret_cast<Fp8E4M3*>(small.data()), scales.data()};
    const Int8Rows int8{reinterpret_cast<int8_t*>(small.data()), scales.data()};
    const double all = static_cast<double>(n) * static_cast<double>(d);
    const std::string shape = text(" [", n, ", ", d, "]");
    report("rmsnorm" + shape, 4 * all,
           [&](int t) { rmsnorm(stream_, n, d, x[t].data(), weight.data(), 1e-5F, out.data()); });
    report("rmsnorm to fp8" + shape, 3 * all,
           [&](int t) { rmsnorm(stream_, n, d, x[t].data(), weight.data(), 1e-5F, fp8); });
    report("quantize rows" + shape, 3 * all, [&](int t) { quantize_rows(stream_, n, d, x[t].data(), fp8); });
    DeviceBuffer<BFloat16> mean = random(d);
    const Fp8Rows centred{fp8.values, fp8.scales, mean.data(), 4};
    report("rmsnorm to fp8, mean off" + shape, 3 * all,
           [&](int t) { rmsnorm(stream_, n, d, x[t].data(), weight.data(), 1e-5F, centred); });
    report("quantize rows, mean off" + shape, 3 * all,
           [&](int t) { quantize_rows(stream_, n, d, x[t].data(), centred); });
    std::vector<int32_t> columns;
    for (int64_t i = 0; i < d / 32; ++i)
      columns.push_back(static_cast<int32_t>(i * 7919 % d));
    const auto chosen_columns = to_device<int32_t>(columns, "outliers", stream_);
    DeviceBuffer<uint8_t> wider(n * (d + d / 32), "bench output", stream_);
    const Fp8Rows with_outliers{reinterpret_cast<Fp8E4M3*>(wider.data()),
                                scales.data(),
                                mean.data(),
                                4,
                                {chosen_columns.data(), d / 32}};
    const double bytes = 3 * all + all / 32;
    report("rmsnorm to fp8, mean off, outliers" + shape, bytes,
           [&](int t) { rmsnorm(stream_, n, d, x[t].data(), weight.data(), 1e-5F, with_outliers); });
    report("quantize rows, mean off, outliers" + shape, bytes,
           [&](int t) { quantize_rows(stream_, n, d, x[t].data(), with_outliers); });
    report("rmsnorm to int8" + shape, 3 * all,
           [&](int t) { rmsnorm(stream_, n, d, x[t].data(), weight.data(), 1e-5F, int8); });
    report("quantize rows to int8" + shape, 3 * all,
           [&](int t) { quantize_rows(stream_, n, d, x[t].data(), int8); });
    report("rotary of 32 heads of 128" + shape, 4 * all,
           [&](int t) { rotary(stream_, n, d / 128, 128, frequencies(), 5e6, 1, x[t].data(), d); });
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < n; ++i)
      tokens.push_back(static_cast<int32_t>(i * 7919 % 32768));
    const auto chosen = to_device<int32_t>(tokens, "tokens", stream_);
    report("embedding" + shape, 4 * all,
           [&](int) { embedding(stream_, n, d, chosen.data(), table.data(), out.data()); });
    report("first not finite" + shape, 2 * all,
           [&](int t) { first_not_finite(stream_, n, d, x[t].data(), first.data()); });
    DeviceBuffer<double> sums(n / 256 * d, "bench output", stream_);
    report("chunk sums of 256" + shape, 2 * all + all / 16,
           [&](int t) { add_chunk_sums(stream_, n, d, x[t].data(), 0, 256, sums.data()); });
    report("fill normal" + shape, 2 * all, [&](int t) { fill_normal(stream_, n * d, 1, 2, 1, x[t].data()); });
  }

  void ffn_rows(int64_t n, int64_t f) {
    DeviceBuffer<BFloat16> gate_up[2] = {random(n * 2 * f), random(n * 2 * f)}, out = random(n * f);
    DeviceBuffer<uint8_t> small(n * f, "bench output", stream_);
    DeviceBuffer<float> scales = zeros(n);
    const Fp8Rows fp8{reinterpret_cast<Fp8E4M3*>(small.data()), scales.data()};
    const Int8Rows int8{reinterpret_cast<int8_t*>(small.data()), scales.data()};
    const double all = static_cast<double>(n) * static_cast<double>(f);
    const std::string shape = text(" [", n, ", ", f, "]");
    report("swiglu" + shape, 6 * all, [&](int t) { swiglu(stream_, n, f, gate_up[t].data(), out.data()); });
    report("swiglu to fp8" + shape, 5 * all, [&](int t) { swiglu(stream_, n, f, gate_up[t].data(), fp8); });
    DeviceBuffer<BFloat16> mean = random(f);
    const Fp8Rows centred{fp8.values, fp8.scales, mean.data(), 4};
    report("swiglu to fp8, mean off" + shape, 5 * all,
           [&](int t) { swiglu(stream_, n, f, gate_up[t].data(), centred); });
    report("quantize rows" + shape, 3 * all,
           [&](int t) { quantize_rows(stream_, n, f, gate_up[t].data(), fp8); });
    report("swiglu to int8" + shape, 5 * all, [&](int t) { swiglu(stream_, n, f, gate_up[t].data(), int8); });
  }

  const double* frequencies() {
    if (frequencies_.empty())
      frequencies_ = to_device<double>(rotary_frequencies(128, 5e5), "frequencies", stream_);
    return frequencies_.data();
  }

  static constexpr int64_t kKvHeads = 8, kHeadDim = 128, kRow = 2 * kKvHeads * kHeadDim;

  struct Pool {
    std::vector<DeviceBuffer<BFloat16>> landmarks;
    std::vector<DeviceBuffer<float>> open;
    std::vector<PoolTarget> targets;
    RotateAndPool keys;
  };
  Pool make_pool(int64_t n, const std::vector<int64_t>& strides, const float* query) {
    Pool pool;
    for (int64_t stride : strides) {
      pool.landmarks.push_back(random((n / stride + 1) * kRow));
      pool.open.push_back(zeros(pool_state_floats(kKvHeads, kHeadDim)));
      pool.targets.push_back({stride, query, pool.landmarks.back().data(), 0, pool.open.back().data()});
    }
    pool.keys = {kKvHeads, kHeadDim, frequencies(), {}};
    return pool;
  }

  void pooling(int64_t n, const std::vector<int64_t>& strides, const float* query) {
    DeviceBuffer<BFloat16> kv[2] = {random(n * kRow), random(n * kRow)};
    Pool pool = make_pool(n, strides, query);
    pool.keys.bands = pool.targets;
    DeviceBuffer<uint8_t> workspace(rotate_and_pool_workspace(pool.keys, n), "workspace", stream_);
    std::string name = text("rotate and pool [", n, ", 2, 8, 128] by");
    for (int64_t stride : strides)
      name += text(" ", stride);
    if (query != nullptr) name += ", learned";
    const double row_bytes = 2.0 * kRow;
    const double bytes = static_cast<double>(n) * row_bytes * (0.5 + static_cast<double>(strides.size()));
    report(name, bytes,
           [&](int t) { rotate_and_pool(stream_, pool.keys, n, 0, kv[t].data(), workspace.data()); });
  }

  void append() {
    Pool pool = make_pool(1 << 20, {2048}, nullptr);
    pool.keys.bands = pool.targets;
    for (int64_t n : {1, 8, 1024}) {
      DeviceBuffer<BFloat16> new_kv = random(n * kRow), rows = random((n + 8192) * kRow);
      const auto position = to_device<int64_t>(std::vector<int64_t>{8191}, "position", stream_);
      report(text("append keys [", n, ", 2, 8, 128]"), 6.0 * static_cast<double>(n * kRow), [&](int) {
        append_keys(stream_, pool.keys, n, position.data(), new_kv.data(), rows.data(), 0);
      });
    }
  }

  void logits(int64_t n, int64_t vocabulary) {
    DeviceBuffer<float> x = zeros(n * vocabulary), out = zeros(n);
    const auto labels =
        to_device<int32_t>(std::vector<int32_t>(static_cast<size_t>(n), 5), "labels", stream_);
    DeviceBuffer<int32_t> index(1, "index", stream_);
    report(text("label log-probabilities [", n, ", ", vocabulary, "]"),
           4.0 * static_cast<double>(n * vocabulary), [&](int) {
             label_log_probabilities(stream_, n, vocabulary, x.data(), labels.data(), out.data());
           });
    report(text("argmax [", vocabulary, "]"), 4.0 * static_cast<double>(vocabulary),
           [&](int t) { argmax(stream_, vocabulary, x.data() + t * (n / 2) * vocabulary, index.data()); });
  }

  void row_gradients(int64_t n, int64_t d, int64_t f) {
    const std::string shape = text(" [", n, ", ", d, "]");
    const double all = static_cast<double>(n * d);
    {
      DeviceBuffer<BFloat16> x[2] = {random(n * d), random(n * d)}, d_out = random(n * d), dx = random(n * d);
      DeviceBuffer<float> weight = zeros(d), d_weight = zeros(d);
      DeviceBuffer<uint8_t> workspace(rmsnorm_backward_workspace(n, d), "workspace", stream_);
      report("rmsnorm's gradient" + shape, 8 * all, [&](int t) {
        rmsnorm_backward(stream_, n, d, x[t].data(), weight.data(), 1e-5F, d_out.data(), dx.data(),
                         d_weight.data(), workspace.data());
      });
    }
    {
      constexpr int64_t kVocabulary = 32768;
      std::vector<int32_t> tokens;  // every fourth the same: a space
      for (int64_t i = 0; i < n; ++i)
        tokens.push_back(static_cast<int32_t>(i % 4 == 0 ? 32 : i * 7919 % kVocabulary));
      const auto chosen = to_device<int32_t>(tokens, "tokens", stream_);
      DeviceBuffer<BFloat16> dx[2] = {random(n * d), random(n * d)};
      DeviceBuffer<float> table = zeros(kVocabulary * d);
      DeviceBuffer<uint8_t> workspace(embedding_backward_workspace(n, d), "workspace", stream_);
      report("embedding's gradient" + shape, 2 * all + 8 * 0.75 * all, [&](int t) {
        embedding_backward(stream_, n, d, kVocabulary, chosen.data(), dx[t].data(), table.data(),
                           workspace.data());
      });
    }
    DeviceBuffer<BFloat16> gate_up[2] = {random(n * 2 * f), random(n * 2 * f)}, d_out = random(n * f),
                           d_gate_up = random(n * 2 * f), out = random(n * f);
    report(text("swiglu's gradient, and out [", n, ", ", f, "]"), 12 * static_cast<double>(n * f),
           [&](int t) {
             swiglu_backward(stream_, n, f, gate_up[t].data(), d_out.data(), d_gate_up.data(), out.data());
           });
  }

  void pooling_gradient(int64_t n, const std::vector<int64_t>& strides) {
    DeviceBuffer<BFloat16> kv[2] = {random(n * kRow), random(n * kRow)}, d_kv = random(n * kRow);
    DeviceBuffer<float> d_rotated = zeros(n * kRow), query = zeros(kRow / 2), d_query = zeros(kRow / 2);
    std::vector<DeviceBuffer<BFloat16>> landmarks;
    std::vector<DeviceBuffer<float>> others;
    std::vector<PoolGradient> bands;
    std::string name = text("rotate and pool's gradient [", n, "] by");
    for (int64_t stride : strides) {
      landmarks.push_back(random(n / stride * kRow));
      others.push_back(zeros(n / stride * kKvHeads));
      others.push_back(zeros(n / stride * kRow));
      bands.push_back({stride, query.data(), landmarks.back().data(), others[others.size() - 2].data(),
                       others.back().data(), d_query.data()});
      name += text(" ", stride);
    }
    const RotateAndPoolBackward keys{kKvHeads, kHeadDim, frequencies(), bands};
    DeviceBuffer<uint8_t> workspace(rotate_and_pool_backward_workspace(keys, n), "workspace", stream_);
    report(name, 8.0 * static_cast<double>(n * kRow), [&](int t) {
      rotate_and_pool_backward(stream_, keys, n, 0, kv[t].data(), d_rotated.data(), d_kv.data(),
                               workspace.data());
    });
  }

  void loss(int64_t n, int64_t vocabulary) {
    DeviceBuffer<float> logits[2] = {zeros(n * vocabulary), zeros(n * vocabulary)};
    DeviceBuffer<BFloat16> d_logits = random(n * vocabulary);
    DeviceBuffer<DeviceLossSums> sums(1, "loss", stream_);
    DeviceBuffer<uint8_t> workspace(8 * n, "workspace", stream_);
    const auto labels =
        to_device<int32_t>(std::vector<int32_t>(static_cast<size_t>(n), 5), "labels", stream_);
    report(text("cross-entropy and gradient [", n, ", ", vocabulary, "]"),
           10 * static_cast<double>(n * vocabulary), [&](int t) {
             cross_entropy_rows(stream_, n, vocabulary, logits[t].data(), labels.data(), 0, 1,
                                d_logits.data(), vocabulary, sums.data(), workspace.data());
           });
  }

  void parameters(int64_t n) {
    DeviceBuffer<float> gradients = zeros(n), weights = zeros(n), m = zeros(n), v = zeros(n);
    DeviceBuffer<BFloat16> rounded = random(n);
    DeviceBuffer<double> norm(1, "norm", stream_);
    DeviceBuffer<uint8_t> workspace(kSquaredNormBytes, "workspace", stream_);
    const double all = static_cast<double>(n);
    const std::string shape = text(" of ", n, " parameters");
    AdamWStep step;
    report("adamw" + shape, 30 * all, [&](int) {
      adamw_step(stream_, step, n, gradients.data(), weights.data(), m.data(), v.data(), rounded.data());
    });
    report("squared norm" + shape, 4 * all, [&](int t) {
      squared_norm(stream_, n, (t == 0 ? weights : m).data(), norm.data(), workspace.data());
    });
    report("add" + shape, 12 * all, [&](int) { add(stream_, n, m.data(), v.data()); });
    report("fp32 to bf16" + shape, 6 * all, [&](int) { convert(stream_, n, m.data(), rounded.data()); });
  }

  void product_gradients(int64_t m) {
    for (const auto& [name, out, in] : {std::tuple{"q", int64_t{4096}, int64_t{4096}},
                                        std::tuple{"gate and up", int64_t{28672}, int64_t{4096}},
                                        std::tuple{"down", int64_t{4096}, int64_t{14336}}}) {
      DeviceBuffer<BFloat16> dc[2] = {random(m * out), random(m * out)}, a = random(m * in),
                             w = random(out * in), da = random(m * in);
      DeviceBuffer<float> dw = zeros(out * in);
      const double flops = 2.0 * static_cast<double>(m) * static_cast<double>(out) * static_cast<double>(in);
      const auto add_line = [&, name = name, out = out, in = in](const char* what,
                                                                 const std::function<void(int)>& work) {
        work(0);  // chooses
        const double seconds = median_seconds(stream_, work), rate = flops / seconds * 1e-12;
        best_["bf16"] = std::max(best_["bf16"], rate);
        lines_.push_back(
            {text(what, " of ", name, " [", m, ", ", out, ", ", in, "]"), seconds, rate, "bf16"});
      };
      add_line("da", [&, out = out, in = in](int t) {
        matmul_.input_gradient(m, out, in, dc[t].data(), w.data(), da.data());
      });
      add_line("dW, added", [&, out = out, in = in](int t) {
        matmul_.weight_gradient(m, out, in, dc[t].data(), a.data(), dw.data());
      });
    }
  }

  void products(int64_t m) {
    struct Shape {
      const char* name;
      int64_t out, in;
      Accumulate accumulate;
    };
    const bool has_fp8 = current_device_info().major >= 9, has_int8 = current_device_info().is_hopper();
    for (const Shape& s :
         {Shape{"square", 16384, 16384, Accumulate::kOverwrite},
          Shape{"q", 4096, 4096, Accumulate::kOverwrite}, Shape{"kv", 2048, 4096, Accumulate::kOverwrite},
          Shape{"attention out, added", 4096, 4096, Accumulate::kAdd},
          Shape{"gate and up", 28672, 4096, Accumulate::kOverwrite},
          Shape{"down, added", 4096, 14336, Accumulate::kAdd}}) {
      DeviceBuffer<BFloat16> a[2] = {random(m * s.in), random(m * s.in)}, w = random(s.out * s.in),
                             c = random(m * s.out);
      const double flops =
          2.0 * static_cast<double>(m) * static_cast<double>(s.out) * static_cast<double>(s.in);
      const auto add_line = [&](const std::string& type, const std::function<void(int)>& work) {
        work(0);  // chooses
        const double seconds = median_seconds(stream_, work), rate = flops / seconds * 1e-12;
        best_[type] = std::max(best_[type], rate);
        lines_.push_back(
            {text(type, " ", s.name, " [", m, ", ", s.out, ", ", s.in, "]"), seconds, rate, type});
      };
      add_line("bf16",
               [&](int t) { matmul_.run(m, s.out, s.in, a[t].data(), w.data(), c.data(), s.accumulate); });
      if (!has_fp8) continue;
      DeviceBuffer<uint8_t> qa(m * s.in, "operand", stream_), qw(s.out * s.in, "operand", stream_);
      DeviceBuffer<float> a_scales = zeros(m), w_scales = zeros(s.out);
      const Fp8Rows fa{reinterpret_cast<Fp8E4M3*>(qa.data()), a_scales.data()};
      const Fp8Rows fw{reinterpret_cast<Fp8E4M3*>(qw.data()), w_scales.data()};
      quantize_rows(stream_, m, s.in, a[0].data(), fa);
      quantize_rows(stream_, s.out, s.in, w.data(), fw);
      try {
        add_line("fp8", [&](int) { matmul_.run(m, s.out, s.in, fa, fw, c.data(), s.accumulate); });
      } catch (const UserError& error) {
        std::printf("fp8 %s: %s\n", s.name, error.what());
      }
      if (!has_int8) continue;
      const Int8Rows ia{reinterpret_cast<int8_t*>(qa.data()), a_scales.data()};
      const Int8Rows iw{reinterpret_cast<int8_t*>(qw.data()), w_scales.data()};
      quantize_rows(stream_, m, s.in, a[0].data(), ia);
      quantize_rows(stream_, s.out, s.in, w.data(), iw);
      add_line("int8", [&](int) { matmul_.run(m, s.out, s.in, ia, iw, c.data(), s.accumulate); });
    }
  }

  cudaStream_t stream_;
  DeviceMatmul matmul_;
  DeviceBuffer<double> frequencies_;
  double copy_rate_ = 0;
  std::map<std::string, double> best_;  // rate by type
  int64_t made_ = 0;
  std::vector<Line> lines_;
};

}  // namespace
}  // namespace longhalo

int main() {
  try {
    if (longhalo::visible_devices() == 0) {
      std::printf("no GPU: %s\n", longhalo::why_no_device().c_str());
      return 1;
    }
    longhalo::Device device(0);
    longhalo::Bench(device.compute()).run();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
