#include "storage/checkpoint_writer.hpp"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <system_error>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "storage/checkpoint_list.hpp"

namespace longhalo {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

constexpr std::string_view kWhat = "the folder for checkpoints", kRemedy = "choose another output folder";

std::string optimizer_name(int rank, int ranks) {
  char name[64];
  std::snprintf(name, sizeof name, "optimizer_%05d_of_%05d.h5", rank + 1, ranks);
  return name;
}

}  // namespace

int writer_of_weight_file(size_t index, int ranks) {
  return static_cast<int>(index % static_cast<size_t>(ranks));
}

int64_t most_weight_bytes_of_a_rank(std::span<const NamedTensor> weights, int ranks, int64_t max_file_bytes) {
  const std::vector<WeightFile> files = plan_weight_files(weights, max_file_bytes);
  std::vector<int64_t> bytes(static_cast<size_t>(ranks), 0);
  for (size_t i = 0; i < files.size(); ++i)
    for (const size_t tensor : files[i].tensors)
      bytes[static_cast<size_t>(writer_of_weight_file(i, ranks))] +=
          static_cast<int64_t>(weights[tensor].bytes.size());
  return *std::max_element(bytes.begin(), bytes.end());
}

CheckpointWriter::CheckpointWriter(fs::path directory, RankAgreement ranks, CheckpointOptions options)
    : directory_(std::move(directory)), ranks_(std::move(ranks)), options_(std::move(options)) {
  check(options_.keep >= 2, "two checkpoints are kept at least");
  ranks_.together([&] {
    if (!ranks_.is_root()) return;
    make_directory(directory_, kWhat, kRemedy);
    lock_.emplace(directory_);
    remove_uncommitted(directory_);
  });
}

CheckpointWriter::~CheckpointWriter() {
  if (thread_.joinable()) thread_.join();
}

void CheckpointWriter::start(CheckpointContents contents) {
  check(!is_started(), "one checkpoint is written at a time");
  int64_t bytes = bytes_of(contents.optimizer);
  if (ranks_.is_root()) {
    for (const NamedTensor& tensor : contents.weights)
      bytes += static_cast<int64_t>(tensor.bytes.size());
  }
  const std::vector<std::string> needs = ranks_.gather(std::to_string(bytes));
  const fs::path folder = directory_ / checkpoint_name(contents.step);
  ranks_.together([&] {
    if (!ranks_.is_root()) return;
    make_directory(directory_, kWhat, kRemedy);  // someone may have removed it
    const int64_t total =
        std::accumulate(needs.begin(), needs.end(), int64_t{0},
                        [](int64_t sum, const std::string& need) { return sum + std::stoll(need); });
    make_way(folder);
    require_space(folder, total);
    make_directory(folder, kWhat, kRemedy);
    sync_directory(directory_);
  });
  folder_ = folder;
  contents_ = std::move(contents);
  parts_.clear();
  error_ = nullptr;
  is_written_ = false;
  const auto write = [this] {
    try {
      options_.observe("folder made");
      write_parts();
    } catch (...) {
      error_ = std::current_exception();
    }
    is_written_ = true;
  };
  // Where the HDF5 library cannot be used by two threads, or there can be no thread, the job has to wait.
  if (hdf5_is_thread_safe()) {
    try {
      thread_ = std::thread(write);
      return;
    } catch (const std::system_error& error) {
      log_warning(text("the checkpoint is written while the job waits: ", error.what()));
    }
  }
  write();
}

void CheckpointWriter::finish(VerifiedFile& file, const std::string& name) {
  options_.observe(name + " written");
  const FileSum sum = file.verify();
  options_.observe(name + " verified");
  file.commit();
  options_.observe(name + " named");
  parts_.push_back({name, sum, {}});
}

std::vector<size_t> CheckpointWriter::tensors_written_here(std::span<const NamedTensor> weights) const {
  std::vector<size_t> result;
  if (weights.empty()) return result;
  const std::vector<WeightFile> files = plan_weight_files(weights, options_.max_weight_file_bytes);
  for (size_t i = 0; i < files.size(); ++i)
    if (writes_weight_file(i)) result.insert(result.end(), files[i].tensors.begin(), files[i].tensors.end());
  return result;
}

