// What rank 0 tells all ranks about a document: its tokens, and what to do with them.
#pragma once

#include <cstdint>
#include <vector>

#include "app/inputs.hpp"
#include "comm/mpi_session.hpp"

namespace longhalo {

/// What is to be done with one document.
struct Work {
  bool score = false, embed = false;              // a record is wanted
  bool score_array = false, embed_array = false;  // the array is computed
  std::vector<int64_t> prompts;                   // numbers of the prompts to answer
  std::vector<uint64_t> seeds;                    // of the draws of each of these answers

  bool nothing() const { return !score && !embed && prompts.empty(); }
};

/// The argument of rank 0 on every rank. Collective.
Sequence share_sequence(const MpiSession& session, Sequence sequence);
std::vector<int32_t> share_tokens(const MpiSession& session, std::vector<int32_t> tokens);
Work share_work(const MpiSession& session, Work work);

}  // namespace longhalo
