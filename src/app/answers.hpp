// The queries on one document, dealt out over the ranks: each continues from its own copy of the context.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "app/inputs.hpp"
#include "app/share.hpp"
#include "comm/mpi_session.hpp"
#include "model/engine.hpp"

namespace longhalo {

struct Answer {
  Generation generation;
  int rank = 0;
  double first_token_seconds =
      0;  // from the start of all queries on the document, waiting for its turn included
};

/// Seed of the draws of one answer, from the job's seed and the keys of document and prompt (inputs.hpp): the
/// same wherever these stand in their lists and whichever rank answers, and to all appearance unlike that of
/// any other answer.
uint64_t seed_of_answer(int64_t seed, std::string_view document, std::string_view prompt);

/// Answers work.prompts with work.seeds in place of the options' seed; prompt number i of them runs on rank i
/// modulo ranks. All answers in their order on rank 0, empty elsewhere. Collective.
std::vector<Answer> answer_prompts(const MpiSession& session, Engine& engine, const DocumentContext& context,
                                   const Sequence& sequence, const Work& work, const GenerateOptions& options,
                                   const ProgressOptions& progress);

}  // namespace longhalo
