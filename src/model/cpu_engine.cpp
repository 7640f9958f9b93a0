// The engine of the CPU path: fp32, halos over MPI in host memory.
#include <algorithm>

#include "core/text.hpp"
#include "device/available_memory.hpp"
#include "kernels/matmul/matmul.hpp"
#include "model/decoder.hpp"
#include "model/engine.hpp"
#include "model/outputs.hpp"
#include "model/prefill.hpp"

namespace longhalo {
namespace {

constexpr int64_t kDefaultTile = 1024;  // larger ones gain little (docs/performance.md)
constexpr int64_t kDecodeTile = 256;
constexpr int64_t kFloat = sizeof(float), kDouble = sizeof(double);

struct CpuContext : DocumentContext {
  explicit CpuContext(Context kept) : context(std::move(kept)) {}
  int64_t bytes() const override { return context.bytes(); }
  Context context;
};

// A continuation with the context that it extends.
class OwningContinuation : public Continuation {
 public:
  OwningContinuation(Decoder& decoder, Context context)
      : context_(std::move(context)), continuation_(decoder, context_) {}
  void extend(std::span<const int32_t> tokens) override { continuation_.extend(tokens); }
  int32_t most_likely() override { return continuation_.most_likely(); }
  std::span<const float> logits() override { return continuation_.logits(); }

 private:
  Context context_;
  CpuContinuation continuation_;
};

class CpuReading : public Reading {
 public:
  CpuReading(const MpiSession& session, const Weights& weights, const AttentionPattern& pattern,
             const ShardPlan& shards, int64_t tile)
      : session_(session),
        weights_(weights),
        shards_(shards),
        prefill_(session, weights, pattern, shards, tile) {}

  void prefill(std::span<const int32_t> tokens, KeepContext keep, const PrefillProgress& progress) override {
    std::optional<Context> context = prefill_.run(tokens, keep, progress);
    if (context) context_ = std::make_unique<CpuContext>(std::move(*context));
  }
  std::unique_ptr<DocumentContext> take_context() override { return std::move(context_); }
  void require_finite() const override {
    longhalo::require_finite(weights_.config, prefill_.shard(), prefill_.residual());
  }
  std::vector<float> scores(std::span<const int32_t> tokens, const RowProgress& progress) override {
    return score_tokens(session_, weights_, shards_, tokens, prefill_.residual(), progress);
  }
  std::vector<float> embeddings(int64_t chunk_tokens, int64_t first_token) override {
    return embed_chunks(session_, weights_, shards_, prefill_.residual(), chunk_tokens, first_token);
  }
  const PrefillCost& cost() const override { return prefill_.cost(); }

 private:
  const MpiSession& session_;
  const Weights& weights_;
  const ShardPlan& shards_;
  Prefill prefill_;
  std::unique_ptr<CpuContext> context_;
};

class CpuEngine : public Engine {
 public:
  CpuEngine(const MpiSession& session, const ModelConfig& config, const AttentionPattern& pattern)
      : session_(session), config_(config), pattern_(pattern) {}

  const ModelConfig& config() const override { return config_; }
  const AttentionPattern& pattern() const override { return pattern_; }
  Precision precision() const override { return Precision::kFp32; }
  std::string device() const override { return "CPU"; }
  std::string transport() const override { return "mpi, host memory"; }
  int64_t default_tile() const override { return kDefaultTile; }

  void load_weights(const WeightsRequest& request, const LayerProgress& progress) override {
    weights_ = request.checkpoint
                   ? longhalo::load_weights(*request.checkpoint, config_, request.landmarks, progress)
                   : random_weights(config_, request.landmarks, request.seed);
  }

  std::vector<MemoryItem> memory(const ShardPlan& shards, int64_t tile, const Wanted& wanted) const override;
  int64_t available_bytes() const override {
    return available_host_bytes() / session_.local_ranks() + (weights_.layers.empty() ? 0 : weights_.bytes());
  }
  std::string memory_place() const override { return text("host ", session_.host()); }
  DeviceMemoryUse device_memory() const override { return {}; }
  MatmulRates measure_rates(double seconds) override {
    const double rate = measure_matmul_rate(seconds);
    return {rate, rate};
  }

  std::unique_ptr<Reading> read(const ShardPlan& shards, int64_t tile) override {
    return std::make_unique<CpuReading>(session_, weights_, pattern_, shards, tile);
  }
  std::unique_ptr<DocumentContext> empty_context() override {
    return std::make_unique<CpuContext>(Context(config_, pattern_));
  }
  std::unique_ptr<Continuation> continue_from(const DocumentContext& context) override {
    if (!decoder_) decoder_ = std::make_unique<Decoder>(weights_, pattern_, kDecodeTile);
    return std::make_unique<OwningContinuation>(*decoder_,
                                                dynamic_cast<const CpuContext&>(context).context.clone());
  }

 private:
  const MpiSession& session_;
  ModelConfig config_;
  AttentionPattern pattern_;
  Weights weights_;
  std::unique_ptr<Decoder> decoder_;
};

std::vector<MemoryItem> CpuEngine::memory(const ShardPlan& shards, int64_t tile, const Wanted& wanted) const {
  const ModelConfig& c = config_;
  const Prefill::Memory prefill = Prefill::memory(c, pattern_, shards, tile);
  std::vector<MemoryItem> items{{"weights", c.parameters() * kFloat},
                                {"residual stream", prefill.residual},
                                {"keys and values of a layer", prefill.keys},
                                {"workspace", prefill.workspace}};
  if (wanted.context == KeepContext::kYes) {
    int64_t rows = std::min(pattern_.exact_reach(), shards.tokens());
    for (const int64_t stride : pattern_.strides())
      rows += shards.tokens() / stride;
    const int64_t context = 2 * rows * c.kv_size() * c.layers * kFloat;
    items.push_back({"context", context});
    items.push_back({"a query's context while it grows", context * 9 / 4});
  }
  if (wanted.scores) items.push_back({"logits", int64_t{33} << 20});
  if (wanted.embed_chunk_tokens >
      0) {  // rank 0: sums of all ranks, totals (fp64), means (fp32); others: sums
    const int64_t values = (shards.tokens() / wanted.embed_chunk_tokens + 1) * c.hidden;
    items.push_back({"embeddings", values * (3 * kDouble + kFloat)});
  }
  return items;
}

}  // namespace

std::unique_ptr<Engine> make_cpu_engine(const MpiSession& session, const ModelConfig& config,
                                        const AttentionPattern& pattern) {
  return std::make_unique<CpuEngine>(session, config, pattern);
}

}  // namespace longhalo