void CheckpointWriter::write_weights() {
  const std::vector<NamedTensor>& weights = contents_->weights;
  if (weights.empty()) return;
  const std::vector<WeightFile> files = plan_weight_files(weights, options_.max_weight_file_bytes);
  for (size_t i = 0; i < files.size(); ++i) {
    if (!writes_weight_file(i)) continue;
    finish(*write_safetensors(folder_ / files[i].name, weights, files[i]), files[i].name);
  }
  if (files.size() > 1 && ranks_.is_root()) {
    contents_->files.emplace_back("model.safetensors.index.json", weight_index(weights, files));
  }
}

void CheckpointWriter::write_parts() {
  write_weights();
  if (ranks_.is_root()) {
    for (const auto& [name, text] : contents_->files) {
      VerifiedFile file(folder_ / name, static_cast<int64_t>(text.size()));
      file.write(text);
      finish(file, name);
    }
  }
  if (contents_->optimizer.empty()) return;
  const std::string name = optimizer_name(ranks_.rank, ranks_.ranks);
  const std::unique_ptr<Hdf5Writer> writer = write_optimizer_part(folder_ / name, contents_->optimizer);
  options_.observe(name + " verified");
  writer->commit();
  options_.observe(name + " named");
  ManifestPart part{name, sum_of_file(folder_ / name), {}};
  for (const OptimizerSlice& slice : contents_->optimizer)
    part.ranges.push_back(slice.range);
  parts_.push_back(std::move(part));
}

fs::path CheckpointWriter::commit() {
  check(is_started(), "a checkpoint is started before it is committed");
  if (thread_.joinable()) thread_.join();
  check(is_written_, "a joined thread has written its parts or failed");
  try {
    ranks_.together([&] {
      if (error_) std::rethrow_exception(error_);
    });
    options_.observe("agreed");
    json report{{"rank_state", contents_->rank_state}, {"parts", json::array()}};
    for (const ManifestPart& part : parts_)
      report["parts"].push_back(part_to_json(part));
    const std::vector<std::string> reports = ranks_.gather(report.dump());
    ranks_.together([&] {
      if (ranks_.is_root()) write_manifest(reports);
    });
  } catch (...) {
    abandon();
    throw;
  }
  options_.observe("committed");
  if (ranks_.is_root()) prune_checkpoints(directory_, options_.keep);
  options_.observe("pruned");
  contents_.reset();
  return folder_;
}

void CheckpointWriter::write_manifest(const std::vector<std::string>& reports) {
  CheckpointManifest manifest;
  manifest.step = contents_->step;
  manifest.sequence = 1;
  for (const StoredCheckpoint& stored : list_checkpoints(directory_)) {
    if (stored.manifest) manifest.sequence = std::max(manifest.sequence, stored.manifest->sequence + 1);
  }
  manifest.ranks = ranks_.ranks;
  manifest.job_state = contents_->job_state;
  for (const std::string& text : reports) {
    const json report = json::parse(text);
    manifest.rank_states.push_back(report.at("rank_state"));
    for (const json& part : report.at("parts"))
      manifest.parts.push_back(part_from_json(part));
  }
  for (const ManifestPart& part : manifest.parts) {
    if (open_input(folder_ / part.file).size_bytes == part.sum.bytes) continue;
    throw UserError("rank 0 sees another size of it than the rank that wrote it",
                    (folder_ / part.file).string(), "put checkpoints on a file system that all ranks share");
  }
  sync_directory(folder_);
  // Proves that the parts can be put together again, before anything relies on it.
  const OptimizerStateReader reader(folder_, manifest.optimizer_parts());
  const std::string contents = manifest_text(manifest);
  VerifiedFile file(folder_ / kManifestName, static_cast<int64_t>(contents.size()));
  file.write(contents);
  file.verify();
  options_.observe("manifest verified");
  file.commit();
}

// Gives the space back at once. All ranks have ended their writing; a manifest, if the rename of it was the
// last thing that worked, makes it a whole checkpoint that stays.
void CheckpointWriter::abandon() {
  contents_.reset();
  if (!ranks_.is_root()) return;
  std::error_code error;
  if (fs::exists(folder_ / kManifestName, error)) return;
  fs::remove_all(folder_, error);
  log_warning(text("the checkpoint ", folder_.string(), " was not finished; those before it stay"));
}

}  // namespace longhalo
