#include "storage/safetensors.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/error.hpp"
#include "core/file_access.hpp"
#include "core/nearest.hpp"
#include "core/text.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace fs = std::filesystem;
using nlohmann::json;
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors files are little endian");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;
constexpr int kMaxDepth = 3;  // header -> tensor -> shape
constexpr std::string_view kDownloadAgain = "the file is damaged or incomplete; fetch it again";

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  int64_t bytes;
};
constexpr std::array<DtypeRow, 15> kDtypes{{{Dtype::kBool, "BOOL", 1},
                                            {Dtype::kU8, "U8", 1},
                                            {Dtype::kI8, "I8", 1},
                                            {Dtype::kF8E4M3, "F8_E4M3", 1},
                                            {Dtype::kF8E5M2, "F8_E5M2", 1},
                                            {Dtype::kI16, "I16", 2},
                                            {Dtype::kU16, "U16", 2},
                                            {Dtype::kF16, "F16", 2},
                                            {Dtype::kBF16, "BF16", 2},
                                            {Dtype::kI32, "I32", 4},
                                            {Dtype::kU32, "U32", 4},
                                            {Dtype::kF32, "F32", 4},
                                            {Dtype::kI64, "I64", 8},
                                            {Dtype::kU64, "U64", 8},
                                            {Dtype::kF64, "F64", 8}}};

const DtypeRow& row_of(Dtype dtype) {
  return *std::find_if(kDtypes.begin(), kDtypes.end(),
                       [&](const DtypeRow& row) { return row.dtype == dtype; });
}

[[noreturn]] void refuse(std::string_view what, const fs::path& file, std::string_view tensor = {}) {
  const std::string where = tensor.empty() ? file.string() : text(file.string(), ", tensor ", tensor);
  throw UserError(what, where, kDownloadAgain);
}

// JSON whose objects name no key twice (a parser would silently keep one of the two) and which is not nested
// deeper than the format needs. `where` prefixes messages: "header" or "index".
json parse_strict(const char* begin, const char* end, const fs::path& file, std::string_view where) {
  std::vector<std::set<std::string>> keys(kMaxDepth + 2);
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > kMaxDepth) refuse(text("its ", where, " is nested too deeply"), file);
    const auto level = static_cast<size_t>(depth);
    if (event == json::parse_event_t::object_start) keys[level + 1].clear();
    if (event == json::parse_event_t::key && !keys[level].insert(value.get<std::string>()).second) {
      refuse(text("its ", where, " names '", value.get<std::string>(), "' twice"), file);
    }
    return true;
  };
  try {
    return json::parse(begin, end, watch);
  } catch (const json::exception& error) {
    refuse(text("its ", where, " is not valid JSON (", error.what(), ")"), file);
  }
}

// A non-negative integer that fits int64_t, or nothing.
std::optional<int64_t> as_count(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto count = value.get<uint64_t>();
  if (count > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<int64_t>(count);
}

struct Extent {
  int64_t begin, end;  // bytes after the header
};

TensorView read_dtype_and_shape(const std::string& name, const json& entry, const fs::path& file) {
  TensorView tensor;
  tensor.name = name;
  tensor.file = file.string();
  if (!entry.is_object()) refuse("its header entry is not an object", file, name);
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) refuse(text("its header entry has no '", key, "'"), file, name);
  }
  const json& dtype = entry["dtype"];
  if (!dtype.is_string()) refuse("its dtype is not a string", file, name);
  const auto known = std::find_if(kDtypes.begin(), kDtypes.end(), [&](const DtypeRow& row) {
    return row.name == dtype.get_ref<const std::string&>();
  });
  if (known == kDtypes.end()) {
    throw UserError(
        text("the dtype ", dtype.dump(-1, ' ', false, json::error_handler_t::replace), " is not known"),
        text(file.string(), ", tensor ", name), "convert the model to F32, BF16 or F16 safetensors");
  }
  tensor.dtype = known->dtype;
  const json& shape = entry["shape"];
  if (!shape.is_array()) refuse("its shape is not a list", file, name);
  for (const json& dimension : shape) {
    const std::optional<int64_t> count = as_count(dimension);
    if (!count) refuse(text("its shape holds ", dimension.dump(), ", not a length"), file, name);
    tensor.shape.push_back(*count);
  }
  return tensor;
}

