// Opens the job's JSONL log on rank 0, with the header that every job writes.
#pragma once

#include <memory>
#include <string>

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "model/engine.hpp"
#include "telemetry/run_log.hpp"

namespace longhalo {

/// Collective; ranks other than 0 get a log that writes nothing.
std::unique_ptr<RunLog> open_job_log(const MpiSession& session, const Config& config,
                                     const std::string& command, int threads, const Engine& engine);

}  // namespace longhalo
