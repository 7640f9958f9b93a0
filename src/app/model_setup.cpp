#include "app/model_setup.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>

#include "core/log.hpp"
#include "core/text.hpp"
#include "kernels/matmul/matmul.hpp"

namespace longhalo {
namespace {

std::optional<int> allowed_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return std::nullopt;
  return CPU_COUNT(&allowed);
}

// What is wrong with this rank's number of threads, or nothing.
std::string doubt_of(int threads, const std::string& unusable) {
  const std::string remedy =
      "set run.threads or OMP_NUM_THREADS to the cores that a rank has, or give it more (sbatch "
      "--cpus-per-task, mpirun --map-by slot:pe=N)";
  if (!unusable.empty())
    return text(unusable, " is no number of threads, from 1 on, and is passed by: a rank takes its share of ",
                "the cores, here ", threads, "; ", remedy);
  const std::optional<int> cores = allowed_cores();
  if (!cores || threads <= *cores) return {};
  return text("the ", threads, " threads of a rank take turns on ", *cores,
              *cores == 1 ? " core; " : " cores; ", remedy);
}

// One warning for all ranks.
void warn_of_threads(const MpiSession& session, const std::string& doubt) {
  int ranks = 0;
  std::string first;
  for (const std::string& one : gather_text(session, doubt)) {
    if (one.empty()) continue;
    if (ranks++ == 0) first = one;
  }
  if (ranks > 0)
    log_warning(session.ranks() == 1 ? first : text(first, " (", ranks, " of ", session.ranks(), " ranks)"));
}

}  // namespace

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

int omp_threads(std::string_view value) {
  constexpr std::string_view kSpace = " \t\n";
  int first = 0;
  for (bool is_last = false; !is_last;) {
    const size_t comma = value.find(',');
    is_last = comma == std::string_view::npos;
    std::string_view entry = value.substr(0, comma);
    entry.remove_prefix(std::min(entry.find_first_not_of(kSpace), entry.size()));
    entry = entry.substr(0, entry.find_last_not_of(kSpace) + 1);
    int number = 0;
    const auto [end, error] = std::from_chars(entry.data(), entry.data() + entry.size(), number);
    if (error != std::errc() || end != entry.data() + entry.size() || number < 1) return 0;
    if (first == 0) first = number;
    if (!is_last) value.remove_prefix(comma + 1);
  }
  return first;
}

std::string unusable_omp_threads(const Config& config) {
  const char* named = std::getenv("OMP_NUM_THREADS");
  const bool is_unusable = config.run.threads == 0 && named != nullptr && omp_threads(named) == 0;
  return is_unusable ? text("OMP_NUM_THREADS='", named, "'") : "";
}

int wanted_threads(const MpiSession& session, const Config& config) {
  int threads = static_cast<int>(config.run.threads);
  if (threads == 0)
    if (const char* named = std::getenv("OMP_NUM_THREADS")) threads = omp_threads(named);
  if (threads < 1) {
    const auto online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
    threads = allowed_cores().value_or(online);
    // A launcher that binds ranks gives each its own cores; one that does not gives all of them every core.
    if (threads >= online) threads /= session.local_ranks();
  }
  return std::max(threads, 1);
}

int use_threads(const MpiSession& session, const Config& config) {
  const int threads = wanted_threads(session, config);
  warn_of_threads(session, doubt_of(threads, unusable_omp_threads(config)));
  session.together([&] { set_kernel_threads(threads); });
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
