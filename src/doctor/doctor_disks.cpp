#include "doctor/doctor_disks.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <iomanip>
#include <random>
#include <sstream>

#include "app/shared_folder.hpp"
#include "core/clock.hpp"
#include "core/text.hpp"
#include "storage/activation_store.hpp"
#include "storage/posix.hpp"

namespace longhalo {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kBlock = 8 * kMiB;
constexpr int64_t kLittle = int64_t{1} << 30;

std::string size_text(int64_t bytes) {
  std::ostringstream out;
  out << std::setprecision(3);
  if (bytes >= 1 << 30)
    out << static_cast<double>(bytes) / (1 << 30) << " GiB";
  else
    out << static_cast<double>(bytes) / kMiB << " MiB";
  return out.str();
}

std::string rate_text(int64_t bytes, double seconds) {
  std::ostringstream out;
  out << std::setprecision(3) << static_cast<double>(bytes) / seconds / 1e9 << " GB/s";
  return out.str();
}

bool is_in_memory(const fs::path& folder) {
  struct statfs status {};
  return ::statfs(folder.c_str(), &status) == 0 &&
         (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC);
}

fs::path name_in(const fs::path& folder, const char* what) {
  return folder / text(".longhalo-doctor-", what, '.', host_name(), '.', ::getpid());
}

// A file without a name: whatever happens, nothing is left of it.
FileDescriptor open_nameless(const fs::path& folder, int64_t bytes) {
  const fs::path file = name_in(folder, "disk");
  FileDescriptor descriptor(::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!descriptor.is_open()) throw_write_error(errno, file, bytes);
  ::unlink(file.c_str());
  return descriptor;
}

// Not every file system has direct I/O (tmpfs has not).
bool make_direct(const FileDescriptor& file) {
  const int flags = ::fcntl(file.get(), F_GETFL);
  return flags >= 0 && ::fcntl(file.get(), F_SETFL, flags | O_DIRECT) == 0;
}

// Random bytes: a file system that compresses would be fast at anything else.
AlignedMemory random_block() {
  AlignedMemory block(kBlock);
  std::mt19937_64 generator(static_cast<uint64_t>(::getpid()));
  const std::span<std::byte> bytes = block.span();
  for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
    const uint64_t word = generator();
    std::memcpy(bytes.data() + i, &word, sizeof word);
  }
  return block;
}

template <class Work>
void for_each_block(int64_t bytes, const Work& work) {
  for (int64_t offset = 0; offset < bytes; offset += kBlock)
    work(offset, static_cast<size_t>(std::min(kBlock, bytes - offset)));
}

}  // namespace

Finding shared_memory_finding(const fs::path& folder, int64_t wanted_bytes) {
  Finding row{"shared memory",
              Scope::kHost,
              folder.string(),
              "",
              text("at least ", size_text(wanted_bytes), " free"),
              Verdict::kPass,
              "",
              {}};
  struct statvfs status {};
  if (::statvfs(folder.c_str(), &status) != 0) {
    row.found = text("cannot be looked at: ", std::strerror(errno));
    row.verdict = Verdict::kWarn;
    row.remedy = "mount a tmpfs there: MPI and NCCL share memory through it";
    return row;
  }
  const auto block = static_cast<int64_t>(status.f_frsize);
  const int64_t free = static_cast<int64_t>(status.f_bavail) * block;
  const int64_t all = static_cast<int64_t>(status.f_blocks) * block;
  row.values = {{"free_bytes", free}, {"bytes", all}};
  row.found = text(size_text(free), " free of ", size_text(all));
  if (free >= wanted_bytes) return row;
  row.verdict = Verdict::kFail;
  row.remedy =
      "remove what dead jobs left there (ls -l /dev/shm), or make it larger: in a container --shm-size or "
      "--ipc=host, else mount -o remount,size=";
  return row;
}