// Bytes that dtype and shape ask for; refuses what does not fit int64_t.
int64_t bytes_of(const TensorView& tensor, const fs::path& file) {
  int64_t bytes = dtype_bytes(tensor.dtype);
  for (const int64_t dimension : tensor.shape) {
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) {
      refuse(text("its shape ", shape_text(tensor.shape), " overflows 64 bits"), file, tensor.name);
    }
  }
  return bytes;
}

Extent read_extent(const TensorView& tensor, const json& offsets, int64_t data_bytes, const fs::path& file) {
  const std::string shown = offsets.dump(-1, ' ', false, json::error_handler_t::replace);
  const auto begin = offsets.is_array() && offsets.size() == 2 ? as_count(offsets[0]) : std::nullopt;
  const auto end = offsets.is_array() && offsets.size() == 2 ? as_count(offsets[1]) : std::nullopt;
  if (!begin || !end) refuse(text("its data_offsets are ", shown, ", not [begin, end]"), file, tensor.name);
  if (*end < *begin) refuse(text("its data_offsets ", shown, " run backwards"), file, tensor.name);
  if (*end > data_bytes) {
    refuse(text("its data_offsets ", shown, " reach beyond the ", data_bytes,
                " bytes that the file holds after its header"),
           file, tensor.name);
  }
  const int64_t wanted = bytes_of(tensor, file);
  if (*end - *begin != wanted) {
    refuse(text("its data_offsets span ", *end - *begin, " bytes but ", dtype_name(tensor.dtype), " ",
                shape_text(tensor.shape), " needs ", wanted),
           file, tensor.name);
  }
  return {*begin, *end};
}

// Tensors have to follow one another without overlap or hole from the header to the end of the file.
void check_tiling(std::vector<std::pair<Extent, std::string>> extents, int64_t data_bytes,
                  const fs::path& file) {
  std::sort(extents.begin(), extents.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end);
  });
  int64_t expected = 0;
  for (const auto& [extent, name] : extents) {
    if (extent.begin < expected) {
      refuse(text("its bytes begin at ", extent.begin, " and overlap the tensor before it, which ends at ",
                  expected),
             file, name);
    }
    if (extent.begin > expected) {
      refuse(text("bytes ", expected, " to ", extent.begin, " before it belong to no tensor"), file, name);
    }
    expected = extent.end;
  }
  if (expected != data_bytes) {
    refuse(text("its tensors end at byte ", expected, " after the header but the file has ", data_bytes),
           file);
  }
}

[[noreturn]] void throw_no_tensor(std::string_view name, const std::vector<std::string>& known,
                                  const fs::path& file) {
  throw UserError(text("there is no tensor '", name, "'",
                       known.empty() ? ", nor any other"
                                     : text("; the nearest name is '", nearest_name(name, known), "'")),
                  file.string(), "use a complete model of the kind that config.json describes");
}

}  // namespace

std::string_view dtype_name(Dtype dtype) {
  return row_of(dtype).name;
}
int64_t dtype_bytes(Dtype dtype) {
  return row_of(dtype).bytes;
}

int64_t TensorView::elements() const {
  return static_cast<int64_t>(bytes.size()) / dtype_bytes(dtype);
}

void drop_pages(const TensorView& tensor) {
  if (tensor.bytes.empty()) return;
  // Whole pages, neighbours' edges included: the mapping is read-only, so nothing can be lost.
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.bytes.data()) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(tensor.bytes.data()) + tensor.bytes.size();
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

SafetensorsFile::SafetensorsFile(const fs::path& path) : path_(path) {
  const InputFile input = open_input(path);
  if (input.size_bytes == 0) refuse("the file is empty", path);
  if (input.size_bytes < kLengthBytes) {
    refuse(text("the file has only ", input.size_bytes, " bytes; its header length alone takes 8"), path);
  }
  mapping_.emplace(input, path);
  read_header(mapping_->bytes());
}

