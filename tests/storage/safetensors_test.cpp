// Reading weights: right values from good files, and a UserError that names file and tensor for every kind of
// damage.
#include "storage/safetensors.hpp"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "core/nearest.hpp"
#include "safetensors_fixture.hpp"
#include "scratch.hpp"

namespace longhalo {
namespace {

using namespace testing;

class SafetensorsTest : public ::testing::Test {
 protected:
  std::string refuse(const std::string& contents, std::initializer_list<std::string_view> words) {
    const std::filesystem::path file = folder_ / "model.safetensors";
    write_text(file, contents);
    const std::string message = expect_user_error([&] { SafetensorsFile opened(file); }, words);
    EXPECT_NE(message.find(file.string()), std::string::npos) << message;
    return message;
  }
  std::string refuse_entry(const std::string& entry, std::initializer_list<std::string_view> words) {
    const std::string message = refuse(safetensors_bytes("{\"w\":" + entry + "}", "12345678"), words);
    EXPECT_NE(message.find("tensor w"), std::string::npos) << message;
    return message;
  }
  ScratchFolder folder_;
};

TEST_F(SafetensorsTest, SaysThatThereIsNoTensorAtAll) {
  const std::filesystem::path path = folder_ / "model.safetensors";
  write_text(path, safetensors_bytes("{}", ""));
  expect_user_error([&] { SafetensorsFile(path).view("w"); }, {"there is no tensor 'w', nor any other"});
  write_text(path, valid_file());
  expect_user_error([&] { SafetensorsFile(path).view("a.wait"); },
                    {"no tensor 'a.wait'; the nearest", "a.weight"});
}

TEST_F(SafetensorsTest, ReadsValuesAndShapes) {
  const std::filesystem::path path = folder_ / "model.safetensors";
  write_text(path, valid_file());
  const SafetensorsFile file(path);
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a.weight", "b", "c", "empty"}));
  EXPECT_TRUE(file.contains("b"));
  EXPECT_FALSE(file.contains("__metadata__"));
  const TensorView& a = file.view("a.weight");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(a.elements(), 4);
  std::vector<float> values(4);
  copy_as_float(a, values);
  EXPECT_EQ(values, (std::vector<float>{1.0F, -2.5F, 3.0F, 0.1F}));
  values.resize(3);
  copy_as_float(file.view("b"), values);
  EXPECT_EQ(values, (std::vector<float>{1.0F, -2.0F, std::numeric_limits<float>::infinity()}));
  values.resize(2);
  copy_as_float(file.view("c"), values);
  EXPECT_EQ(values, (std::vector<float>{1.0F, -65504.0F}));
  EXPECT_EQ(file.view("empty").elements(), 0);
  drop_pages(file.view("empty"));
  drop_pages(a);
  values.resize(4);
  copy_as_float(a, values);
  EXPECT_EQ(values[3], 0.1F);
  EXPECT_THROW(copy_as_float(a, std::span(values).first(3)), InvariantError);
}

// The value of a half by its definition: (-1)^s 2^(e-15) (1 + m/1024), and 2^-14 m/1024 for e = 0.
float half_by_definition(uint32_t bits) {
  const double sign = (bits & 0x8000u) != 0 ? -1 : 1;
  const int exponent = static_cast<int>(bits >> 10 & 31u);
  const double fraction = (bits & 1023u) / 1024.0;
  if (exponent == 31) {
    return fraction == 0 ? static_cast<float>(sign) * std::numeric_limits<float>::infinity()
                         : std::numeric_limits<float>::quiet_NaN();
  }
  return static_cast<float>(
      sign * (exponent == 0 ? std::ldexp(fraction, -14) : std::ldexp(1 + fraction, exponent - 15)));
}

TEST_F(SafetensorsTest, EveryHalfIsConvertedExactly) {
  std::string data;
  for (uint32_t bits = 0; bits < 65536; ++bits)
    data += raw<uint16_t>({static_cast<uint16_t>(bits)});
  // An odd header length, so that the tensors lie at odd addresses.
  std::string header = R"({"h":{"dtype":"F16","shape":[65536],"data_offsets":[0,131072]},)"
                       R"("b":{"dtype":"BF16","shape":[65536],"data_offsets":[131072,262144]}})";
  if (header.size() % 2 == 0) header += ' ';
  write_text(folder_ / "m", safetensors_bytes(header, data + data));
  const SafetensorsFile file(folder_ / "m");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(file.view("h").bytes.data()) % 2, 1U);
  std::vector<float> half(65536);
  std::vector<float> brain(65536);
  copy_as_float(file.view("h"), half);
  copy_as_float(file.view("b"), brain);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float expected = half_by_definition(bits);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(half[bits])) << bits;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(half[bits]), std::bit_cast<uint32_t>(expected)) << bits;
    }
    ASSERT_EQ(std::bit_cast<uint32_t>(brain[bits]), bits << 16);
  }
}

