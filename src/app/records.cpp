#include "app/records.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "app/plan.hpp"
#include "telemetry/memory.hpp"

namespace longhalo {
namespace {

using Json = nlohmann::json;

Json figures(const DocumentRun& run) {
  Json json{{"ranks", run.ranks},
            {"prefill_seconds", run.prefill_seconds},
            {"prefill_tokens_per_second", static_cast<double>(run.tokens) / run.prefill_seconds},
            {"total_seconds", run.total_seconds},
            {"attended_fraction", run.attended_fraction},
            {"halo_bytes", run.halo_bytes},
            {"landmark_bytes", run.landmark_bytes},
            {"mfu", run.mfu},
            {"matmul_flops_per_second", run.matmul_rate},
            {"exposed_communication_seconds", run.exposed_seconds},
            {"peak_memory_bytes", run.peak_memory_bytes},
            {"phase_seconds", run.phases}};
  if (run.peak_device_bytes > 0) json["peak_device_memory_bytes"] = run.peak_device_bytes;
  if (run.context_bytes > 0) {
    json["context_bytes"] = run.context_bytes;
    json["context_bytes_per_token"] =
        static_cast<double>(run.context_bytes) / static_cast<double>(run.tokens);
    json["context_broadcast_bytes"] = run.context_bytes_sent;
  }
  return json;
}

Json record_of(const std::string& document, const Sequence& sequence, Task task) {
  const auto all = static_cast<int64_t>(sequence.tokens.size());
  return {{"document", document},
          {"task", task_name(task)},
          {"query", nullptr},
          {"document_tokens", all - sequence.document_begin},
          {"sequence_tokens", all}};
}

// Perplexity a token, and bits for each byte that the predicted tokens stand for; null where there are none.
Json score_result(std::span<const float> scores, const Sequence& sequence) {
  double sum = 0;
  int64_t predicted = 0;
  for (const float score : scores) {
    if (std::isnan(score)) continue;  // a first token with nothing before it
    sum += score;
    ++predicted;
  }
  Json json{{"predicted_tokens", predicted}, {"log_probability", sum}};
  json["perplexity"] = predicted == 0 ? Json(nullptr) : Json(std::exp(-sum / static_cast<double>(predicted)));
  if (sequence.document_bytes > 0) {
    const int64_t bytes = sequence.predicted_bytes;
    const bool is_known = predicted > 0 && bytes > 0;
    json["bits_per_byte"] =
        is_known ? Json(-sum / std::numbers::ln2 / static_cast<double>(bytes)) : Json(nullptr);
  }
  return json;
}

}  // namespace

DocumentRun DocumentRun::of(const MpiSession& session, RunWatch& watch, RunLog& log, const PrefillCost& cost,
                            const ModelConfig& shape, const AttentionPattern& pattern,
                            const MatmulRates& rates, const ShardPlan& shards, const DocumentContext* context,
                            double seconds) {
  DocumentRun run;
  run.tokens = shards.tokens();
  run.ranks = session.ranks();
  run.prefill_seconds = spread_over_ranks(session, seconds).max;
  run.mfu = products_alone_seconds(prefill_flops(shape, pattern, run.tokens), rates) / run.prefill_seconds;
  run.matmul_rate = rates.products;
  run.halo_bytes = sum_over_ranks(session, cost.halo.received_bytes);
  run.landmark_bytes = sum_over_ranks(session, cost.landmarks.received_bytes);
  run.context_bytes_sent = sum_over_ranks(session, cost.context.received_bytes);
  run.context_bytes = context != nullptr ? context->bytes() : 0;
  const auto n = static_cast<double>(run.tokens);
  run.attended_fraction =
      static_cast<double>(sequence_visible_pairs(pattern, run.tokens)) / (n * (n + 1) / 2);
  const LayerTimes& layers = cost.layers;
  const RankFigures figures = watch.take({{"phases",
                                           {{"keys", layers.keys},
                                            {"queries", layers.queries},
                                            {"attention", layers.attention},
                                            {"mlp", layers.mlp},
                                            {"halo_wait", cost.halo.exposed_seconds},
                                            {"landmark_wait", cost.landmarks.exposed_seconds},
                                            {"context_wait", cost.context.exposed_seconds}}},
                                          {"communication", {{"exposed", cost.exposed_seconds()}}}},
                                         layers.keys + layers.queries + layers.attention + layers.mlp,
                                         work_of_shard(shape, pattern, shards.shard(session.rank())), log);
  if (session.is_root()) {
    run.phases = figures.spreads("phases");
    run.exposed_seconds = figures.spread("communication", "exposed");
  }
  return run;
}

void DocumentRun::add_to(PrometheusText& figures) const {
  const auto gauge = [&](const char* name, const char* help, double value) {
    figures.gauge(name, help, {}, value);
  };
  gauge("longhalo_document_tokens", "Of the newest document, with the prompt's frame.",
        static_cast<double>(tokens));
  gauge("longhalo_prefill_seconds", "Of the newest document.", prefill_seconds);
  gauge("longhalo_prefill_tokens_per_second", "Of all ranks together.",
        static_cast<double>(tokens) / prefill_seconds);
  gauge("longhalo_mfu", "Useful FLOPs of the prefill over what the ranks' matrix products reach.", mfu);
  add_spreads(figures, "longhalo_phase_seconds", "Seconds by phase of the newest document, over ranks.",
              "phase", phases);
  const std::string help = "Peaks of memory, largest rank.";
  const auto memory = [&](const char* kind, int64_t bytes) {
    figures.gauge("longhalo_memory_bytes", help, {{"kind", kind}, {"stat", "max"}},
                  static_cast<double>(bytes));
  };
  memory("peak_resident", peak_memory_bytes);
  memory("peak_device_arrays", peak_device_bytes);
  const auto received = [&](const char* kind, int64_t bytes) {
    figures.gauge("longhalo_received_bytes", "By all ranks, for the newest document.", {{"kind", kind}},
                  static_cast<double>(bytes));
  };
  received("halo", halo_bytes);
  received("landmarks", landmark_bytes);
  received("context", context_bytes_sent);
}

void DocumentRun::finish(const MpiSession& session, const Engine& engine) {
  const auto on_device = static_cast<double>(engine.device_memory().arrays_bytes);
  peak_device_bytes = static_cast<int64_t>(spread_over_ranks(session, on_device).max);
  peak_memory_bytes = static_cast<int64_t>(
      spread_over_ranks(session, static_cast<double>(process_memory().peak_resident)).max);
}

std::vector<float> document_scores(std::vector<float> scores, int64_t document_begin) {
  scores.erase(scores.begin(), scores.begin() + document_begin);
  if (document_begin == 0 && !scores.empty()) scores[0] = std::numeric_limits<float>::quiet_NaN();
  return scores;
}

std::vector<Json> make_records(const std::string& document, const Inputs& inputs, const Sequence& sequence,
                               const Work& work, const DocumentRun& run, const DocumentArrays& arrays,
                               const std::vector<Answer>& answers) {
  std::vector<Json> records;
  const Json run_figures = figures(run);
  if (work.score) {
    Json& record = records.emplace_back(record_of(document, sequence, Task::kScore));
    record.update(score_result(arrays.scores, sequence));
    record["arrays"] = run.arrays_file;
    record["figures"] = run_figures;
  }
  if (work.embed) {
    Json& record = records.emplace_back(record_of(document, sequence, Task::kEmbed));
    record["chunks"] = static_cast<int64_t>(arrays.embeddings.size()) / arrays.embedding_size;
    record["embedding_size"] = arrays.embedding_size;
    record["arrays"] = run.arrays_file;
    record["figures"] = run_figures;
  }
  for (size_t i = 0; i < answers.size(); ++i) {
    const Answer& answer = answers[i];
    const Generation& generation = answer.generation;
    const auto prompt = static_cast<size_t>(work.prompts[i]);
    Json& record = records.emplace_back(record_of(document, sequence, Task::kGenerate));
    record["query"] = inputs.prompt_keys()[prompt];
    // Invalid UTF-8 (a character cut off by the length limit) becomes U+FFFD in the text; the ids are exact.
    record["answer"] = inputs.decode(generation.tokens);
    record["answer_ids"] = generation.tokens;
    record["finish_reason"] = generation.finish_reason == FinishReason::kEndToken ? "end_token" : "length";
    record["figures"] = run_figures;
    Json& of_answer = record["figures"];
    const auto steps = static_cast<double>(generation.tokens.size());
    of_answer["answered_by_rank"] = answer.rank;
    of_answer["prompt_tokens"] = sequence.prompts[prompt].size();
    of_answer["answer_tokens"] = generation.tokens.size();
    of_answer["time_to_first_token_seconds"] = run.prefill_seconds + answer.first_token_seconds;
    const double decoding = generation.seconds - generation.first_token_seconds;
    if (steps > 1 && decoding > 0) of_answer["decode_tokens_per_second"] = (steps - 1) / decoding;
  }
  return records;
}

}  // namespace longhalo
