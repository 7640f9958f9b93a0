// The disks that a job writes to: /dev/shm, where MPI and NCCL put what ranks of a host share; scratch, where
// activations go; and the output folder, where checkpoints go. Free bytes, rates, and what fsync costs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "doctor/doctor_report.hpp"

namespace longhalo {

/// Whether `folder` has `wanted_bytes` free. Never throws.
Finding shared_memory_finding(const std::filesystem::path& folder, int64_t wanted_bytes);

struct DiskTest {
  std::string check;               // "scratch"
  std::filesystem::path folder;    // or its nearest parent that is there; nothing is left in it
  int64_t bytes = 0;               // to write and read; less where little is free
  double least_gb_per_second = 0;  // 0: no floor
  std::string floor_key;           // of the config, for the message
};

struct DiskTimes {
  int64_t bytes = 0, free_bytes = 0;
  double write_seconds = 0, sync_seconds = 0, read_seconds = 0;
  bool is_direct = false;  // past the page cache
  bool is_right = false;   // read as it was written
  bool is_in_memory = false;
};
/// Writes a file that has no name any more, forces it to the disk, and reads it back. Throws UserError.
DiskTimes measure_disk(const std::filesystem::path& folder, int64_t bytes);

/// Pure.
Finding disk_finding(const DiskTest& test, const DiskTimes& times);

/// measure_disk() on this host, judged; what fails is a finding too. Never throws.
Finding examine_disk(const DiskTest& test);

/// Whether the hosts of all ranks see what rank 0 makes in `folder`, as checkpoints need; on rank 0, nothing
/// on others. Collective.
std::vector<Finding> shared_folder_finding(const MpiSession& session, const std::filesystem::path& folder);

}  // namespace longhalo
