// Optimizer state in parts: each rank's HDF5 file holds, for each group of parameters seen as one long
// vector, the elements [begin, end) of every array of the optimizer (master weights, moments). Since a part
// says which elements it has, a job on another number of ranks reads the ranges that overlap its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "storage/hdf5_writer.hpp"

namespace longhalo {

/// Which elements of a group a part holds; `total` is the group's length over all parts.
struct StateRange {
  std::string group;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t total = 0;
  bool operator==(const StateRange&) const = default;
};

/// This rank's elements of one group: each array has range.end - range.begin elements. Names are plain: no
/// '/'.
struct OptimizerSlice {
  StateRange range;
  std::vector<std::pair<std::string, std::span<const float>>> arrays;
};

int64_t bytes_of(std::span<const OptimizerSlice> slices);

/// Writes /<group>/<array> [end - begin] and /<group>/range [begin, end, total] under a temporary name, and
/// verifies it; commit() of the result finishes it. Throws UserError.
std::unique_ptr<Hdf5Writer> write_optimizer_part(const std::filesystem::path& target,
                                                 std::span<const OptimizerSlice> slices);

/// A file and what it says it holds.
struct OptimizerPart {
  std::string file;
  std::vector<StateRange> ranges;
};

class OptimizerStateReader {
 public:
  /// Throws UserError unless the parts give every element of every group once.
  OptimizerStateReader(std::filesystem::path folder, std::vector<OptimizerPart> parts);

  std::vector<std::string> groups() const;
  /// The group's length. Throws UserError if there is no such group.
  int64_t total(const std::string& group) const;
  /// Elements [begin, begin + out.size()) of an array, from as many parts as they lie in. Throws UserError.
  void read(const std::string& group, const std::string& array, int64_t begin, std::span<float> out);

 private:
  struct Source {
    StateRange range;
    std::string file;
  };
  const std::vector<Source>& sources_of(const std::string& group) const;
  const Hdf5File& open(const Source& source);

  std::filesystem::path folder_;
  std::map<std::string, std::vector<Source>> groups_;  // each in the order of begin, without empty ones
  // The part read last stays open: ranges are asked for one after the other.
  std::string open_name_;
  std::unique_ptr<Hdf5File> open_file_;
};

}  // namespace longhalo