TEST_F(SafetensorsTest, RefusesDamagedFiles) {
  refuse("", {"empty"});
  refuse("short", {"only 5 bytes"});
  const std::string good = valid_file();
  for (const size_t kept : {size_t{9}, size_t{60}, good.size() - 26, good.size() - 1})
    refuse(good.substr(0, kept), {});
  refuse(good + "x", {"end at byte 26", "has 27"});
  std::string lying = good;
  lying[7] = '\x7f';
  refuse(lying, {"header claims", "most allowed"});
  lying = good;
  lying[2] = '\x10';
  refuse(lying, {"header claims", "file has only"});
  refuse(safetensors_bytes("{\"w\":", ""), {"not valid JSON"});
  refuse(safetensors_bytes("", ""), {"not valid JSON"});
  refuse(safetensors_bytes("[1]", ""), {"not a JSON object"});
  refuse(safetensors_bytes("\xff\xfe", ""), {"not valid JSON"});
  refuse(safetensors_bytes(std::string(100000, '['), ""), {"nested too deeply"});
  expect_user_error([&] { SafetensorsFile file(folder_.path()); }, {"directory", folder_.path().string()});
  expect_user_error([&] { SafetensorsFile file(folder_ / "absent"); }, {"No such file", "absent"});
  expect_user_error([&] { SafetensorsFile file("/dev/null"); }, {"not a regular file"});
}

TEST_F(SafetensorsTest, RefusesBadEntries) {
  refuse_entry("3", {"not an object"});
  refuse_entry(R"({"shape":[2],"data_offsets":[0,8]})", {"no 'dtype'"});
  refuse_entry(R"({"dtype":"F32","data_offsets":[0,8]})", {"no 'shape'"});
  refuse_entry(R"({"dtype":"F32","shape":[2]})", {"no 'data_offsets'"});
  refuse_entry(R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})", {"not a string"});
  refuse_entry(R"({"dtype":"F4","shape":[2],"data_offsets":[0,8]})", {"\"F4\" is not known"});
  refuse_entry(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})", {"not a list"});
  refuse_entry(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", {"holds -2"});
  refuse_entry(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})", {"holds 2.0"});
  refuse_entry(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]})", {"not a length"});
  refuse_entry(R"({"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]})", {"overflows"});
  refuse_entry(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", {"span 8 bytes", "[3] needs 12"});
  refuse_entry(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})", {"backwards"});
  refuse_entry(R"({"dtype":"F32","shape":[2],"data_offsets":[8,16]})", {"beyond the 8 bytes"});
  refuse_entry(R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})", {"not [begin, end]"});
  refuse_entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0]})", {"not [begin, end]"});
  refuse_entry(R"({"dtype":"F32","shape":[2],"data_offsets":"0-8"})", {"not [begin, end]"});
  refuse_entry(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})", {"bytes 0 to 4", "no tensor"});
}

