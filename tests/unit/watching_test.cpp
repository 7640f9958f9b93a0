// What is watched while a job runs: link counters, stragglers, the Prometheus file.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <limits>

#include "../storage/scratch.hpp"
#include "telemetry/link_counters.hpp"
#include "telemetry/prometheus.hpp"
#include "telemetry/stragglers.hpp"

namespace longhalo {
namespace {

using namespace testing;

// A folder as the kernel makes it, with two cards of one port each.
class LinkFolder : public ::testing::Test {
 protected:
  LinkFolder() {
    for (const char* device : {"mlx5_1", "mlx5_0"}) {
      port(device);
      set(device, "counters/symbol_error", "5");
      set(device, "counters/link_downed", "0");
      set(device, "counters/port_xmit_data", "1000");
      set(device, "hw_counters/out_of_sequence", "7");
      write_text(folder_ / (std::string(device) + "/ports/1/state"), "4: ACTIVE\n");
      write_text(folder_ / (std::string(device) + "/ports/1/rate"), "400 Gb/sec (4X NDR)\n");
      write_text(folder_ / (std::string(device) + "/ports/1/link_layer"), "InfiniBand\n");
    }
  }
  void port(const std::string& device) {
    for (const char* group : {"counters", "hw_counters"})
      std::filesystem::create_directories(folder_ / (device + "/ports/1/" + group));
  }
  void set(const std::string& device, const std::string& counter, const std::string& value) {
    write_text(folder_ / (device + "/ports/1/" + counter), value + "\n");
  }
  const ScratchFolder folder_;
};

TEST_F(LinkFolder, ReadsAllPorts) {
  set("mlx5_0", "counters/VL15_dropped", "N/A (no PMA)");
  const std::vector<LinkPort> ports = read_link_ports(folder_.path());
  ASSERT_EQ(ports.size(), 2U);
  EXPECT_EQ(ports[0].name(), "mlx5_0 port 1");
  EXPECT_EQ(ports[1].device, "mlx5_1");
  EXPECT_TRUE(ports[0].is_active());
  EXPECT_EQ(ports[0].rate, "400 Gb/sec (4X NDR)");
  EXPECT_EQ(ports[0].link_layer, "InfiniBand");
  const std::map<std::string, int64_t> counters{
      {"link_downed", 0}, {"out_of_sequence", 7}, {"port_xmit_data", 1000}, {"symbol_error", 5}};
  EXPECT_EQ(ports[0].counters, counters) << "what is no number is left out";
  write_text(folder_ / "mlx5_0/ports/1/state", "1: DOWN\n");
  EXPECT_FALSE(read_link_ports(folder_.path())[0].is_active());
  EXPECT_TRUE(read_link_ports(folder_ / "absent").empty());
}

TEST_F(LinkFolder, WhatIsNoCountIsNotWaitedFor) {
  const std::map<std::string, int64_t> counters = read_link_ports(folder_.path())[0].counters;
  const std::filesystem::path port = folder_ / "mlx5_0/ports/1";
  ASSERT_EQ(::mkfifo((port / "counters/port_rcv_errors").c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", port / "counters/local_link_integrity_errors");
  std::filesystem::create_directory(port / "counters/link_error_recovery");
  std::filesystem::create_symlink("nowhere", port / "counters/port_xmit_discards");
  set("mlx5_0", "counters/excessive_buffer_overrun_errors", "99999999999999999999999");
  write_text(port / "link_layer", std::string(100'000, 'x'));
  const LinkPort read = read_link_ports(folder_.path())[0];
  EXPECT_EQ(read.counters, counters);
  EXPECT_LT(read.link_layer.size(), 1000U);
}

TEST_F(LinkFolder, TellsOnlyErrorsThatGrow) {
  LinkWatch watch(folder_.path());
  EXPECT_TRUE(watch.grown().empty()) << "5 symbol errors are of the time before";
  set("mlx5_1", "counters/port_xmit_data", "2000");
  EXPECT_TRUE(watch.grown().empty()) << "data is no error";
  set("mlx5_1", "counters/symbol_error", "8");
  set("mlx5_0", "hw_counters/out_of_sequence", "9");
  const std::vector<LinkErrors> errors = watch.grown();
  ASSERT_EQ(errors.size(), 2U);
  EXPECT_EQ(errors[0].describe(), "mlx5_0 port 1: out_of_sequence +2 (now 9)");
  EXPECT_EQ(errors[1].describe(), "mlx5_1 port 1: symbol_error +3 (now 8)");
  EXPECT_TRUE(watch.grown().empty()) << "told once";
}

TEST_F(LinkFolder, SetBackOrNewCounts) {
  LinkWatch watch(folder_.path());
  set("mlx5_0", "counters/symbol_error", "2");
  ASSERT_EQ(watch.grown().size(), 1U);
  set("mlx5_0", "counters/symbol_error", "0");
  EXPECT_TRUE(watch.grown().empty());
  // A card that appears has a history that is not this job's.
  port("mlx5_2");
  set("mlx5_2", "counters/link_downed", "4");
  EXPECT_TRUE(watch.grown().empty());
  set("mlx5_2", "counters/link_downed", "5");
  ASSERT_EQ(watch.grown().size(), 1U);
  // One that goes away and comes back is where it was.
  std::filesystem::remove_all(folder_ / "mlx5_2");
  EXPECT_TRUE(watch.grown().empty());
}

// Changes of one record; ranks share the work evenly unless said otherwise.
std::vector<StragglerChange> take(StragglerWatch& watch, const std::vector<double>& seconds,
                                  std::vector<double> work = {}) {
  if (work.empty()) work.assign(seconds.size(), 1);
  return watch.take(seconds, work);
}

TEST(Stragglers, NamedOncePerChange) {
  StragglerWatch watch(1.2);
  const std::vector<double> slow{1, 1, 1.5, 1.05}, even{1, 1, 1.1, 1};
  EXPECT_TRUE(take(watch, slow).empty());
  EXPECT_TRUE(take(watch, slow).empty());
  const std::vector<StragglerChange> named = take(watch, slow);
  ASSERT_EQ(named.size(), 1U);
  EXPECT_EQ(named[0].rank, 2);
  EXPECT_TRUE(named[0].is_slow);
  EXPECT_DOUBLE_EQ(named[0].ratio, 1.5);
  for (int i = 0; i < 10; ++i)
    EXPECT_TRUE(take(watch, slow).empty());
  EXPECT_EQ(watch.slow(), std::vector<int>{2});
  take(watch, even);
  take(watch, slow);
  take(watch, even);
  EXPECT_TRUE(take(watch, even).empty()) << "three in a row are asked for";
  const std::vector<StragglerChange> back = take(watch, even);
  ASSERT_EQ(back.size(), 1U);
  EXPECT_FALSE(back[0].is_slow);
  EXPECT_TRUE(watch.slow().empty());
}

TEST(Stragglers, OneSlowRecordIsNoise) {
  StragglerWatch watch(1.2);
  for (int i = 0; i < 20; ++i)
    EXPECT_TRUE(
        take(watch, i % 3 == 2 ? std::vector<double>{1, 1, 1} : std::vector<double>{1, 9, 1}).empty());
}

TEST(Stragglers, OfTwoRanksTheSlowerOne) {
  StragglerWatch watch(1.2);
  take(watch, {1, 3});
  take(watch, {1, 3});
  const std::vector<StragglerChange> named = take(watch, {1, 3});
  ASSERT_EQ(named.size(), 1U);
  EXPECT_EQ(named[0].rank, 1);
}

TEST(Stragglers, MoreWorkIsNotSlowness) {
  StragglerWatch watch(1.2);
  for (int i = 0; i < 5; ++i) {
    // Rank 0 has four times the work; rank 2 has little, which costs more for its size; rank 3 has none.
    EXPECT_TRUE(take(watch, {4, 1, 0.4, 0}, {4, 1, 0.2, 0}).empty());
  }
  for (int i = 0; i < 5; ++i) {
    const std::vector<StragglerChange> named = take(watch, {8, 1, 0.4, 0}, {4, 1, 0.25, 0});
    EXPECT_EQ(named.size(), i == 2 ? 1U : 0U);
  }
  EXPECT_EQ(watch.slow(), std::vector<int>{0});
}

TEST(Stragglers, NobodyToCompare) {
  StragglerWatch alone(1.2), off(0);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(take(alone, {i + 1.0}).empty());
    EXPECT_TRUE(take(off, {1, 100}).empty());
  }
  EXPECT_TRUE(take(alone, {0}).empty());
}

TEST(Prometheus, TextFormat) {
  PrometheusText figures(PrometheusText::Labels{{"job", "a\"b\\c\nd"}});
  figures.gauge("longhalo_loss", "Nats\na token.", {}, 2.5);
  figures.counter("longhalo_bytes_total", "By kind.", {{"kind", "halo"}}, 12345678901.0);
  figures.gauge("longhalo_loss", "", {{"of", "validation"}}, std::numeric_limits<double>::quiet_NaN());
  figures.gauge("longhalo_inf", "Infinite.", {}, -std::numeric_limits<double>::infinity());
  EXPECT_EQ(figures.text(),
            "# HELP longhalo_loss Nats\\na token.\n"
            "# TYPE longhalo_loss gauge\n"
            "longhalo_loss{job=\"a\\\"b\\\\c\\nd\"} 2.5\n"
            "longhalo_loss{job=\"a\\\"b\\\\c\\nd\",of=\"validation\"} NaN\n"
            "# HELP longhalo_bytes_total By kind.\n"
            "# TYPE longhalo_bytes_total counter\n"
            "longhalo_bytes_total{job=\"a\\\"b\\\\c\\nd\",kind=\"halo\"} 12345678901\n"
            "# HELP longhalo_inf Infinite.\n"
            "# TYPE longhalo_inf gauge\n"
            "longhalo_inf{job=\"a\\\"b\\\\c\\nd\"} -Inf\n");
  PrometheusText plain;
  plain.gauge("x", "y", {}, 1);
  EXPECT_EQ(plain.text(), "# HELP x y\n# TYPE x gauge\nx 1\n");
}

const std::string kFigures = std::string(ReplacedFile::kBeginning) + "x ";

TEST(Prometheus, FileIsReplacedAsAWhole) {
  const ScratchFolder folder;
  ReplacedFile file((folder / "metrics.prom").string());
  file.replace(kFigures + "one\n");
  std::filesystem::create_hard_link(folder / "metrics.prom", folder / "held");
  file.replace(kFigures + "two\n");
  EXPECT_EQ(read_text(folder / "metrics.prom"), kFigures + "two\n");
  EXPECT_EQ(read_text(folder / "held"), kFigures + "one\n")
      << "who has it open still sees all of what stood there";
  EXPECT_FALSE(std::filesystem::exists(folder / "metrics.prom.longhalo-tmp"));
  // What a killed job left, or a link that somebody put there, is not written through.
  write_text(folder / "precious", "kept");
  std::filesystem::create_symlink(folder / "precious", folder / "metrics.prom.longhalo-tmp");
  file.replace(kFigures + "three\n");
  EXPECT_EQ(read_text(folder / "precious"), "kept");
  EXPECT_EQ(read_text(folder / "metrics.prom"), kFigures + "three\n");
}

TEST(Prometheus, AFaultIsNoEnd) {
  const ScratchFolder folder;
  ReplacedFile nowhere((folder / "absent/metrics.prom").string());
  nowhere.replace("x");
  nowhere.replace("x");
  EXPECT_FALSE(std::filesystem::exists(folder / "absent"));
  ReplacedFile().replace("x");
  ReplacedFile full((folder / "metrics.prom").string());
  full.replace(kFigures + "whole\n");
  {
    const FileSizeLimit limit(1000);
    full.replace(kFigures + std::string(5000, 'x'));
  }
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  ReplacedFile pipe((folder / "pipe").string());
  pipe.replace("x");
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe")) << "nor one in place of what is no file";
  EXPECT_EQ(read_text(folder / "metrics.prom"), kFigures + "whole\n") << "no half file takes its place";
  EXPECT_FALSE(std::filesystem::exists(folder / "metrics.prom.longhalo-tmp"));
}

// Named by mistake: a link such as /dev/stdout, whose place a file would take for all programs; a text of
// somebody; the lock of a folder, which is empty; and what has the file's name with another ending.
TEST(Prometheus, WhatIsNoFileOfFiguresStaysThere) {
  const ScratchFolder folder;
  write_text(folder / "text", "mine");
  write_text(folder / "empty", "");
  write_text(folder / "figures.tmp", "a document");
  write_text(folder / "other", kFigures);
  std::filesystem::create_symlink(folder / "other", folder / "link");
  for (const char* name : {"text", "empty", "link", "figures"})
    ReplacedFile((folder / name).string()).replace(kFigures + "new");
  EXPECT_EQ(read_text(folder / "text"), "mine");
  EXPECT_EQ(read_text(folder / "empty"), "");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(read_text(folder / "other"), kFigures);
  EXPECT_EQ(read_text(folder / "figures.tmp"), "a document");
  EXPECT_EQ(read_text(folder / "figures"), kFigures + "new");
}

}  // namespace
}  // namespace longhalo
