// What the job of this config is going to read: the model, its tokenizer, the prompts, the documents. Opened,
// and looked at as far as that costs little: a wrong path is said here, not when the job's nodes are there at
// last.
#pragma once

#include <vector>

#include "config/config.hpp"
#include "doctor/doctor_report.hpp"

namespace longhalo {

/// Rank 0 reads all of it; other hosts read the model, and in a training the token file.
enum class Reader { kRoot, kOtherHost };

/// For the first rank of each host. Never throws.
std::vector<Finding> examine_inputs(const Config& config, Reader reader);

}  // namespace longhalo