TEST_F(SafetensorsTest, RefusesOverlapsHolesAndDoubleNames) {
  const auto two = [](std::string_view first, std::string_view second) {
    return safetensors_bytes(std::string(R"({"u":{"dtype":"F32","shape":[1],"data_offsets":)") +
                                 std::string(first) + R"(},"v":{"dtype":"F32","shape":[1],"data_offsets":)" +
                                 std::string(second) + "}}",
                             "12345678");
  };
  refuse(two("[0,4]", "[2,6]"), {"tensor v", "overlap"});
  refuse(two("[0,4]", "[0,4]"), {"overlap"});
  refuse(two("[4,8]", "[3,7]"), {"bytes 0 to 3"});
  refuse(safetensors_bytes(R"({"u":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                           R"("v":{"dtype":"U8","shape":[2],"data_offsets":[6,8]}})",
                           "12345678"),
         {"tensor v", "bytes 4 to 6"});
  refuse(safetensors_bytes(R"({"u":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
                           R"("u":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
                           "12345678"),
         {"'u' twice"});
  refuse(
      safetensors_bytes(R"({"u":{"dtype":"U8","dtype":"I8","shape":[8],"data_offsets":[0,8]}})", "12345678"),
      {"'dtype' twice"});
}

TEST_F(SafetensorsTest, NamesWhatIsMissingOrUnsupported) {
  write_text(folder_ / "model.safetensors",
             safetensors_bytes(R"({"model.norm.weight":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})",
                               "12345678"));
  const ModelWeights weights(folder_.path());
  expect_user_error([&] { weights.view("model.norm.wieght"); },
                    {"'model.norm.wieght'", "'model.norm.weight'"});
  std::vector<float> out(1);
  expect_user_error([&] { copy_as_float(weights.view("model.norm.weight"), out); },
                    {"I64", "model.norm.weight"});
  const std::vector<int64_t> expected{2, 3};
  expect_user_error([&] { weights.view("model.norm.weight", expected); }, {"[1]", "[2, 3]", "config.json"});
  EXPECT_EQ(weights.view("model.norm.weight", std::vector<int64_t>{1}).dtype, Dtype::kI64);
}

TEST_F(SafetensorsTest, ReadsShardsByTheirIndex) {
  const auto shard = [](const char* name, float value) {
    return safetensors_bytes(
        std::string("{\"") + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})",
        raw<float>({value}));
  };
  const std::filesystem::path index = folder_ / "model.safetensors.index.json";
  write_text(folder_ / "one.safetensors", shard("a", 1));
  write_text(folder_ / "two.safetensors", shard("b", 2));
  write_text(index,
             R"({"metadata":{"total_size":8},"weight_map":{"a":"one.safetensors","b":"two.safetensors"}})");
  {
    const ModelWeights weights(folder_.path());
    EXPECT_EQ(weights.names(), (std::vector<std::string>{"a", "b"}));
    std::vector<float> value(1);
    copy_as_float(weights.view("b"), value);
    EXPECT_EQ(value[0], 2);
  }
  const auto refuse_index = [&](std::string_view contents, std::initializer_list<std::string_view> words) {
    write_text(index, contents);
    expect_user_error([&] { ModelWeights weights(folder_.path()); }, words);
  };
  refuse_index(R"({"weight_map":{"a":"one.safetensors","b":"three.safetensors"}})",
               {"three.safetensors", "missing", "tensor b"});
  refuse_index(R"({"weight_map":{"a":"one.safetensors","x":"two.safetensors"}})",
               {"tensor x", "does not hold it"});
  refuse_index(R"({"weight_map":{"a":"one.safetensors","a":"two.safetensors"}})", {"'a' twice"});
  refuse_index(R"({"weight_map":{"a":"../one.safetensors"}})", {"plain file name"});
  refuse_index(R"({"weight_map":{"a":7}})", {"not a file name"});
  refuse_index(R"({"weight_map":[]})", {"no object 'weight_map'"});
  refuse_index("{", {"not valid JSON"});
  std::filesystem::remove(index);
  expect_user_error([&] { ModelWeights weights(folder_.path()); },
                    {"neither model.safetensors nor", folder_.path().string()});
  expect_user_error([&] { ModelWeights weights(folder_ / "absent"); },
                    {"cannot be opened: No such file or directory"});
}

