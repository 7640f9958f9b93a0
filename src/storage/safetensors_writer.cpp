#include "storage/safetensors_writer.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace {

constexpr size_t kAlignment = 8;  // of the first tensor's bytes

int64_t bytes_of(const NamedTensor& tensor) {
  int64_t bytes = dtype_bytes(tensor.dtype);
  for (const int64_t side : tensor.shape) {
    check(side >= 0 && (side == 0 || bytes <= std::numeric_limits<int64_t>::max() / side),
          text("the shape of ", tensor.name, " fits 64 bits"));
    bytes *= side;
  }
  return bytes;
}

}  // namespace

std::span<const std::byte> bytes_in_place(const NamedTensor& tensor) {
  return tensor.bytes;
}

std::vector<WeightFile> plan_weight_files(std::span<const NamedTensor> tensors, int64_t max_bytes) {
  std::vector<WeightFile> files(1);
  std::set<std::string> names;
  int64_t in_file = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    check(names.insert(tensors[i].name).second, text("tensor ", tensors[i].name, " is written once"));
    const int64_t bytes = bytes_of(tensors[i]);
    if (bytes > 0 && in_file > 0 && bytes > max_bytes - in_file) {
      files.emplace_back();
      in_file = 0;
    }
    files.back().tensors.push_back(i);
    in_file += bytes;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    char name[64] = "model.safetensors";
    if (files.size() > 1)
      std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
    files[i].name = name;
  }
  return files;
}

std::unique_ptr<VerifiedFile> write_safetensors(const std::filesystem::path& target,
                                                std::span<const NamedTensor> tensors, const WeightFile& file,
                                                const HostBytes& host_bytes) {
  // "pt" is what transformers asks for: the layout that PyTorch's tensors have.
  nlohmann::ordered_json header{{"__metadata__", {{"format", "pt"}}}};
  int64_t at = 0;
  for (const size_t index : file.tensors) {
    const NamedTensor& tensor = tensors[index];
    const int64_t bytes = bytes_of(tensor);
    check(static_cast<int64_t>(tensor.bytes.size()) == bytes,
          text("the bytes of ", tensor.name, " are those of its shape"));
    header[tensor.name] = {
        {"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string words = header.dump();
  words.resize((words.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const uint64_t length = words.size();
  auto written =
      std::make_unique<VerifiedFile>(target, static_cast<int64_t>(sizeof length + words.size()) + at);
  written->write(std::as_bytes(std::span(&length, 1)));
  written->write(words);
  for (const size_t index : file.tensors)
    written->write(host_bytes(tensors[index]));
  return written;
}

std::string weight_index(std::span<const NamedTensor> tensors, std::span<const WeightFile> files) {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  int64_t total = 0;
  for (const WeightFile& file : files) {
    for (const size_t index : file.tensors) {
      map[tensors[index].name] = file.name;
      total += bytes_of(tensors[index]);
    }
  }
  return nlohmann::ordered_json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n";
}

}  // namespace longhalo
