#include "telemetry/link_counters.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "core/text.hpp"

namespace longhalo {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostLineBytes = 256;  // a state, a rate or a count

// Of counters/: the InfiniBand architecture's own. Of hw_counters/: what NVIDIA, Broadcom and EFA cards call
// that which the far side had to send again, or this side did.
constexpr std::array kErrorCounters = {
    std::string_view("symbol_error"),
    std::string_view("link_error_recovery"),
    std::string_view("link_downed"),
    std::string_view("port_rcv_errors"),
    std::string_view("port_rcv_remote_physical_errors"),
    std::string_view("port_rcv_switch_relay_errors"),
    std::string_view("port_rcv_constraint_errors"),
    std::string_view("port_xmit_constraint_errors"),
    std::string_view("port_xmit_discards"),
    std::string_view("local_link_integrity_errors"),
    std::string_view("excessive_buffer_overrun_errors"),
    std::string_view("out_of_sequence"),
    std::string_view("packet_seq_err"),
    std::string_view("implied_nak_seq_err"),
    std::string_view("local_ack_timeout_err"),
    std::string_view("rnr_nak_retry_err"),
    std::string_view("req_transport_retries_exceeded"),
    std::string_view("roce_adp_retrans"),
    std::string_view("roce_slow_restart"),
    std::string_view("rx_icrc_encapsulated"),
    std::string_view("to_retransmits"),
    std::string_view("seq_err_naks_rcvd"),
    std::string_view("retrans_pkts"),
    std::string_view("retrans_timeout_events"),
};

// The folder is a setting, and what it leads to may be anything: a pipe or a device could hold the job up.
std::string first_line(const fs::path& file) {
  std::error_code ignored;
  if (!fs::is_regular_file(file, ignored)) return {};
  std::ifstream in(file);
  std::array<char, kMostLineBytes> bytes{};
  in.getline(bytes.data(), bytes.size());
  std::string line(bytes.data());
  while (!line.empty() && (line.back() == ' ' || line.back() == '\r'))
    line.pop_back();
  return line;
}

std::optional<int64_t> number_in(const fs::path& file) {
  const std::string line = first_line(file);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  if (error != std::errc() || end != line.data() + line.size()) return std::nullopt;
  return value;
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    entries.push_back(at->path());
  std::sort(entries.begin(), entries.end());
  return entries;
}

// With some drivers each count is a question to the card, so that only those that are wanted are read.
template <class Wanted>
std::vector<LinkPort> read_ports(const fs::path& root, const Wanted& wanted) {
  std::vector<LinkPort> ports;
  for (const fs::path& device : entries_of(root))
    for (const fs::path& folder : entries_of(device / "ports")) {
      LinkPort& port = ports.emplace_back();
      port.device = device.filename().string();
      port.port = folder.filename().string();
      port.state = first_line(folder / "state");
      port.rate = first_line(folder / "rate");
      port.link_layer = first_line(folder / "link_layer");
      for (const char* group : {"counters", "hw_counters"})
        for (const fs::path& file : entries_of(folder / group)) {
          const std::string name = file.filename().string();
          if (!wanted(name)) continue;
          if (const std::optional<int64_t> value = number_in(file)) port.counters.emplace(name, *value);
        }
    }
  return ports;
}

}  // namespace

std::vector<LinkPort> read_link_ports(const fs::path& root) {
  return read_ports(root, [](const std::string&) { return true; });
}

bool is_link_error(const std::string& counter) {
  return std::find(kErrorCounters.begin(), kErrorCounters.end(), counter) != kErrorCounters.end();
}

std::string LinkErrors::describe() const {
  return text(device, " port ", port, ": ", counter, " +", added, " (now ", count, ")");
}

LinkWatch::LinkWatch(fs::path root) : root_(std::move(root)) {
  grown();
}

std::vector<LinkErrors> LinkWatch::grown() {
  std::vector<LinkErrors> list;
  for (const LinkPort& port : read_ports(root_, is_link_error))
    for (const auto& [counter, count] : port.counters) {
      const auto [at, is_new] = seen_.try_emplace({port.name(), counter}, count);
      const int64_t before = std::exchange(at->second, count);
      if (is_new || count == before) continue;
      const int64_t added = count > before ? count - before : count;
      if (added > 0) list.push_back({port.device, port.port, counter, added, count});
    }
  return list;
}

}  // namespace longhalo
