// The queries on one document, dealt out over the ranks: each continues from its own copy of the context.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "app/inputs.hpp"
#include "comm/mpi_session.hpp"
#include "model/engine.hpp"

namespace longhalo {

struct Answer {
  Generation generation;
  int rank = 0;
  double first_token_seconds =
      0;  // from the start of all queries on the document, waiting for its turn included
};

/// Answers the prompts whose numbers are in `wanted`; prompt number wanted[i] runs on rank i modulo ranks.
/// All answers in the order of `wanted` on rank 0, empty elsewhere. Collective.
std::vector<Answer> answer_prompts(const MpiSession& session, Engine& engine, const DocumentContext& context,
                                   const Sequence& sequence, std::span<const int64_t> wanted,
                                   const GenerateOptions& options, const ProgressOptions& progress);

}  // namespace longhalo
