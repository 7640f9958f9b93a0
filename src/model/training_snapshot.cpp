#include "model/training_snapshot.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "core/text.hpp"
#include "storage/sha256.hpp"

namespace longhalo {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kChunk = int64_t{1} << 24;  // elements that are read at once

// In the order of the groups also as text, which is how the reader lists them.
std::string group_name(size_t index) {
  char name[40];
  std::snprintf(name, sizeof name, "bucket_%08zu", index);
  return name;
}

HostBuffer<float> copy_of(const OptimizerLayout& layout, const float* values, const CopyBytes& copy,
                          const char* purpose) {
  int64_t elements = 0;
  for (const OwnedElements& own : layout.owned)
    elements += own.flat.size();
  HostBuffer<float> copied(elements, purpose);
  int64_t to = 0;
  for (const OwnedElements& own : layout.owned) {
    copy(copied.data() + to, values + own.at, own.flat.size() * kFloat);
    to += own.flat.size();
  }
  return copied;
}

void copy_in_host(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

// The state in the flat order of parameters, across the groups that wrote it.
class FlatState {
 public:
  explicit FlatState(OptimizerStateReader& reader) : reader_(reader), groups_(reader.groups()) {
    for (const std::string& group : groups_)
      ends_.push_back(elements() + reader.total(group));
  }
  int64_t elements() const { return ends_.empty() ? 0 : ends_.back(); }
  void read(const char* array, int64_t begin, std::span<float> out) {
    const int64_t end = begin + static_cast<int64_t>(out.size());
    for (size_t index = 0; index < groups_.size(); ++index) {
      const int64_t first = index == 0 ? 0 : ends_[index - 1];
      const int64_t from = std::max(first, begin), to = std::min(ends_[index], end);
      if (from < to)
        reader_.read(groups_[index], array, from - first,
                     out.subspan(static_cast<size_t>(from - begin), static_cast<size_t>(to - from)));
    }
  }

 private:
  OptimizerStateReader& reader_;
  std::vector<std::string> groups_;
  std::vector<int64_t> ends_;
};

}  // namespace

TrainingSnapshot::TrainingSnapshot(ModelArrays weights, const OptimizerLayout& layout,
                                   const OptimizerArrays& state, const CopyBytes& copy,
                                   const CheckpointWriter& writer)
    : arrays_(std::move(weights)),
      tensors_(model_tensors(arrays_)),
      master_(copy_of(layout, state.master, copy, "a checkpoint's master weights")),
      first_moment_(copy_of(layout, state.first_moment, copy, "a checkpoint's first moments")),
      second_moment_(copy_of(layout, state.second_moment, copy, "a checkpoint's second moments")) {
  for (const size_t index : writer.tensors_written_here(tensors_))
    tensor_bytes_.push_back(copy_tensor(tensors_[index], copy));
  size_t next = 0;
  int64_t own = 0;
  for (size_t index = 0; index < layout.groups.size(); ++index) {
    const ElementRange group = layout.groups[index];
    ElementRange part{group.begin, group.begin};
    for (; next < layout.owned.size() && layout.owned[next].flat.begin < group.end; ++next) {
      const ElementRange flat = layout.owned[next].flat;
      if (part.size() == 0) part.begin = part.end = flat.begin;
      check(flat.begin == part.end && flat.end <= group.end, "a rank's part of a group has no gaps");
      part.end = flat.end;
    }
    const auto of = [&](const HostBuffer<float>& values) {
      return values.span().subspan(static_cast<size_t>(own), static_cast<size_t>(part.size()));
    };
    slices_.push_back({{group_name(index), part.begin - group.begin, part.end - group.begin, group.size()},
                       {{"master", of(master_)},
                        {"first_moment", of(first_moment_)},
                        {"second_moment", of(second_moment_)}}});
    own += part.size();
  }
}

int64_t most_snapshot_bytes(const ModelConfig& config, int64_t strided_bands, Dtype matrices, int ranks,
                            int64_t max_weight_file_bytes) {
  ModelArrays sizes;  // of arrays that are nowhere
  sizes.config = config;
  sizes.matrices = matrices;
  if (!config.tied_embeddings) sizes.head = &config;
  sizes.layers.resize(static_cast<size_t>(config.layers));
  for (LayerArrays& layer : sizes.layers)
    layer.landmark_query.resize(static_cast<size_t>(strided_bands * config.kv_size()));
  const std::vector<NamedTensor> tensors = model_tensors(sizes);
  int64_t parameters = 0;
  for (const NamedTensor& tensor : tensors)
    parameters += static_cast<int64_t>(tensor.bytes.size()) / dtype_bytes(tensor.dtype);
  const int64_t owned = (parameters + ranks - 1) / ranks;
  return 3 * owned * kFloat + most_weight_bytes_of_a_rank(tensors, ranks, max_weight_file_bytes);
}

void read_optimizer_state(const MpiSession& session, OptimizerStateReader& reader,
                          const OptimizerLayout& layout, const OptimizerArrays& state,
                          const CopyBytes& copy) {
  session.together([&] {
    FlatState stored(reader);
    if (stored.elements() != layout.elements())
      throw UserError(
          text("the checkpoint is of ", stored.elements(), " parameters, the model has ", layout.elements()),
          "the optimizer's state", "resume with the model that the checkpoint was made with");
    int64_t most = 0;
    for (const OwnedElements& own : layout.owned)
      most = std::max(most, own.flat.size());
    HostBuffer<float> chunk(std::min(most, kChunk), "an optimizer's state on its way");
    const auto fill = [&](const char* array, float* values, const OwnedElements& own) {
      for (int64_t at = 0; at < own.flat.size(); at += kChunk) {
        const int64_t count = std::min(kChunk, own.flat.size() - at);
        stored.read(array, own.flat.begin + at, chunk.span().first(static_cast<size_t>(count)));
        copy(values + own.at + at, chunk.data(), count * kFloat);
      }
    };
    for (const OwnedElements& own : layout.owned) {
      fill("master", state.master, own);
      fill("first_moment", state.first_moment, own);
      fill("second_moment", state.second_moment, own);
    }
  });
}

TrainingSnapshot snapshot_of(const Weights& weights, ShardedOptimizer& optimizer,
                             const CheckpointWriter& writer) {
  return {arrays_of(weights), optimizer.layout(), optimizer.arrays(), copy_in_host, writer};
}

void restore_optimizer(const MpiSession& session, OptimizerStateReader& reader, int64_t steps,
                       ShardedOptimizer& optimizer) {
  read_optimizer_state(session, reader, optimizer.layout(), optimizer.arrays(), copy_in_host);
  optimizer.restore(steps);
}

std::vector<ParameterSize> sizes_of(const std::vector<Parameter>& parameters) {
  std::vector<ParameterSize> sizes;
  for (const Parameter& parameter : parameters)
    sizes.emplace_back(parameter.name, static_cast<int64_t>(parameter.values.size()));
  return sizes;
}

std::string fingerprint_of(const std::vector<ParameterSize>& parameters) {
  std::string list;
  for (const auto& [name, elements] : parameters)
    list += text(name, " ", elements, "\n");
  return sha256_of_text(list).substr(0, 16);
}

}  // namespace longhalo
