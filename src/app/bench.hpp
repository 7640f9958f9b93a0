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

struct Benchmark {
  Subcommand subcommand;
  const char* name;
  const char* help;
  std::vector<Shortcut> shortcuts;
  void (*run)(const MpiSession& session, const Config& config);  // collective
};

std::span<const Benchmark> benchmarks();

/// Collective.
void run_benchmark(const MpiSession& session, Subcommand subcommand, const Config& config);

/// The attention kernel alone, on every rank at once.
void run_bench_attention(const MpiSession& session, const Config& config);
/// A whole prefill of random tokens over all ranks.
void run_bench_prefill(const MpiSession& session, const Config& config);

/// Prints to standard output, whole.
void print_text(const std::string& text);

}  // namespace longhalo
