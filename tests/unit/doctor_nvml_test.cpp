// The doctor's view of GPUs through a stand-in for NVML (tests/support/fake_nvml.c), whose second GPU has the
// faults that LONGHALO_FAKE_NVML asks for.
#include <gtest/gtest.h>

#include <cstdlib>

#include "doctor/doctor_gpus.hpp"

namespace longhalo {
namespace {

std::vector<Finding> examined(const char* faults, const std::vector<std::string>& uuids = {}) {
  ::setenv("LONGHALO_FAKE_NVML", faults, 1);
  return examine_gpus(LONGHALO_FAKE_NVML_LIBRARY, uuids, true);
}

// The row of `check` about `place`; one that is not there has no check.
Finding row_of(const std::vector<Finding>& rows, const std::string& check, const std::string& place) {
  for (const Finding& row : rows)
    if (row.check == check && row.place == place) return row;
  return {};
}

TEST(DoctorNvml, GpusThatAreWell) {
  const std::vector<Finding> rows = examined("");
  for (const Finding& row : rows)
    EXPECT_EQ(row.verdict, Verdict::kPass) << row.check << ' ' << row.place << ": " << row.found;
  for (const char* check : {"GPU memory", "GPU ECC", "GPU clocks", "GPU temperature", "GPU power limit",
                            "GPU persistence", "GPU PCIe", "NVLink"})
    for (const char* place : {"GPU 0", "GPU 1"})
      EXPECT_EQ(row_of(rows, check, place).check, check) << place;
  EXPECT_EQ(row_of(rows, "GPU topology", "").found, "by NVLink: all pairs");
  EXPECT_EQ(row_of(rows, "GPU memory", "GPU 1").found, "Imaginary H200, 100 GiB, at least 90% free");
}

struct Fault {
  const char* setting;
  const char* check;
  Verdict verdict;
  const char* words;
};

class DoctorNvmlFault : public testing::TestWithParam<Fault> {};

TEST_P(DoctorNvmlFault, IsFoundOnItsGpuAlone) {
  const Fault& fault = GetParam();
  const std::vector<Finding> rows = examined(fault.setting);
  const Finding bad = row_of(rows, fault.check, "GPU 1");
  EXPECT_EQ(bad.verdict, fault.verdict);
  EXPECT_NE(bad.found.find(fault.words), std::string::npos) << bad.found;
  EXPECT_FALSE(bad.remedy.empty());
  for (const Finding& row : rows) {
    const bool is_the_fault = row.place == "GPU 1" && row.check == fault.check;
    EXPECT_TRUE(is_the_fault || row.verdict == Verdict::kPass) << row.check << ' ' << row.found;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, DoctorNvmlFault,
    testing::Values(Fault{"free=50", "GPU memory", Verdict::kWarn, "50% free"},
                    Fault{"ecc=2", "GPU ECC", Verdict::kFail, "2 uncorrected errors"},
                    Fault{"oldecc=3", "GPU ECC", Verdict::kWarn, "3 uncorrected errors in earlier times"},
                    Fault{"eccmode=0", "GPU ECC", Verdict::kWarn, "off"},
                    Fault{"remap=1", "GPU ECC", Verdict::kFail, "waits to be replaced"},
                    Fault{"remap=2", "GPU ECC", Verdict::kFail, "could not be replaced"},
                    Fault{"throttle=0x40", "GPU clocks", Verdict::kFail, "slowed down by heat"},
                    Fault{"throttle=0x88", "GPU clocks", Verdict::kFail,
                          "power supply, slowed down by the hardware"},
                    Fault{"throttle=0x4", "GPU clocks", Verdict::kWarn, "power limit"},
                    Fault{"throttle=0x3", "GPU clocks", Verdict::kWarn, "a setting"},
                    Fault{"temperature=86", "GPU temperature", Verdict::kWarn, "86 C"},
                    Fault{"power=350", "GPU power limit", Verdict::kWarn, "350 W"},
                    Fault{"persistence=0", "GPU persistence", Verdict::kWarn, "off"},
                    Fault{"width=8", "GPU PCIe", Verdict::kWarn, "x8"},
                    Fault{"nvlink=17", "NVLink", Verdict::kWarn, "17 of 18 links"}));

TEST(DoctorNvml, PathsBetweenGpus) {
  const std::vector<Finding> rows = examined("gpus=4,nvlink=0,p2p=0");
  std::string paths;
  Verdict worst = Verdict::kPass;
  for (const Finding& row : rows) {
    if (row.check != "GPU topology") continue;
    paths += row.found + ";";
    worst = std::max(worst, row.verdict);
  }
  EXPECT_NE(paths.find("by one PCIe switch: 0-1, 2-3;"), std::string::npos) << paths;
  EXPECT_NE(paths.find("by both sockets: 0-2, 0-3, 1-2, 1-3;"), std::string::npos) << paths;
  EXPECT_NE(paths.find("no access to each other's memory: 0-1"), std::string::npos) << paths;
  EXPECT_EQ(worst, Verdict::kWarn);
}

TEST(DoctorNvml, OnlyTheJobsOwnGpus) {
  for (const Finding& row : examined("throttle=0x40", {"GPU-0"})) {
    EXPECT_EQ(row.place, "GPU 0");
    EXPECT_EQ(row.verdict, Verdict::kPass);
  }
  const std::vector<Finding> rows = examined("", {"GPU-7"});
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].verdict, Verdict::kFail);
  EXPECT_NE(rows[0].found.find("GPU-7"), std::string::npos) << rows[0].found;
}

TEST(DoctorNvml, AGpuThatFellOffTheBus) {
  const std::vector<Finding> rows = examined("lost=1");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].verdict, Verdict::kFail);
  EXPECT_NE(rows[0].found.find("GPU 1"), std::string::npos) << rows[0].found;
  EXPECT_NE(rows[0].remedy.find("xid"), std::string::npos) << rows[0].remedy;
}

TEST(DoctorNvml, WithoutALibraryOrADriver) {
  const std::vector<Finding> none = examine_gpus("libno-such-nvml.so.1", {}, false);
  ASSERT_EQ(none.size(), 1u);
  EXPECT_EQ(none[0].verdict, Verdict::kSkipped);
  EXPECT_NE(none[0].found.find("libno-such-nvml.so.1"), std::string::npos) << none[0].found;
  EXPECT_EQ(examine_gpus("libno-such-nvml.so.1", {}, true)[0].verdict, Verdict::kWarn);
  const std::vector<Finding> dead = examined("init=9");
  ASSERT_EQ(dead.size(), 1u);
  EXPECT_NE(dead[0].found.find("Driver Not Loaded"), std::string::npos) << dead[0].found;
  EXPECT_EQ(examined("gpus=0")[0].verdict, Verdict::kSkipped);
}

}  // namespace
}  // namespace longhalo
