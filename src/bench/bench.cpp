#include "bench/bench.hpp"

#include <algorithm>

#include "app/device_setup.hpp"
#include "core/error.hpp"
#include "core/text.hpp"
#include "storage/report_file.hpp"

namespace longhalo {
namespace {

constexpr Shortcut kRepeats{"--repeats", "bench.repeats", "Timed runs"};
constexpr Shortcut kJson{"--json", "bench.json", "Write the result as JSON to this file"};
constexpr Shortcut kTokens{"--tokens", "bench.tokens", "Length of the sequence"};
constexpr Shortcut kWindow{"--window", "attention.window", "Window W in tokens"};
constexpr Shortcut kStride{"--stride", "attention.landmark_stride",
                           "Landmark stride S in tokens, 0 for none"};
constexpr Shortcut kBands{"--bands", "attention.bands", "Bands, e.g. \"[[1, 0, 4096], [64, 4096, inf]]\""};
constexpr Shortcut kBytes{"--bytes", "bench.bytes", "Bytes of the copy, of the longest message, or to store"};
constexpr Shortcut kPrecision{"--precision", "run.precision", "bf16, fp8 or int8, on CUDA"};
constexpr Shortcut kStore{"--store", "activations.store", "auto, device, host, nvme or off"};
constexpr Shortcut kEvery{"--every", "activations.every", "Keep the input of every so many-th layer"};
constexpr Shortcut kDirectory{"--directory", "activations.directory", "Folder of the store on disk"};
constexpr Shortcut kModel{"--model", "model.path", "Model directory"};

#ifdef LONGHALO_HAVE_CUDA
#define IN_CUDA_BUILD(function) function
#else
#define IN_CUDA_BUILD(function) nullptr
#endif

std::vector<Benchmark> make_benchmarks() {
  std::vector<Benchmark> all;
  all.push_back({Subcommand::kBenchAttention,
                 "attention",
                 "The attention kernel alone",
                 {kTokens,
                  kRepeats,
                  kWindow,
                  kStride,
                  kBands,
                  kJson,
                  {"--heads", "bench.heads", "Query heads"},
                  {"--kv-heads", "bench.kv_heads", "Key/value heads"},
                  {"--head-dim", "bench.head_dim", "Head dimension"},
                  {"--first-query", "bench.first_query", "Position of the first query"},
                  {"--kernel", "bench.kernel", "auto, hopper, portable or all, on CUDA"},
                  {"--backward", "bench.backward", "true: the gradient too, on CUDA"}},
                 run_bench_attention_cpu,
                 IN_CUDA_BUILD(run_bench_attention_cuda)});
  all.push_back({Subcommand::kBenchCopy,
                 "copy",
                 "Copies of memory: device, host to device and back",
                 {kRepeats, kBytes, kJson},
                 run_bench_copy_cpu,
                 IN_CUDA_BUILD(run_bench_copy_cuda)});
  all.push_back({Subcommand::kBenchGemm,
                 "gemm",
                 "Matrix products of an 8B layer (on CUDA), or of one shape",
                 {{"--tokens", "bench.tokens", "Rows of a product"},
                  kRepeats,
                  kJson,
                  {"--outputs", "bench.outputs", "Outputs of the one product"},
                  {"--inputs", "bench.inputs", "Inputs of the one product"},
                  {"--precision", "run.precision", "bf16, fp8 or int8 alone, on CUDA"}},
                 run_bench_gemm_cpu,
                 IN_CUDA_BUILD(run_bench_gemm_cuda)});
  all.push_back(
      {Subcommand::kBenchHalo,
       "halo",
       "Messages between neighbouring ranks, by transport and size",
       {kRepeats, kBytes, kJson, {"--transport", "run.transport", "nccl, mpi or staged alone, on CUDA"}},
       run_bench_halo_cpu,
       IN_CUDA_BUILD(run_bench_halo_cuda)});
  all.push_back({Subcommand::kBenchLayer,
                 "layer",
                 "One layer of a prefill, phase by phase",
                 {kTokens, kRepeats, kWindow, kStride, kBands, kJson, kModel, kPrecision},
                 run_bench_layer,
                 IN_CUDA_BUILD(run_bench_layer)});
  all.push_back({Subcommand::kBenchPrefill,
                 "prefill",
                 "A whole prefill of random tokens",
                 {kTokens, kRepeats, kWindow, kStride, kBands, kJson, kModel, kPrecision},
                 run_bench_prefill,
                 IN_CUDA_BUILD(run_bench_prefill)});
  all.push_back({Subcommand::kBenchStep,
                 "step",
                 "A training step of random tokens, phase by phase",
                 {kTokens, kRepeats, kWindow, kStride, kBands, kJson, kModel, kStore, kEvery, kDirectory},
                 run_bench_step,
                 IN_CUDA_BUILD(run_bench_step_cuda)});
  all.push_back({Subcommand::kBenchStorage,
                 "storage",
                 "The activation store on disk beside plain files",
                 {kRepeats, kBytes, kDirectory, kJson},
                 run_bench_storage,
                 run_bench_storage});
  return all;
}

#undef IN_CUDA_BUILD

}  // namespace

std::span<const Benchmark> benchmarks() {
  static const std::vector<Benchmark> all = make_benchmarks();
  return all;
}

void run_benchmark(const MpiSession& session, Subcommand subcommand, const Config& config) {
  const auto found = std::find_if(benchmarks().begin(), benchmarks().end(),
                                  [&](const Benchmark& one) { return one.subcommand == subcommand; });
  check(found != benchmarks().end(), "every subcommand of bench is in the list of benchmarks");
  const RunDevice device = run_device(session, config);
  const BenchmarkFunction run = device == RunDevice::kCpu ? found->on_cpu : found->on_cuda;
  session.together([&] {
    run_precision(config, device);
    if (session.is_root()) require_report_place(config.bench.json);
    if (run == nullptr)
      throw UserError(text("bench ", found->name, " does not run on this device"),
                      text("run.device: ", device == RunDevice::kCpu ? "cpu" : "cuda"),
                      "run it on the other kind of device");
  });
  run(session, config);
}

}  // namespace longhalo
