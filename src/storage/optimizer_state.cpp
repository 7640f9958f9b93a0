#include "storage/optimizer_state.hpp"

#include <algorithm>
#include <array>

#include "core/error.hpp"
#include "core/text.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kRemedy = "use a complete checkpoint";

bool is_plain(const std::string& name) {
  return !name.empty() && name.find('/') == std::string::npos && name != "." && name != "range";
}

std::string range_text(const StateRange& range) {
  return text("[", range.begin, ", ", range.end, ") of ", range.total);
}

}  // namespace

int64_t bytes_of(std::span<const OptimizerSlice> slices) {
  int64_t bytes = 0;
  for (const OptimizerSlice& slice : slices) {
    for (const auto& [name, values] : slice.arrays)
      bytes += static_cast<int64_t>(values.size_bytes());
  }
  return bytes;
}

std::unique_ptr<Hdf5Writer> write_optimizer_part(const fs::path& target,
                                                 std::span<const OptimizerSlice> slices) {
  auto writer = std::make_unique<Hdf5Writer>(target, bytes_of(slices));
  for (const OptimizerSlice& slice : slices) {
    const StateRange& range = slice.range;
    check(is_plain(range.group), "a group has a plain name");
    check(0 <= range.begin && range.begin <= range.end && range.end <= range.total,
          text("the range ", range_text(range), " lies in its group"));
    const std::array<int64_t, 3> stored{range.begin, range.end, range.total};
    writer->write(text("/", range.group, "/range"), {3}, std::span<const int64_t>(stored));
    for (const auto& [name, values] : slice.arrays) {
      check(is_plain(name), "an array has a plain name");
      const auto length = static_cast<int64_t>(values.size());
      check(length == range.end - range.begin,
            text("array ", name, " of ", range.group, " has the elements ", range_text(range)));
      writer->write(text("/", range.group, "/", name), {length}, values);
    }
  }
  writer->verify();
  return writer;
}

OptimizerStateReader::OptimizerStateReader(fs::path folder, std::vector<OptimizerPart> parts)
    : folder_(std::move(folder)) {
  std::map<std::string, int64_t> totals;
  for (const OptimizerPart& part : parts) {
    for (const StateRange& range : part.ranges) {
      const int64_t total = totals.try_emplace(range.group, range.total).first->second;
      if (range.total != total || range.begin < 0 || range.begin > range.end || range.end > total) {
        throw UserError(text("group ", range.group, " has ", total, " elements by one part and its part is ",
                             range_text(range), " by another"),
                        (folder_ / part.file).string(), kRemedy);
      }
      std::vector<Source>& sources = groups_[range.group];
      if (range.begin < range.end) sources.push_back({range, part.file});
    }
  }
  for (auto& [group, sources] : groups_) {
    std::sort(sources.begin(), sources.end(),
              [](const Source& a, const Source& b) { return a.range.begin < b.range.begin; });
    int64_t expected = 0;
    for (const Source& source : sources) {
      if (source.range.begin != expected) {
        throw UserError(text("elements of group ", group, " are ",
                             source.range.begin > expected ? "missing" : "there twice", ": one part ends at ",
                             expected, ", the next is ", range_text(source.range)),
                        (folder_ / source.file).string(), kRemedy);
      }
      expected = source.range.end;
    }
    if (expected != totals[group]) {
      throw UserError(text("group ", group, " ends at element ", expected, " of ", totals[group]),
                      folder_.string(), kRemedy);
    }
  }
}

std::vector<std::string> OptimizerStateReader::groups() const {
  std::vector<std::string> names;
  for (const auto& [group, sources] : groups_)
    names.push_back(group);
  return names;
}

const std::vector<OptimizerStateReader::Source>& OptimizerStateReader::sources_of(
    const std::string& group) const {
  const auto found = groups_.find(group);
  if (found == groups_.end()) {
    throw UserError(text("the optimizer state has no group ", group), folder_.string(),
                    "resume with the model and optimizer that the checkpoint was made with");
  }
  return found->second;
}

int64_t OptimizerStateReader::total(const std::string& group) const {
  const std::vector<Source>& sources = sources_of(group);
  return sources.empty() ? 0 : sources.back().range.end;
}

const Hdf5File& OptimizerStateReader::open(const Source& source) {
  if (open_name_ != source.file) {
    open_file_ = std::make_unique<Hdf5File>(Hdf5File::open(folder_ / source.file));
    open_name_ = source.file;
  }
  const StateRange& range = source.range;
  const Hdf5Dataset stored = open_file_->dataset(text("/", range.group, "/range"));
  const std::array<int64_t, 1> three{3};
  stored.expect(Hdf5Type::kInt64, three);
  std::array<int64_t, 3> found{};
  stored.read(0, std::span<int64_t>(found));
  if (found != std::array<int64_t, 3>{range.begin, range.end, range.total}) {
    throw UserError(text("its group ", range.group, " is ", range_text({"", found[0], found[1], found[2]}),
                         " where the manifest says ", range_text(range)),
                    (folder_ / source.file).string(), kRemedy);
  }
  return *open_file_;
}

void OptimizerStateReader::read(const std::string& group, const std::string& array, int64_t begin,
                                std::span<float> out) {
  const int64_t end = begin + static_cast<int64_t>(out.size());
  check(begin >= 0 && end <= total(group), text("elements ", begin, " to ", end, " are in group ", group));
  for (const Source& source : sources_of(group)) {
    const int64_t from = std::max(begin, source.range.begin);
    const int64_t to = std::min(end, source.range.end);
    if (from >= to) continue;
    const Hdf5Dataset values = open(source).dataset(text("/", group, "/", array));
    const std::array<int64_t, 1> length{source.range.end - source.range.begin};
    values.expect(Hdf5Type::kFloat32, length);
    values.read(from - source.range.begin,
                out.subspan(static_cast<size_t>(from - begin), static_cast<size_t>(to - from)));
  }
}

}  // namespace longhalo
