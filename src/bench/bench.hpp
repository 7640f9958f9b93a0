// `longhalo bench`: speed of a part, measured beside the machine's own rates and verified in the same run.
// docs/performance.md defines every number printed.
//
// bench.cpp lists the benchmarks; the command line and main() go by that list.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "config/config.hpp"

namespace longhalo {

/// A command-line option that stands for one config key.
struct Shortcut {
  const char* option;
  const char* key;
  const char* help;
};

/// Collective.
using BenchmarkFunction = void (*)(const MpiSession& session, const Config& config);

struct Benchmark {
  Subcommand subcommand;
  const char* name;
  const char* help;
  std::vector<Shortcut> shortcuts;
  BenchmarkFunction on_cpu, on_cuda;  // nullptr: not on this device, or not in this build
};

std::span<const Benchmark> benchmarks();

/// On the device that run.device says. Collective.
void run_benchmark(const MpiSession& session, Subcommand subcommand, const Config& config);

/// The attention kernel alone, on every rank at once.
void run_bench_attention_cpu(const MpiSession& session, const Config& config);
void run_bench_attention_cuda(const MpiSession& session, const Config& config);
/// Copies of memory, on every rank at once.
void run_bench_copy_cpu(const MpiSession& session, const Config& config);
void run_bench_copy_cuda(const MpiSession& session, const Config& config);
/// Matrix products, on every rank at once.
void run_bench_gemm_cpu(const MpiSession& session, const Config& config);
void run_bench_gemm_cuda(const MpiSession& session, const Config& config);
/// Messages between neighbouring ranks, as halos travel.
void run_bench_halo_cpu(const MpiSession& session, const Config& config);
void run_bench_halo_cuda(const MpiSession& session, const Config& config);
/// One layer of a prefill, and a whole prefill, of random tokens over all ranks.
void run_bench_layer(const MpiSession& session, const Config& config);
void run_bench_prefill(const MpiSession& session, const Config& config);
/// A training step of random tokens over all ranks.
void run_bench_step(const MpiSession& session, const Config& config);
void run_bench_step_cuda(const MpiSession& session, const Config& config);
/// The activation store on disk, on every rank at once.
void run_bench_storage(const MpiSession& session, const Config& config);

}  // namespace longhalo
