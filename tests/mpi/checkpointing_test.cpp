// Activation checkpointing: wherever the inputs of layers are kept, and of however many layers, loss and
// gradients are those of a pass that keeps everything, to the last bit; and a store that fails on one rank
// ends the step on all of them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>

#include "comm/shard_plan.hpp"
#include "core/text.hpp"
#include "kernels/matmul/matmul.hpp"
#include "scratch.hpp"
#include "storage/disk_activation_store.hpp"
#include "storage/hdf5.hpp"
#include "training_fixture.hpp"

namespace longhalo::test {
namespace {

constexpr int64_t kLayers = 5;  // no multiple of 2 or 4
constexpr int64_t kSteps = 2;

enum class Where { kMemory, kDisk };

// A folder that all ranks share, gone at the end.
class SharedFolder {
 public:
  SharedFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "longhalo_checkpointing.XXXXXX").string();
    session().together([&] {
      if (session().is_root() && ::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no " + name);
    });
    path_ = broadcast_text(session(), name);
  }
  ~SharedFolder() {
    MPI_Barrier(session().comm());
    std::error_code ignored;
    if (session().is_root()) std::filesystem::remove_all(path_, ignored);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::unique_ptr<ActivationStore> make_store(Where where, const ActivationShape& shape,
                                            const std::filesystem::path& folder) {
  if (where == Where::kMemory) return std::make_unique<HostActivationStore>(shape);
  DiskStoreOptions options;
  options.directory = folder;
  options.rank = session().rank();
  options.shape = shape;
  options.chunk_bytes = 4096;  // several chunks a layer, and fewer buffers than chunks
  options.buffers = 3;
  options.threads = 2;
  return std::make_unique<DiskActivationStore>(options);
}

// Everything that a run of two steps of two sequences leaves behind.
struct Outcome {
  std::vector<double> losses;
  std::vector<float> gradients, weights;
  double validated = 0;
  StoreFigures figures;
};

std::vector<float> flat(Weights& weights) {
  std::vector<float> all;
  for (const Parameter& parameter : parameters_of(weights))
    all.insert(all.end(), parameter.values.begin(), parameter.values.end());
  return all;
}

Outcome run(const Case& test, std::optional<Where> where, double every, const std::filesystem::path& folder) {
  const ShardPlan shards(test.tokens, session().ranks(), test.alignment);
  Weights weights = tiny_model(test.pattern, test.tied, 15, kLayers);
  std::unique_ptr<ActivationStore> store;
  TrainerOptions options = options_of_a_run();
  if (where) {
    session().together([&] {
      store = make_store(*where,
                         stored_inputs_shape(KeptLayers(kLayers, every),
                                             shards.shard(session().rank()).size(), weights.config.hidden),
                         folder);
    });
    options.checkpointing = {store.get(), every};
  }
  Outcome outcome;
  Trainer trainer(session(), weights, test.pattern, shards, 6, options);
  std::vector<Data> data;
  for (uint64_t seed = 1; seed <= 3; ++seed)
    data.push_back(make_data(test.tokens, weights.config.vocabulary, test.document_begins, seed));
  for (int64_t step = 1; step <= kSteps; ++step) {
    const TrainingSequence sequences[2] = {data[static_cast<size_t>(step) % data.size()].view(),
                                           data[static_cast<size_t>(step + 1) % data.size()].view()};
    const StepResult result = trainer.step(step, sequences);
    EXPECT_FALSE(result.skipped);
    outcome.losses.push_back(result.loss);
    outcome.losses.push_back(result.gradient_norm);
    outcome.validated = trainer.validate(std::vector{data[0].view()});
  }
  outcome.gradients = flat(trainer.gradients());
  outcome.weights = flat(weights);
  if (store) outcome.figures = store->figures();
  return outcome;
}

TEST(Checkpointing, IsTheSameToTheLastBit) {
  set_kernel_threads(1);
  const SharedFolder folder;
  for (const Case& test : cases()) {
    SCOPED_TRACE(test.name);
    const Outcome expected = run(test, std::nullopt, 1, folder.path());
    for (const Where where : {Where::kMemory, Where::kDisk}) {
      const std::vector<double> periods =
          where == Where::kMemory ? std::vector<double>{1, 1.3, 9} : std::vector<double>{1, 2, 4};
      for (const double every : periods) {
        SCOPED_TRACE(text(where == Where::kDisk ? "disk" : "memory", ", every ", every));
        const Outcome outcome = run(test, where, every, folder.path());
        EXPECT_EQ(outcome.losses, expected.losses);
        EXPECT_EQ(outcome.gradients, expected.gradients);
        EXPECT_EQ(outcome.weights, expected.weights);
        EXPECT_EQ(outcome.validated, expected.validated);
        // Each pass stores and takes back the inputs of every so many-th layer once.
        const int64_t own =
            ShardPlan(test.tokens, session().ranks(), test.alignment).shard(session().rank()).size();
        const int64_t bytes = 2 * kSteps * KeptLayers(kLayers, every).count() * own * 8 * 4;
        EXPECT_EQ(outcome.figures.bytes_put, bytes);
        EXPECT_EQ(outcome.figures.bytes_fetched, bytes);
      }
    }
  }
}

// A wide model, so that a rank's layer input has many chunks, more than the store has buffers.
TEST(Checkpointing, InputsLargerThanTheBuffersOfTheStore) {
  set_kernel_threads(1);
  const SharedFolder folder;
  const AttentionPattern pattern = AttentionPattern::window_and_landmarks(9, 4);
  ModelConfig config;
  config.layers = 3;
  config.hidden = 96;
  config.ffn = 40;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 8;
  config.vocabulary = 11;
  const int64_t tokens = 301;
  const ShardPlan shards(tokens, session().ranks(), 4);
  const Data data = make_data(tokens, 11, {0, 130}, 4);
  std::vector<std::vector<float>> all;
  for (const bool on_disk : {false, true}) {
    Weights weights = small_model(config, 1, 3);
    Weights gradients = zeros_like(weights);
    std::unique_ptr<ActivationStore> store;
    Checkpointing checkpointing;
    if (on_disk) {
      session().together([&] {
        store = make_store(
            Where::kDisk,
            stored_inputs_shape(KeptLayers(3, 1), shards.shard(session().rank()).size(), config.hidden),
            folder.path());
      });
      checkpointing.store = store.get();
    }
    TrainingPass pass(session(), weights, gradients, pattern, shards, 16, checkpointing);
    for (int repeat = 0; repeat < 3; ++repeat)
      pass.forward_backward(data.view(), 1, 0, {});
    all.push_back(flat(gradients));
  }
  EXPECT_EQ(all[0], all[1]);
}

// A store on disk to which something happens before a layer is put or fetched.
class DisturbedStore : public ActivationStore {
 public:
  using Disturb = std::function<void(DiskActivationStore& store)>;
  explicit DisturbedStore(const DiskStoreOptions& options)
      : store_(std::make_unique<DiskActivationStore>(options)) {}
  void before_put(int layer, Disturb disturb) { put_layer_ = layer, put_ = std::move(disturb); }
  void before_fetch(int layer, Disturb disturb) { fetch_layer_ = layer, fetch_ = std::move(disturb); }

  void put(int layer, std::span<const std::byte> bytes) override { store_->put(layer, bytes); }
  void put_from(int layer, Source source) override {
    if (layer == put_layer_) put_(*store_);
    store_->put_from(layer, std::move(source));
  }
  void finish_put(int layer) override { store_->finish_put(layer); }
  void start_fetch(int layer) override {
    if (layer == fetch_layer_) fetch_(*store_);
    store_->start_fetch(layer);
  }
  void get(int layer, std::span<std::byte> bytes) override { store_->get(layer, bytes); }
  void get_to(int layer, const Sink& sink) override { store_->get_to(layer, sink); }
  StoreFigures figures() const override { return store_->figures(); }
  std::span<std::byte> transfer_memory() override { return store_->transfer_memory(); }

 private:
  std::unique_ptr<DiskActivationStore> store_;
  int put_layer_ = -1, fetch_layer_ = -1;
  Disturb put_, fetch_;
};

int64_t place_of(const DiskActivationStore& store, int layer) {
  return Hdf5File::open(store.file()).dataset(text("/step_state/layer_00", layer, "/x")).file_offset();
}

void flip_a_bit(DiskActivationStore& store, int layer) {
  store.flush();
  const int64_t at = place_of(store, layer) + 77;
  std::fstream bytes(store.file(), std::ios::in | std::ios::out | std::ios::binary);
  bytes.seekg(at);
  const char changed = static_cast<char>(bytes.get() ^ 4);
  bytes.seekp(at);
  bytes.put(changed);
}

// A step on a store of `options`, of which `disturb` arranges something on the last rank that has tokens: it
// must end on all ranks by an error of that rank which has these words.
void expect_joint_error(DiskStoreOptions options, const std::function<void(DisturbedStore& store)>& disturb,
                        const std::vector<std::string>& words) {
  Case test = cases()[0];
  test.tokens = 1201;  // some blocks of the disk a layer
  const ShardPlan shards(test.tokens, session().ranks(), test.alignment);
  const int victim = shards.owner(test.tokens - 1);
  Weights weights = tiny_model(test.pattern, true, 15, kLayers);
  options.rank = session().rank();
  options.shape = stored_inputs_shape(KeptLayers(kLayers, 2), shards.shard(session().rank()).size(),
                                      weights.config.hidden);
  std::unique_ptr<DisturbedStore> store;
  session().together([&] { store = std::make_unique<DisturbedStore>(options); });
  if (session().rank() == victim) disturb(*store);
  TrainerOptions training = options_of_a_run();
  training.checkpointing = {store.get(), 2};
  Trainer trainer(session(), weights, test.pattern, shards, 6, training);
  const Data data = make_data(test.tokens, 11, {0}, 3);
  try {
    trainer.step(1, std::vector{data.view(), data.view()});
    ADD_FAILURE() << "nobody saw it";
  } catch (const JointError& error) {
    EXPECT_EQ(error.reporting_rank, victim);
    EXPECT_EQ(error.exit_code, ExitCode::kUserError);
    const std::string message = error.what();
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << message;
    if (session().ranks() > 1) {
      EXPECT_NE(message.find(text("rank:   ", victim)), std::string::npos) << message;
    }
  }
  EXPECT_EQ(trainer.optimizer().steps(), 0);
}

TEST(Checkpointing, DamageOnOneRankEndsTheStepOnAll) {
  set_kernel_threads(1);
  const SharedFolder folder;
  DiskStoreOptions options;
  options.directory = folder.path();
  for (const int damaged : {0, 2, 4}) {
    SCOPED_TRACE(text("layer ", damaged));
    expect_joint_error(options,
                       [&](DisturbedStore& store) {
                         store.before_fetch(
                             damaged, [damaged](DiskActivationStore& disk) { flip_a_bit(disk, damaged); });
                       },
                       {text("of layer ", damaged, " are not those"), "checksum differs", "activations.h5"});
  }
}

// The file is reserved when it is made, so somebody has to take the space away: a hole in its place, and a
// file that fills the disk.
TEST(Checkpointing, FullDiskInTheMiddleOnOneRankEndsTheStepOnAll) {
  set_kernel_threads(1);
  const testing::TinyDisk disk;  // of this rank's own
  double without = disk.reason().empty() ? 0 : 1;
  without = spread_over_ranks(session(), without).max;
  if (without > 0) GTEST_SKIP() << "a rank has no small file system: " << disk.reason();
  DiskStoreOptions options;
  options.directory = disk.path();
  for (const int layer : {0, 4}) {
    SCOPED_TRACE(text("layer ", layer));
    const auto take_space = [&](DiskActivationStore& store) {
      const int file = ::open(store.file().c_str(), O_RDWR | O_CLOEXEC);
      const int64_t block = (place_of(store, layer) + 4095) / 4096 * 4096;
      EXPECT_EQ(::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, block, 4096), 0);
      ::close(file);
      std::ofstream(disk / "filler") << std::string(2 << 20, 'x');
    };
    expect_joint_error(options, [&](DisturbedStore& store) { store.before_put(layer, take_space); },
                       {"No space left", "activations.h5", "bytes needed"});
    std::filesystem::remove(disk / "filler");
  }
}

}  // namespace
}  // namespace longhalo::test
