// What a job says about a document: one JSON record for each task and each prompt, with the run's figures in
// each.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "app/answers.hpp"
#include "app/inputs.hpp"
#include "app/run_watch.hpp"
#include "app/share.hpp"
#include "comm/mpi_session.hpp"
#include "model/engine.hpp"
#include "storage/results.hpp"

namespace longhalo {

/// How reading one document went, over all ranks. What is JSON is rank 0's alone.
struct DocumentRun {
  int64_t tokens = 0;
  int ranks = 1;
  double prefill_seconds = 0;      // of the slowest rank
  double mfu = 0;                  // useful FLOPs over what the ranks' matrix products reach
  double matmul_rate = 0;          // FLOP/s of all ranks' large products, measured at the job's start
  nlohmann::json exposed_seconds;  // waiting for messages, RankFigures::spread()
  int64_t halo_bytes = 0;          // received by all ranks, all layers
  int64_t landmark_bytes = 0;      //
  int64_t context_bytes_sent = 0;  // the context's broadcast
  int64_t context_bytes = 0;       // kept on every rank to go on from; 0 without prompts
  double attended_fraction = 0;    // visible (query, key) pairs over all causal pairs
  int64_t peak_memory_bytes = 0;   // resident, of the largest rank
  int64_t peak_device_bytes = 0;   // of a GPU's memory in arrays, largest rank; 0 on the CPU
  nlohmann::json phases;           // seconds, spreads by name
  double total_seconds = 0;
  std::string arrays_file;

  /// `watch` looks at links and stragglers, whose records go to `log`. Collective.
  static DocumentRun of(const MpiSession& session, RunWatch& watch, RunLog& log, const PrefillCost& cost,
                        const ModelConfig& shape, const AttentionPattern& pattern, const MatmulRates& rates,
                        const ShardPlan& shards, const DocumentContext* context, double seconds);
  /// Takes in what came after the prefill. Collective.
  void finish(const MpiSession& session, const Engine& engine);
  /// On rank 0.
  void add_to(PrometheusText& figures) const;
};

/// Scores of the document alone, out of those of the whole sequence. The first is NaN if nothing stood before
/// it.
std::vector<float> document_scores(std::vector<float> scores, int64_t document_begin);

/// The records of a document, named by its key, in the order score, embed, prompts. `answers` belong to
/// work.prompts.
std::vector<nlohmann::json> make_records(const std::string& document, const Inputs& inputs,
                                         const Sequence& sequence, const Work& work, const DocumentRun& run,
                                         const DocumentArrays& arrays, const std::vector<Answer>& answers);

}  // namespace longhalo
