// `longhalo bench`: speed of a part, measured beside the machine's own rate and verified in the same run.
// docs/performance.md defines every number printed.
#pragma once

#include "comm/mpi_session.hpp"
#include "config/config.hpp"

namespace longhalo {

/// The attention kernel alone, on every rank at once. Collective.
void run_bench_attention(const MpiSession& session, const Config& config);

/// A whole prefill of random tokens over all ranks. Collective.
void run_bench_prefill(const MpiSession& session, const Config& config);

/// Prints to standard output, whole.
void print_text(const std::string& text);

}  // namespace longhalo