void SafetensorsFile::read_header(std::span<const std::byte> file) {
  const auto file_bytes = static_cast<int64_t>(file.size());
  uint64_t stated = 0;
  std::memcpy(&stated, file.data(), sizeof stated);
  if (stated > static_cast<uint64_t>(kMaxHeaderBytes)) {
    refuse(text("its header claims ", stated, " bytes; ", kMaxHeaderBytes, " are the most allowed"), path_);
  }
  const auto header_bytes = static_cast<int64_t>(stated);
  if (header_bytes > file_bytes - kLengthBytes) {
    refuse(text("its header claims ", header_bytes, " bytes but the file has only ", file_bytes), path_);
  }
  const char* const begin = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  const json header = parse_strict(begin, begin + header_bytes, path_, "header");
  if (!header.is_object()) refuse("its header is not a JSON object", path_);

  const int64_t data_bytes = file_bytes - kLengthBytes - header_bytes;
  const std::span<const std::byte> data = file.subspan(static_cast<size_t>(kLengthBytes + header_bytes));
  std::vector<std::pair<Extent, std::string>> extents;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    TensorView tensor = read_dtype_and_shape(name, entry, path_);
    const Extent extent = read_extent(tensor, entry["data_offsets"], data_bytes, path_);
    tensor.bytes =
        data.subspan(static_cast<size_t>(extent.begin), static_cast<size_t>(extent.end - extent.begin));
    extents.emplace_back(extent, name);
    tensors_.emplace(name, std::move(tensor));
  }
  check_tiling(std::move(extents), data_bytes, path_);
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> result;
  for (const auto& [name, tensor] : tensors_)
    result.push_back(name);
  return result;
}

const TensorView& SafetensorsFile::view(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;
  throw_no_tensor(name, names(), path_);
}

ModelWeights::ModelWeights(const fs::path& directory) {
  const fs::path single = directory / "model.safetensors";
  const fs::path index = directory / "model.safetensors.index.json";
  std::error_code error;
  require_folder(directory, "the model's folder",
                 "name a Hugging Face model directory (config.json, *.safetensors, tokenizer.json)");
  if (fs::exists(single, error)) {
    source_ = single;
    files_.push_back(std::make_unique<SafetensorsFile>(single));
    for (const std::string& name : files_.back()->names())
      owner_.emplace(name, files_.back().get());
    return;
  }
  if (!fs::exists(index, error)) {
    throw UserError(
        "there is neither model.safetensors nor model.safetensors.index.json", directory.string(),
        "name a Hugging Face model directory; weights in other formats have to be converted first");
  }
  source_ = index;
  const InputFile input = open_input(index);
  if (input.size_bytes > kMaxHeaderBytes) refuse("the index is absurdly large", index);
  std::string contents(static_cast<size_t>(input.size_bytes), '\0');
  read_exactly(input.descriptor, 0, std::as_writable_bytes(std::span(contents)), index);
  const json parsed = parse_strict(contents.data(), contents.data() + contents.size(), index, "index");
  if (!parsed.is_object() || !parsed.contains("weight_map") || !parsed["weight_map"].is_object()) {
    refuse("its index has no object 'weight_map'", index);
  }
  std::map<std::string, const SafetensorsFile*> shards;
  for (const auto& [name, value] : parsed["weight_map"].items()) {
    if (!value.is_string()) refuse("its shard is not a file name", index, name);
    const auto shard = value.get<std::string>();
    // A plain name only: an index must not lead out of the model directory.
    if (shard.empty() || shard == "." || shard == ".." || shard.find('/') != std::string::npos ||
        shard.find('\0') != std::string::npos) {
      refuse(text("its shard '", shard, "' is not a plain file name"), index, name);
    }
    const SafetensorsFile*& file = shards[shard];
    if (file == nullptr) {
      if (!fs::exists(directory / shard, error)) {
        throw UserError(text("the index names shard '", shard, "', which is missing"),
                        text(index.string(), ", tensor ", name), "fetch the missing file");
      }
      files_.push_back(std::make_unique<SafetensorsFile>(directory / shard));
      file = files_.back().get();
    }
    if (!file->contains(name)) {
      refuse(text("the index says it is in shard '", shard, "', but that file does not hold it"), index,
             name);
    }
    owner_.emplace(name, file);
  }
}

std::vector<std::string> ModelWeights::names() const {
  std::vector<std::string> result;
  for (const auto& [name, file] : owner_)
    result.push_back(name);
  return result;
}

const TensorView& ModelWeights::view(std::string_view name) const {
  const auto found = owner_.find(name);
  if (found != owner_.end()) return found->second->view(name);
  throw_no_tensor(name, names(), source_);
}

const TensorView& ModelWeights::view(std::string_view name, std::span<const int64_t> expected_shape) const {
  const TensorView& tensor = view(name);
  if (!std::equal(tensor.shape.begin(), tensor.shape.end(), expected_shape.begin(), expected_shape.end())) {
    throw UserError(text("its shape is ", shape_text(tensor.shape), " but config.json asks for ",
                         shape_text(expected_shape)),
                    text(tensor.file, ", tensor ", name),
                    "use the config.json that belongs to these weights");
  }
  return tensor;
}

}  // namespace longhalo
