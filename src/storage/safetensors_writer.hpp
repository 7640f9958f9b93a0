// Writes weights as safetensors, in one file or in several with an index, such that transformers opens them
// (safetensors.hpp has the format). A file is verified before it takes its name (verified_file.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "storage/safetensors.hpp"
#include "storage/verified_file.hpp"

namespace longhalo {

/// A tensor in memory, the host's unless somebody else brings its bytes there (HostBytes): row-major, as many
/// as dtype and shape say.
struct NamedTensor {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

/// A tensor's bytes in the host's memory, for as long as nobody asks for the next one's.
using HostBytes = std::function<std::span<const std::byte>(const NamedTensor&)>;
std::span<const std::byte> bytes_in_place(const NamedTensor& tensor);

/// Which tensors, by index into the list, one file holds.
struct WeightFile {
  std::string name;
  std::vector<size_t> tensors;
};

/// Cuts the list, in its order, into files of at most `max_bytes` bytes of tensors; a larger tensor has a
/// file of its own. One file is model.safetensors, several are model-00001-of-00003.safetensors and so on.
/// Every name is written once (InvariantError).
std::vector<WeightFile> plan_weight_files(std::span<const NamedTensor> tensors,
                                          int64_t max_bytes = 5'000'000'000);

/// Writes one of them under a temporary name: verify() and commit() of the result finish it. Throws
/// UserError.
std::unique_ptr<VerifiedFile> write_safetensors(const std::filesystem::path& target,
                                                std::span<const NamedTensor> tensors, const WeightFile& file,
                                                const HostBytes& host_bytes = bytes_in_place);

/// The text of model.safetensors.index.json.
std::string weight_index(std::span<const NamedTensor> tensors, std::span<const WeightFile> files);

}  // namespace longhalo
