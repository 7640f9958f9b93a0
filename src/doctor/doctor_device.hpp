// What the doctor needs of the device that the job would compute on, CPU or GPU: which one it is, how fast it
// multiplies, and what carries its halos.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi_session.hpp"
#include "config/config.hpp"
#include "doctor/doctor_launch.hpp"
#include "doctor/doctor_links.hpp"
#include "doctor/doctor_report.hpp"

namespace longhalo {

struct DoctorDevice {
  bool is_gpu = false;
  std::vector<Finding> findings;       // of this rank
  std::vector<Fact> facts;             // to be alike on all ranks
  std::vector<std::string> host_gpus;  // unique names of the GPUs that ranks of this host use
  std::optional<bool> dma_buf;         // as the GPU's driver says
  /// FLOP/s of large matrix products; empty on the CPU. Throws UserError.
  std::function<double()> matrix_flops;
  /// The transport that the job would use, with memory for messages of doctor.halo_bytes; adds what it finds
  /// about all of them. Empty where there is none. Collective.
  std::function<std::optional<PairWay>(std::vector<Finding>&)> connect;
};

/// A device that cannot be used is a finding; the CPU then stands in, so that the rest is examined.
/// Collective.
DoctorDevice open_doctor_device(const MpiSession& session, const Config& config);

/// Which GPUs multiply clearly slower than the others, from the rates of all ranks. Pure.
std::vector<Finding> rate_findings(const std::vector<double>& flops, const std::vector<std::string>& hosts);

/// Built with CUDA only. Adds to `device`; throws JointError where the GPU cannot be used. Collective.
void open_doctor_gpu(const MpiSession& session, const Config& config, DoctorDevice& device);

}  // namespace longhalo