DiskTimes measure_disk(const fs::path& folder, int64_t bytes) {
  const fs::path place = nearest_existing(folder);
  std::error_code problem;
  if (!fs::is_directory(place, problem)) throw_write_error(problem ? problem.value() : ENOTDIR, place, 0);
  DiskTimes times;
  times.free_bytes = free_bytes(place);
  times.is_in_memory = is_in_memory(place);
  times.bytes = bytes;
  // A tenth of what is free, so that others do not meet a full disk because of a test.
  if (times.free_bytes >= 0) times.bytes = std::min(bytes, times.free_bytes / 10 / kMiB * kMiB);
  if (times.bytes < kMiB) throw_write_error(ENOSPC, place, 10 * kMiB);

  const FileDescriptor file = open_nameless(place, times.bytes);
  times.is_direct = make_direct(file);
  const AlignedMemory written = random_block();
  AlignedMemory read(kBlock);
  Stopwatch watch;
  for_each_block(times.bytes, [&](int64_t offset, size_t size) {
    write_exactly(file, offset, written.span().first(size), place, times.bytes);
  });
  const double before_sync = watch.seconds();
  sync_file(file, place);
  times.write_seconds = watch.seconds();
  times.sync_seconds = times.write_seconds - before_sync;
  drop_cache(file);
  watch.restart();
  times.is_right = true;
  double comparing = 0;
  for_each_block(times.bytes, [&](int64_t offset, size_t size) {
    read_exactly(file, offset, read.span().first(size), place);
    const Stopwatch compare;
    times.is_right = times.is_right && std::memcmp(read.span().data(), written.span().data(), size) == 0;
    comparing += compare.seconds();
  });
  times.read_seconds = watch.seconds() - comparing;
  return times;
}

Finding disk_finding(const DiskTest& test, const DiskTimes& times) {
  const double rate = static_cast<double>(times.bytes) / times.write_seconds / 1e9;
  const double read_rate = static_cast<double>(times.bytes) / times.read_seconds / 1e9;
  Finding row{test.check, Scope::kHost, test.folder.string(), "", "", Verdict::kPass, "", {}};
  row.found = text(size_text(times.free_bytes), " free; writes ", rate_text(times.bytes, times.write_seconds),
                   ", reads ", rate_text(times.bytes, times.read_seconds),
                   times.is_direct ? "" : " through the page cache", ", fsync ",
                   std::lround(times.sync_seconds * 1e3), " ms");
  row.wanted = test.least_gb_per_second > 0
                   ? text("at least ", test.least_gb_per_second, " GB/s (", test.floor_key, ")")
                   : text("at least ", size_text(kLittle), " free");
  row.values = {{"free_bytes", times.free_bytes},      {"bytes", times.bytes},
                {"write_gb_per_second", rate},         {"read_gb_per_second", read_rate},
                {"fsync_seconds", times.sync_seconds}, {"direct_io", times.is_direct}};
  if (!times.is_right) {
    row.verdict = Verdict::kFail;
    row.wanted = "what was written";
    row.found += "; it reads other bytes than were written";
    row.remedy = "use another disk, and have this one looked at (dmesg)";
  } else if (test.least_gb_per_second > 0 && std::min(rate, read_rate) < test.least_gb_per_second) {
    row.verdict = Verdict::kFail;
    row.remedy = "choose a faster disk, or find out who else uses this one; df and mount say what it is";
  } else if (times.free_bytes >= 0 && times.free_bytes < kLittle) {
    row.verdict = Verdict::kWarn;
    row.wanted = text("at least ", size_text(kLittle), " free");
    row.remedy = "free space there, or choose another place; longhalo train --plan says how much a job needs";
  } else if (times.is_in_memory) {
    row.verdict = Verdict::kWarn;
    row.found += "; it lies in the host's memory (tmpfs)";
    row.wanted = "a disk";
    row.remedy =
        "choose a folder on a disk: what lies in memory takes it from the job, and is gone with the host, or "
        "with "
        "the job where it has a /tmp or /dev/shm of its own";
  }
  return row;
}

Finding examine_disk(const DiskTest& test) {
  try {
    return disk_finding(test, measure_disk(test.folder, test.bytes));
  } catch (const std::exception& error) {
    Finding row = failed_check(test.check, Scope::kHost, error);
    row.place = test.folder.string();
    row.wanted = "a folder that can be written to";
    return row;
  }
}

std::vector<Finding> shared_folder_finding(const MpiSession& session, const fs::path& folder) {
  const std::optional<SharedFolder> seen = look_at_shared_folder(session, folder);
  if (!seen) return {};  // where it cannot be written to, its own row says so
  Finding row{"output folder",     Scope::kJob,    "", "all hosts see what rank 0 writes",
              "seen by all hosts", Verdict::kPass, "", {}};
  if (!seen->fault.empty()) row.found = seen->fault, row.verdict = Verdict::kFail, row.remedy = seen->remedy;
  return {row};
}

}  // namespace longhalo
