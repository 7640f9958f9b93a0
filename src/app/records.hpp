// What a job says about a document: one JSON record for each task and each prompt, with the run's figures in
// each.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "app/answers.hpp"
#include "app/inputs.hpp"
#include "app/share.hpp"
#include "comm/mpi_session.hpp"
#include "model/engine.hpp"
#include "storage/results.hpp"

namespace longhalo {

/// How reading one document went, over all ranks; the same on every rank.
struct DocumentRun {
  int64_t tokens = 0;
  int ranks = 1;
  double prefill_seconds = 0;      // of the slowest rank
  RankSpread exposed_seconds{};    // waiting for messages, by rank
  int64_t halo_bytes = 0;          // received by all ranks, all layers
  int64_t landmark_bytes = 0;      //
  int64_t context_bytes_sent = 0;  // the context's broadcast
  int64_t context_bytes = 0;       // kept on every rank to go on from; 0 without prompts
  double attended_fraction = 0;    // visible (query, key) pairs over all causal pairs
  int64_t peak_memory_bytes = 0;   // resident, of the largest rank
  int64_t peak_device_bytes = 0;   // of a GPU's memory in arrays, largest rank; 0 on the CPU
  std::vector<std::pair<std::string, RankSpread>> phases;  // seconds
  double total_seconds = 0;
  std::string arrays_file;

  static DocumentRun of(const MpiSession& session, const PrefillCost& cost, const AttentionPattern& pattern,
                        const ShardPlan& shards, const DocumentContext* context, double seconds);
  /// Takes in what came after the prefill. Collective.
  void finish(const MpiSession& session, const Engine& engine);
};

/// Scores of the document alone, out of those of the whole sequence. The first is NaN if nothing stood before
/// it.
std::vector<float> document_scores(std::vector<float> scores, int64_t document_begin);

/// The records of a document in the order score, embed, prompts. `answers` belong to work.prompts.
std::vector<nlohmann::json> make_records(const std::string& document, const Inputs& inputs,
                                         const Sequence& sequence, const Work& work, const DocumentRun& run,
                                         const DocumentArrays& arrays, const std::vector<Answer>& answers);

}  // namespace longhalo
