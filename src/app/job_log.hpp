// Opens the job's JSONL log on rank 0, with the header that every job writes.
#pragma once

#include <memory>
#include <string>

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "model/precision.hpp"
#include "telemetry/run_log.hpp"

namespace longhalo {

/// What computes the job, on this rank.
struct Computing {
  std::string device, transport;
  Precision precision = Precision::kFp32;
};
template <class Engine>
Computing computing_of(const Engine& engine) {
  return {engine.device(), engine.transport(), engine.precision()};
}

/// Throws UserError where open_job_log() would, and makes nothing: a job asks before it makes its output. A
/// log in an output folder that is yet to be made is as good as that. Collective.
void require_job_log(const MpiSession& session, const Config& config);

/// Collective; ranks other than 0 get a log that writes nothing.
std::unique_ptr<RunLog> open_job_log(const MpiSession& session, const Config& config,
                                     const std::string& command, int threads, const Computing& computing);

}  // namespace longhalo
