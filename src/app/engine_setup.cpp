#include "app/engine_setup.hpp"

#include <algorithm>

#include "app/device_setup.hpp"
#include "app/model_setup.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#ifdef LONGHALO_HAVE_CUDA
#include "model/cuda_engine.hpp"
#include "model/cuda_training_engine.hpp"
#include "model/device_weights.hpp"
#endif

namespace longhalo {
namespace {

void log_choice(const MpiSession& session, const std::string& words) {
  if (session.is_root()) log_info(words);
}

#ifdef LONGHALO_HAVE_CUDA

std::string why_cpu() {
  return why_no_device();
}

std::string origin_of(const Config& config) {
  return config.model.weights == WeightsSource::kRandom ? "model.shape" : config.model.path + "/config.json";
}

// Whether the kernels take the model; where run.device: auto had better take the CPU, the log says so.
bool gpu_takes(const MpiSession& session, const Config& config, const ModelConfig& shape,
               Precision precision) {
  const auto objection = device_shape_objection(shape, precision, origin_of(config));
  if (!objection) return true;
  const bool has_choice =
      config.run.device == DeviceSetting::kAuto && config.run.precision == PrecisionSetting::kAuto;
  if (!has_choice) session.together([&] { throw UserError(*objection); });
  log_choice(session, text("run.device auto is the CPU here, although there are GPUs: ", objection->what()));
  return false;
}

template <class Engine>
void log_gpu(const MpiSession& session, const Config& config, const Engine& engine) {
  log_choice(session,
             text("computing on ", engine.device(), " in ", name_of(engine.precision()),
                  config.run.device == DeviceSetting::kAuto ? ", which every rank has (run.device auto)" : "",
                  "; halos by ", engine.transport()));
}

Precision cuda_precision(const Config& config) {
  switch (run_precision(config, RunDevice::kCuda)) {
    case PrecisionSetting::kFp8:
      return Precision::kFp8;
    case PrecisionSetting::kInt8:
      return Precision::kInt8;
    default:
      return Precision::kBf16;
  }
}

std::unique_ptr<Engine> cuda_engine(const MpiSession& session, const Config& config, const ModelConfig& shape,
                                    const AttentionPattern& pattern) {
  const Precision precision = cuda_precision(config);
  if (!gpu_takes(session, config, shape, precision)) return nullptr;
  std::unique_ptr<Engine> engine = make_cuda_engine(session, open_gpu(session, config),
                                                    transport_choice(config), shape, pattern, precision);
  log_gpu(session, config, *engine);
  return engine;
}

std::unique_ptr<TrainingEngine> cuda_training_engine(const MpiSession& session, const Config& config,
                                                     const ModelConfig& shape,
                                                     const AttentionPattern& pattern) {
  if (!gpu_takes(session, config, shape, Precision::kBf16)) return nullptr;
  std::unique_ptr<TrainingEngine> engine =
      make_cuda_training_engine(session, open_gpu(session, config), transport_choice(config), shape, pattern);
  log_gpu(session, config, *engine);
  return engine;
}

#else

std::string why_cpu() {
  return "this build of longhalo has no CUDA";
}

std::unique_ptr<Engine> cuda_engine(const MpiSession&, const Config&, const ModelConfig&,
                                    const AttentionPattern&) {
  return nullptr;
}

std::unique_ptr<TrainingEngine> cuda_training_engine(const MpiSession&, const Config&, const ModelConfig&,
                                                     const AttentionPattern&) {
  return nullptr;
}

#endif

// Whether GPUs compute, with a word on why not where that was left open.
bool on_gpus(const MpiSession& session, const Config& config) {
  if (run_device(session, config) == RunDevice::kCuda) return true;
  if (config.run.device == DeviceSetting::kAuto)
    log_choice(session, text("computing on the CPU in fp32 (run.device auto): ", why_cpu()));
  return false;
}

}  // namespace

std::unique_ptr<Engine> make_engine(const MpiSession& session, const Config& config, const ModelConfig& shape,
                                    const AttentionPattern& pattern) {
  if (on_gpus(session, config))
    if (std::unique_ptr<Engine> engine = cuda_engine(session, config, shape, pattern)) return engine;
  session.together([&] { run_precision(config, RunDevice::kCpu); });
  return make_cpu_engine(session, shape, pattern);
}

std::unique_ptr<TrainingEngine> make_training_engine(const MpiSession& session, const Config& config,
                                                     const ModelConfig& shape,
                                                     const AttentionPattern& pattern) {
  if (on_gpus(session, config))
    if (std::unique_ptr<TrainingEngine> engine = cuda_training_engine(session, config, shape, pattern))
      return engine;
  session.together([&] { run_precision(config, RunDevice::kCpu); });
  return make_cpu_training_engine(session, shape, pattern);
}

WeightsRequest weights_request(const Config& config, const AttentionPattern& pattern) {
  WeightsRequest request;
  request.landmarks = {static_cast<int64_t>(pattern.strides().size()), config.attention.landmark_bias};
  request.seed = static_cast<uint64_t>(config.model.seed);
  if (config.model.weights == WeightsSource::kCheckpoint) request.checkpoint = config.model.path;
  return request;
}

int64_t calibration_tokens(const Engine& engine) {
  if (engine.precision() != Precision::kFp8) return 0;
  // They are one sequence, and beyond what a model was trained on its activations are others.
  const int64_t trained = engine.config().trained_positions;
  return trained > 0 ? std::min(kCalibrationTokens, trained) : kCalibrationTokens;
}

void load_weights(const MpiSession& session, const Config& config, Engine& engine,
                  std::vector<int32_t> calibration) {
  const Stopwatch watch;
  const ModelConfig& shape = engine.config();
  const std::string fitted =
      calibration.empty() ? "" : text(", fitted to ", calibration.size(), " tokens of the job,");
  WeightsRequest request = weights_request(config, engine.pattern());
  request.calibration = std::move(calibration);
  session.together([&] {
    if (!request.checkpoint) return engine.load_weights(request);
    Progress progress("loading weights", shape.layers, ProgressUnit::kLayers,
                      progress_options(session, config));
    engine.load_weights(request, [&](int64_t done, int64_t) { progress.set(done); });
  });
  if (session.is_root())
    log_info(text("model: ", static_cast<double>(shape.parameters()) / 1e6, "M parameters, ", shape.layers,
                  " layers in ", name_of(engine.precision()), fitted, " on every rank, ready in ",
                  watch.seconds(), " s"));
}

}  // namespace longhalo
