// Tiny models and sequences whose shards of a few tokens take every path of training: windows over several
// ranks, ranks without tokens, landmarks that all later ranks see, documents that end inside windows,
// segments and shards.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "model/trainer.hpp"
#include "support/mpi_main.hpp"
#include "support/reference_model.hpp"

namespace longhalo::test {

struct Case {
  std::string name;
  AttentionPattern pattern;
  int64_t tokens;
  std::vector<int64_t> document_begins;
  bool tied = true;
  int64_t alignment = 4;
};

inline std::vector<Case> cases() {
  return {
      {"window and landmarks", AttentionPattern::window_and_landmarks(9, 4), 41, {0}},
      {"packed documents of odd lengths",
       AttentionPattern::window_and_landmarks(9, 4),
       43,
       {0, 1, 8, 21, 22, 35}},
      {"window over several shards, untied head",
       AttentionPattern::window_and_landmarks(30, 4),
       37,
       {0, 17},
       false},
      {"window alone", AttentionPattern::window_and_landmarks(7, 0), 33, {0, 13}},
      {"three scales", {{{1, 0, 6}, {2, 6, 16}, {4, 16, kUnlimited}}}, 45, {0, 31}},
      {"ranks without tokens", AttentionPattern::window_and_landmarks(5, 4), 14, {0}, true, 8},
  };
}

// What a sequence's arrays live in.
struct Data {
  std::vector<int32_t> tokens, labels;
  std::vector<int64_t> doc_start;
  TrainingSequence view() const { return {tokens, labels, doc_start}; }
};

inline Data make_data(int64_t count, int64_t vocabulary, const std::vector<int64_t>& begins, uint64_t seed) {
  Data data;
  data.tokens = random_tokens(count, vocabulary, seed);
  data.doc_start.resize(data.tokens.size());
  data.labels.assign(data.tokens.size(), kIgnoredLabel);
  for (size_t d = 0; d < begins.size(); ++d) {
    const int64_t end = d + 1 < begins.size() ? begins[d + 1] : count;
    for (int64_t i = begins[d]; i < end; ++i) {
      data.doc_start[static_cast<size_t>(i)] = begins[d];
      if (i + 1 < end) data.labels[static_cast<size_t>(i)] = data.tokens[static_cast<size_t>(i) + 1];
    }
  }
  return data;
}

inline Weights tiny_model(const AttentionPattern& pattern, bool tied, uint64_t seed, int64_t layers = 2) {
  ModelConfig config;
  config.layers = layers;
  config.hidden = 8;
  config.ffn = 12;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 8;
  config.vocabulary = 11;
  config.tied_embeddings = tied;
  return small_model(config, static_cast<int64_t>(pattern.strides().size()), seed);
}

inline Weights copy_of(Weights& from) {
  Weights copy = zeros_like(from);
  const std::vector<Parameter> source = parameters_of(from), target = parameters_of(copy);
  for (size_t i = 0; i < source.size(); ++i)
    std::copy(source[i].values.begin(), source[i].values.end(), target[i].values.begin());
  return copy;
}

// Gradients of all ranks together, as one list.
inline std::vector<float> summed(Weights& gradients) {
  std::vector<float> all;
  for (const Parameter& parameter : parameters_of(gradients))
    all.insert(all.end(), parameter.values.begin(), parameter.values.end());
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, all.data(), static_cast<int>(all.size()), MPI_FLOAT, MPI_SUM,
                          session().comm()),
            "MPI_Allreduce");
  return all;
}

inline TrainerOptions options_of_a_run() {
  TrainerOptions options;
  options.adamw.weight_decay = 0.1;
  options.schedule = {ScheduleShape::kCosine, 3e-3, 3e-4, 3, 0, 20};
  options.z_loss = 1e-3;
  return options;
}

}  // namespace longhalo::test
