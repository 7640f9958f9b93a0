// Problems and answers that stand in data/*.h5, one group a case (data/README.md lists the datasets).
#pragma once

#include <gtest/gtest.h>
#include <hdf5.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace longhalo::testing {

/// An open file of data/; failures to read are failures of the test.
class StoredCases {
 public:
  explicit StoredCases(const std::string& file) {
    const std::string path = std::string(LONGHALO_SOURCE_DIR) + "/data/" + file;
    file_ = H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT);
    EXPECT_GE(file_, 0) << path;
  }
  ~StoredCases() { EXPECT_GE(H5Fclose(file_), 0); }
  StoredCases(const StoredCases&) = delete;
  StoredCases& operator=(const StoredCases&) = delete;

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    H5G_info_t info;
    EXPECT_GE(H5Gget_info(file_, &info), 0);
    for (hsize_t g = 0; g < info.nlinks; ++g) {
      char name[128];
      EXPECT_GT(
          H5Lget_name_by_idx(file_, ".", H5_INDEX_NAME, H5_ITER_INC, g, name, sizeof(name), H5P_DEFAULT), 0);
      names.emplace_back(name);
    }
    return names;
  }

  bool has(const std::string& name) const { return H5Lexists(file_, name.c_str(), H5P_DEFAULT) > 0; }

  struct Array {
    std::vector<hsize_t> shape;
    std::vector<double> values;
    int64_t side(size_t axis) const { return static_cast<int64_t>(shape[axis]); }
  };
  Array read(const std::string& name) const {
    Array array;
    array.shape = shape(name);
    array.values.resize(count(array.shape));
    read_into(name, H5T_NATIVE_DOUBLE, array.values.data());
    return array;
  }
  std::vector<int64_t> read_whole_numbers(const std::string& name) const {
    std::vector<int64_t> values(count(shape(name)));
    read_into(name, H5T_NATIVE_INT64, values.data());
    return values;
  }
  double theta(const std::string& group) const {
    double value = 0;
    const hid_t attribute = H5Aopen_by_name(file_, group.c_str(), "theta", H5P_DEFAULT, H5P_DEFAULT);
    EXPECT_GE(H5Aread(attribute, H5T_NATIVE_DOUBLE, &value), 0) << group;
    EXPECT_GE(H5Aclose(attribute), 0);
    return value;
  }

 private:
  static size_t count(const std::vector<hsize_t>& shape) {
    size_t product = 1;
    for (hsize_t side : shape)
      product *= side;
    return product;
  }
  std::vector<hsize_t> shape(const std::string& name) const {
    const hid_t dataset = H5Dopen2(file_, name.c_str(), H5P_DEFAULT);
    const hid_t space = H5Dget_space(dataset);
    std::vector<hsize_t> sides(static_cast<size_t>(std::max(0, H5Sget_simple_extent_ndims(space))));
    EXPECT_GE(H5Sget_simple_extent_dims(space, sides.data(), nullptr), 0) << name;
    EXPECT_GE(H5Sclose(space), 0);
    EXPECT_GE(H5Dclose(dataset), 0);
    return sides;
  }
  void read_into(const std::string& name, hid_t type, void* to) const {
    const hid_t dataset = H5Dopen2(file_, name.c_str(), H5P_DEFAULT);
    EXPECT_GE(H5Dread(dataset, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, to), 0) << name;
    EXPECT_GE(H5Dclose(dataset), 0);
  }

  hid_t file_ = -1;
};

inline std::vector<float> downcast(const std::vector<double>& x) {
  return {x.begin(), x.end()};
}

// Both sides are fp64 and sum the same few hundred terms in other orders: 1e-12 is thousands of roundings.
inline constexpr double kDouble = 1e-12;

inline void expect_same(const std::vector<double>& got, const std::vector<double>& right,
                        const std::string& what) {
  ASSERT_EQ(got.size(), right.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == right[i]) continue;  // -infinity too
    ASSERT_LE(std::abs(got[i] - right[i]), kDouble * (1 + std::abs(right[i]))) << what << " element " << i;
  }
}

}  // namespace longhalo::testing