// Any file whatever gives a UserError or views that lie inside it: under the sanitizers a stray read would
// show.
TEST_F(SafetensorsTest, SurvivesRandomDamage) {
  std::mt19937 random(20240917);
  const auto below = [&](size_t limit) {
    return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
  };
  const std::string good = valid_file();
  const std::vector<std::string> pieces{"-",
                                        "9",
                                        "0",
                                        "[",
                                        "]",
                                        "{",
                                        "}",
                                        "\"",
                                        ",",
                                        ":",
                                        "null",
                                        "1e9",
                                        "99999999999999999999",
                                        "4294967296",
                                        "F16",
                                        "F64",
                                        "\"b\"",
                                        "\\u0000",
                                        "\xff"};
  // In memory: thousands of files on a disk would take most of the time.
  const int memory = ::memfd_create("fuzz", 0);
  ASSERT_GE(memory, 0);
  const std::filesystem::path path = "/proc/self/fd/" + std::to_string(memory);
  int accepted = 0;
  int refused = 0;
  for (int round = 0; round < 10000; ++round) {
    std::string damaged = good;
    for (size_t edits = 1 + below(3); edits > 0; --edits) {
      if (damaged.empty()) damaged.push_back('x');
      const size_t at = below(damaged.size());
      switch (below(5)) {
        case 0:
          damaged[at] = static_cast<char>(below(256));
          break;
        case 1:
          damaged.erase(at, 1 + below(4));
          break;
        case 2:
          damaged.insert(at, pieces[below(pieces.size())]);
          break;
        case 3:
          damaged.resize(1 + below(damaged.size()));
          break;
        default:  // digits: lengths and offsets that stay valid JSON
          for (size_t i = 0; i < damaged.size(); ++i) {
            const size_t j = (at + i) % damaged.size();
            if (damaged[j] < '0' || damaged[j] > '9') continue;
            damaged[j] = static_cast<char>('0' + below(10));
            break;
          }
      }
    }
    // Half of the time the length is made right again, so that the JSON itself is reached.
    if (damaged.size() > 8 && below(2) == 0) {
      const uint64_t length =
          damaged.size() > valid_data().size() + 8 ? damaged.size() - valid_data().size() - 8 : 1;
      std::memcpy(damaged.data(), &length, 8);
    }
    ASSERT_EQ(::ftruncate(memory, 0), 0);
    ASSERT_EQ(::pwrite(memory, damaged.data(), damaged.size(), 0), static_cast<ssize_t>(damaged.size()));
    try {
      const SafetensorsFile file(path);
      for (const std::string& name : file.names()) {
        const TensorView& view = file.view(name);
        std::vector<float> values(static_cast<size_t>(view.elements()));
        try {
          copy_as_float(view, values);
        } catch (const UserError&) {
          EXPECT_NE(view.dtype, Dtype::kF32);
        }
      }
      ++accepted;
    } catch (const UserError&) {
      ++refused;
    }
  }
  ::close(memory);
  EXPECT_GT(refused, 0);
  EXPECT_GT(accepted, 0);  // damage to the data or the metadata only
}

TEST(NearestName, CountsEdits) {
  EXPECT_EQ(nearest_name("abd", {"xyz", "abc", "abdomen"}), "abc");
  EXPECT_EQ(nearest_name("", {"xyz", "a"}), "a");
  EXPECT_EQ(nearest_name("x", {}), "");
}

}  // namespace
}  // namespace longhalo
