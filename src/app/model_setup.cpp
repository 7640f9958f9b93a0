#include "app/model_setup.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "kernels/matmul/matmul.hpp"

namespace longhalo {

AttentionPattern attention_pattern(const Config& config) {
  if (config.attention.bands.empty())
    return AttentionPattern::window_and_landmarks(config.attention.window, config.attention.landmark_stride);
  AttentionPattern pattern;
  for (const BandConfig& band : config.attention.bands)
    pattern.bands.push_back({band.stride, band.near, band.far == kFarUnlimited ? kUnlimited : band.far});
  return pattern;
}

ModelConfig model_shape(const Config& config) {
  if (config.model.weights == WeightsSource::kCheckpoint) return read_model_config(config.model.path);
  const Config::Model::Shape& shape = config.model.shape;
  ModelConfig model;
  model.layers = shape.layers;
  model.hidden = shape.hidden;
  model.ffn = shape.ffn;
  model.heads = shape.heads;
  model.kv_heads = shape.kv_heads;
  model.head_dim = shape.head_dim;
  model.vocabulary = shape.vocabulary;
  model.tied_embeddings = true;
  validate_model_config(model, "model.shape");
  return model;
}

int wanted_threads(const MpiSession& session, const Config& config) {
  int threads = static_cast<int>(config.run.threads);
  if (threads == 0)
    if (const char* named = std::getenv("OMP_NUM_THREADS")) threads = std::atoi(named);
  if (threads < 1) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    const bool known = sched_getaffinity(0, sizeof allowed, &allowed) == 0;
    const auto online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    threads = known ? CPU_COUNT(&allowed) : online;
    // A launcher that binds ranks gives each its own cores; one that does not gives all of them every core.
    if (threads >= online) threads /= session.local_ranks();
  }
  return std::max(threads, 1);
}

int use_threads(const MpiSession& session, const Config& config) {
  session.together([&] { set_kernel_threads(wanted_threads(session, config)); });
  return kernel_threads();
}

ProgressOptions progress_options(const MpiSession& session, const Config& config) {
  ProgressOptions options;
  switch (config.run.progress) {
    case ProgressMode::kAuto:
      options.style = ProgressStyle::kAuto;
      break;
    case ProgressMode::kBar:
      options.style = ProgressStyle::kBar;
      break;
    case ProgressMode::kLines:
      options.style = ProgressStyle::kLines;
      break;
    case ProgressMode::kOff:
      options.style = ProgressStyle::kOff;
      break;
  }
  if (!session.is_root()) options.style = ProgressStyle::kOff;
  return options;
}

}  // namespace longhalo
