// Training on the CPU: fp32, halos over MPI in host memory.
#include "core/text.hpp"
#include "device/available_memory.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/stored_inputs.hpp"
#include "model/training_engine.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDefaultTile = 1024;

class CpuTrainingEngine : public TrainingEngine {
 public:
  CpuTrainingEngine(const MpiSession& session, const ModelConfig& config, const AttentionPattern& pattern)
      : session_(session), config_(config), pattern_(pattern) {}

  const ModelConfig& config() const override { return config_; }
  Precision precision() const override { return Precision::kFp32; }
  std::string device() const override { return "CPU"; }
  std::string transport() const override { return "mpi, host memory"; }

  int64_t default_tile() const override { return kDefaultTile; }
  TrainingMemory memory(const ShardPlan& shards, int64_t tile, double every) const override {
    return training_memory(config_, pattern_, shards, tile, every);
  }
  int64_t available_bytes() const override { return available_host_bytes() / session_.local_ranks(); }
  std::string memory_place() const override { return text("host ", session_.host()); }
  bool has_own_memory() const override { return false; }
  double measure_matmul_rate(double seconds) override { return longhalo::measure_matmul_rate(seconds); }
  ActivationShape stored_inputs_shape(int64_t tokens, double every) const override {
    return longhalo::stored_inputs_shape(KeptLayers(config_.layers, every), tokens, config_.hidden);
  }

  void load_weights(const WeightsRequest& request) override {
    weights_ = request.checkpoint ? longhalo::load_weights(*request.checkpoint, config_, request.landmarks)
                                  : random_weights(config_, request.landmarks, request.seed);
    add_landmark_queries(weights_, request.landmarks.strided_bands);
  }
  void begin(const ShardPlan& shards, const TrainingEngineOptions& options) override {
    trainer_ = std::make_unique<Trainer>(session_, weights_, pattern_, shards, options.tile, options.trainer);
  }

  StepResult step(int64_t number, std::span<const TrainingSequence> sequences) override {
    return trainer_->step(number, sequences);
  }
  double validate(std::span<const TrainingSequence> sequences) override {
    return trainer_->validate(sequences);
  }
  StepTimes times() override { return trainer_->times(); }
  DeviceMemoryUse device_memory() const override { return {}; }
  int64_t updates() const override { return trainer_->optimizer().steps(); }

  std::vector<ParameterSize> parameters() override { return sizes_of(parameters_of(weights_)); }
  TrainingSnapshot snapshot(const CheckpointWriter& writer) override {
    return snapshot_of(weights_, trainer_->optimizer(), writer);
  }
  void restore(OptimizerStateReader& reader, int64_t updates) override {
    restore_optimizer(session_, reader, updates, trainer_->optimizer());
  }
  Dtype matrix_type() const override { return Dtype::kF32; }
  ModelTensors model_tensors() override {
    ModelTensors all{arrays_of(weights_), {}};
    all.tensors = longhalo::model_tensors(all.arrays);
    return all;
  }

 private:
  const MpiSession& session_;
  ModelConfig config_;
  AttentionPattern pattern_;
  Weights weights_;
  std::unique_ptr<Trainer> trainer_;
};

}  // namespace

std::unique_ptr<TrainingEngine> make_cpu_training_engine(const MpiSession& session, const ModelConfig& config,
                                                         const AttentionPattern& pattern) {
  return std::make_unique<CpuTrainingEngine>(session, config, pattern);
}

}  // namespace longhalo
