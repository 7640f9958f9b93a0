// Job checkpoints: what was written comes back on any number of ranks; damage is found and the one before
// taken; a full disk and other faults leave the earlier ones good.
#include <fcntl.h>

#include <cstdlib>
#include <random>
#include <set>

#include "checkpoint_fixture.hpp"
#include "core/log.hpp"
#include "scratch.hpp"
#include "storage/checkpoint_list.hpp"

namespace longhalo {
namespace {

using namespace testing;

std::set<std::string> names_in(const std::filesystem::path& directory) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    names.insert(entry.path().filename().string());
  return names;
}

void flip_bit(const std::filesystem::path& file, int64_t at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(at);
  const char byte = static_cast<char>(stream.get() ^ 4);
  stream.seekp(at);
  stream.put(byte);
}

TEST(Checkpoint, ComesBackOnOtherNumbersOfRanks) {
  const ScratchFolder folder;
  const std::filesystem::path place = folder / "deep/checkpoints";
  int before = 0;
  int64_t step = 0;
  for (const int ranks : {2, 3, 1, 4, 1}) {
    ++step;
    ThreadRanks(ranks).run([&](const RankAgreement& agreement) {
      const auto found = find_checkpoint(place, agreement);
      ASSERT_EQ(found.has_value(), before > 0);
      if (found) {
        EXPECT_EQ(found->manifest.step, step - 1);
        EXPECT_EQ(found->manifest.ranks, before);
        EXPECT_TRUE(found->skipped.empty());
        SmallJob::expect_right(*found, agreement.rank, ranks);
      }
      CheckpointWriter writer(place, agreement);
      EXPECT_EQ(write_checkpoint(writer, step, agreement.rank, ranks), place / checkpoint_name(step));
    });
    before = ranks;
  }
  EXPECT_EQ(names_in(place), (std::set<std::string>{"step_000004", "step_000005"}));
  EXPECT_EQ(names_in(place / "step_000005"),
            (std::set<std::string>{"config.json", "manifest.json", "model.safetensors",
                                   "optimizer_00001_of_00001.h5"}));
}

TEST(Checkpoint, ReadsAnyRangeAcrossParts) {
  const ScratchFolder folder;
  ThreadRanks(3).run([&](const RankAgreement& agreement) {
    CheckpointWriter writer(folder.path(), agreement);
    write_checkpoint(writer, 7, agreement.rank, 3);
  });
  const auto found = find_checkpoint(folder.path(), RankAgreement::alone());
  ASSERT_TRUE(found);
  OptimizerStateReader optimizer = found->optimizer();
  EXPECT_EQ(optimizer.groups(), (std::vector<std::string>{"decayed", "plain"}));
  std::mt19937 random(std::random_device{}());
  for (int round = 0; round < 50; ++round) {
    int64_t begin = random() % (SmallJob::kDecayed + 1);
    int64_t end = random() % (SmallJob::kDecayed + 1);
    if (begin > end) std::swap(begin, end);
    std::vector<float> values(static_cast<size_t>(end - begin), NAN);
    optimizer.read("decayed", "weights", begin, values);
    for (int64_t i = begin; i < end; ++i)
      ASSERT_EQ(values[static_cast<size_t>(i - begin)], SmallJob::moment(7, i));
  }
  std::vector<float> one(1);
  EXPECT_THROW(optimizer.read("decayed", "weights", SmallJob::kDecayed, one), InvariantError);
  expect_user_error([&] { optimizer.read("decayed", "third_moment", 0, one); }, {"third_moment", "missing"});
  expect_user_error([&] { optimizer.read("other", "weights", 0, one); }, {"no group other"});
}

TEST(Checkpoint, PartsHaveToTileTheirGroup) {
  const auto reader = [](std::vector<StateRange> ranges) {
    return [ranges] { OptimizerStateReader("folder", {{"a.h5", ranges}}); };
  };
  reader({{"g", 5, 9, 9}, {"g", 0, 5, 9}, {"g", 5, 5, 9}, {"empty", 0, 0, 0}})();
  expect_user_error(reader({{"g", 0, 5, 9}, {"g", 6, 9, 9}}), {"missing", "group g"});
  expect_user_error(reader({{"g", 0, 5, 9}, {"g", 4, 9, 9}}), {"there twice"});
  expect_user_error(reader({{"g", 0, 5, 9}}), {"ends at element 5 of 9"});
  expect_user_error(reader({{"g", 0, 5, 9}, {"g", 5, 8, 8}}), {"9 elements by one part"});
}

TEST(Checkpoint, ShardedWeightsOpenAsAModel) {
  const ScratchFolder folder;
  ThreadRanks(2).run([&](const RankAgreement& agreement) {
    CheckpointOptions options;
    options.max_weight_file_bytes = 13'000;
    CheckpointWriter writer(folder.path(), agreement, options);
    write_checkpoint(writer, 3, agreement.rank, 2);
  });
  const auto found = find_checkpoint(folder.path(), RankAgreement::alone());
  ASSERT_TRUE(found);
  SmallJob::expect_right(*found, 0, 1);
  EXPECT_EQ(names_in(found->folder).count("model-00002-of-00002.safetensors"), 1U);
  EXPECT_EQ(names_in(found->folder).count("model.safetensors"), 0U);
  const auto index = nlohmann::json::parse(read_text(found->folder / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 16000);
  EXPECT_EQ(index["weight_map"]["model.norm.weight"], "model-00002-of-00002.safetensors");
  EXPECT_EQ(found->manifest.parts.size(), 6U) << "two of weights, their index, config.json, two of state";
}

TEST(Checkpoint, PlansWeightFiles) {
  const std::vector<NamedTensor> tensors{{"a", Dtype::kBF16, {10}, {}},
                                         {"b", Dtype::kF32, {0, 3}, {}},
                                         {"c", Dtype::kF32, {100}, {}},
                                         {"d", Dtype::kU8, {}, {}}};
  const auto shape_of = [&](int64_t bytes) {
    std::vector<std::vector<size_t>> result;
    for (const WeightFile& file : plan_weight_files(tensors, bytes))
      result.push_back(file.tensors);
    return result;
  };
  EXPECT_EQ(shape_of(421), (std::vector<std::vector<size_t>>{{0, 1, 2, 3}}));
  EXPECT_EQ(shape_of(420), (std::vector<std::vector<size_t>>{{0, 1, 2}, {3}}));
  EXPECT_EQ(shape_of(1), (std::vector<std::vector<size_t>>{{0, 1}, {2}, {3}}));
  const std::vector<NamedTensor> twice{tensors[0], tensors[0]};
  EXPECT_THROW(plan_weight_files(twice), InvariantError);
}

TEST(Checkpoint, OtherProgramsOpenIt) {
  const std::string python = LONGHALO_PYTHON;
  if (std::system((python + " -c 'import h5py, numpy' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << python << " has no h5py; scripts/setup.sh installs it";
  }
  const ScratchFolder folder;
  CheckpointWriter writer(folder / "checkpoints", RankAgreement::alone());
  const std::filesystem::path written = write_checkpoint(writer, 2);
  write_text(folder / "check.py", R"(
import h5py, json, numpy, os, sys
with h5py.File(os.path.join(sys.argv[1], "optimizer_00001_of_00001.h5")) as file:
    assert list(file["decayed/range"]) == [0, 10007, 10007]
    state = file["decayed/first_moment"][:]
    assert state.dtype == numpy.float32 and abs(state[1] - 2 * numpy.sin(1)) < 1e-6
with open(os.path.join(sys.argv[1], "manifest.json")) as file:
    assert json.load(file)["step"] == 2
path = os.path.join(sys.argv[1], "model.safetensors")
try:
    from safetensors.numpy import load_file
    norm = load_file(path)["model.norm.weight"]
except ImportError:  # the format is simple enough to be read without its package
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        assert file.tell() % 8 == 0 and header["__metadata__"] == {"format": "pt"}
        begin, end = header["model.norm.weight"]["data_offsets"]
        file.seek(begin, os.SEEK_CUR)
        norm = numpy.frombuffer(file.read(end - begin), "f4")
assert norm.shape == (1000,) and norm[0] == 2 + 0.25 * (3000 % 7)
)");
  EXPECT_EQ(std::system((python + " " + (folder / "check.py").string() + " " + written.string()).c_str()), 0);
}

TEST(Checkpoint, DamageIsFoundAndTheOneBeforeTaken) {
  set_log_level(LogLevel::kError);  // a warning for each of many damages
  std::mt19937 random(std::random_device{}());
  const ScratchFolder folder;
  {
    CheckpointWriter writer(folder.path(), RankAgreement::alone());
    write_checkpoint(writer, 1);
    write_checkpoint(writer, 2);
  }
  const std::filesystem::path newest = folder / "step_000002";
  std::filesystem::copy(newest, folder / "whole", std::filesystem::copy_options::recursive);
  const auto restore = [&] {
    std::filesystem::remove_all(newest);
    std::filesystem::copy(folder / "whole", newest, std::filesystem::copy_options::recursive);
  };
  for (const std::string& name : names_in(folder / "whole")) {
    const auto bytes = static_cast<int64_t>(std::filesystem::file_size(newest / name));
    const std::vector<std::function<void()>> damages{
        [&] { flip_bit(newest / name, 0); },
        [&] { flip_bit(newest / name, bytes - 1); },
        [&] { flip_bit(newest / name, static_cast<int64_t>(random() % static_cast<uint64_t>(bytes))); },
        [&] { std::filesystem::resize_file(newest / name, static_cast<uintmax_t>(bytes - 1)); },
        [&] { std::filesystem::resize_file(newest / name, 0); },
        [&] { std::filesystem::remove(newest / name); }};
    for (size_t damage = 0; damage < damages.size(); ++damage) {
      restore();
      damages[damage]();
      const bool is_uncommitted = name == "manifest.json" && damage + 1 == damages.size();
      // White space after the manifest's last brace, of all bytes, means nothing.
      const bool is_harmless = name == "manifest.json" && damage == 3;
      ThreadRanks(2).run([&](const RankAgreement& agreement) {
        const auto found = find_checkpoint(folder.path(), agreement);
        ASSERT_TRUE(found);
        EXPECT_EQ(found->manifest.step, is_harmless ? 2 : 1) << name << ", damage " << damage;
        SmallJob::expect_right(*found, agreement.rank, 2);
        if (is_uncommitted || is_harmless) return;
        ASSERT_EQ(found->skipped.size(), 1U);
        EXPECT_NE(found->skipped[0].find("step_000002"), std::string::npos);
        EXPECT_NE(found->skipped[0].find(name), std::string::npos) << found->skipped[0];
      });
    }
  }
  restore();
  EXPECT_EQ(find_checkpoint(folder.path(), RankAgreement::alone())->manifest.step, 2);
  flip_bit(newest / "model.safetensors", 300);
  flip_bit(folder / "step_000001/optimizer_00001_of_00001.h5", 5000);
  expect_user_error([&] { find_checkpoint(folder.path(), RankAgreement::alone()); },
                    {"no checkpoint", "step_000002", "model.safetensors", "step_000001", "optimizer_"});
}

TEST(Checkpoint, DamagedOnesDoNotCountAsKept) {
  const ScratchFolder folder;
  {
    CheckpointWriter writer(folder.path(), RankAgreement::alone());
    for (const int64_t step : {1, 2, 3})
      write_checkpoint(writer, step);
  }
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"step_000002", "step_000003"}));
  flip_bit(folder / "step_000003/model.safetensors", 500);
  ASSERT_EQ(find_checkpoint(folder.path(), RankAgreement::alone())->manifest.step, 2);
  CheckpointWriter writer(folder.path(), RankAgreement::alone());
  // The same step again: the damaged one makes way, and step 2 is not given up for it.
  write_checkpoint(writer, 3);
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{".longhalo.lock", "step_000002", "step_000003"}));
  const auto found = find_checkpoint(folder.path(), RankAgreement::alone());
  EXPECT_EQ(found->manifest.step, 3);
  EXPECT_TRUE(found->skipped.empty());
  SmallJob::expect_right(*found, 0, 1);
}

TEST(Checkpoint, LastWrittenWinsOverHigherSteps) {
  const ScratchFolder folder;
  CheckpointWriter writer(folder.path(), RankAgreement::alone());
  for (const int64_t step : {100, 200, 150, 150})
    write_checkpoint(writer, step);
  EXPECT_EQ(find_checkpoint(folder.path(), RankAgreement::alone())->folder, folder / "step_000150");
  EXPECT_EQ(names_in(folder.path()),
            (std::set<std::string>{".longhalo.lock", "step_000150", "step_000150.replaced_1"}));
  EXPECT_EQ(write_checkpoint(writer, 12345678), folder / "step_12345678");
}

TEST(Checkpoint, OneJobAtATimeAndOneCheckpointAtATime) {
  const ScratchFolder folder;
  EXPECT_FALSE(find_checkpoint(folder / "absent", RankAgreement::alone()));
  EXPECT_FALSE(find_checkpoint(folder.path(), RankAgreement::alone()));
  CheckpointWriter writer(folder.path(), RankAgreement::alone());
  expect_user_error([&] { CheckpointWriter second(folder.path(), RankAgreement::alone()); },
                    {"another job", folder.path().string()});
  SmallJob job(1, 0, 1);
  EXPECT_THROW(writer.commit(), InvariantError);
  writer.start(job.contents());
  SmallJob second_job(2, 0, 1);  // the first one's arrays are in use
  EXPECT_THROW(writer.start(second_job.contents()), InvariantError);
  writer.commit();
  write_text(folder / "file", "x");
  expect_user_error([&] { CheckpointWriter third(folder / "file", RankAgreement::alone()); },
                    {"cannot be made", "folder for checkpoints"});
}

TEST(Checkpoint, FullDiskLeavesTheEarlierOnes) {
  const TinyDisk disk;
  if (!disk.reason().empty()) GTEST_SKIP() << disk.reason();
  CheckpointWriter writer(disk.path(), RankAgreement::alone());
  write_checkpoint(writer, 1);
  write_checkpoint(writer, 2);
  const int64_t needed = 16000 + 8 * (SmallJob::kDecayed + SmallJob::kPlain);
  // Too little at the start, and enough at the start but taken by others in the middle.
  for (const int64_t left : {needed - 5000, needed + 2000}) {
    const int filler = ::open((disk / "filler").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_EQ(::posix_fallocate(filler, 0, free_bytes(disk.path()) - left / 4096 * 4096), 0);
    ::close(filler);
    expect_user_error([&] { write_checkpoint(writer, 3); }, {"No space left", "bytes needed", "bytes free"});
    std::filesystem::remove(disk / "filler");
    EXPECT_EQ(names_in(disk.path()), (std::set<std::string>{".longhalo.lock", "step_000001", "step_000002"}));
    const auto found = find_checkpoint(disk.path(), RankAgreement::alone());
    EXPECT_EQ(found->manifest.step, 2);
    SmallJob::expect_right(*found, 0, 1);
  }
  write_checkpoint(writer, 3);
  EXPECT_EQ(names_in(disk.path()), (std::set<std::string>{".longhalo.lock", "step_000002", "step_000003"}));
}

TEST(Checkpoint, FailureOfOneRankIsAFailureOfAll) {
  const ScratchFolder folder;
  ThreadRanks(3).run([&](const RankAgreement& agreement) {
    CheckpointOptions options;
    bool fails = false;
    options.observe = [&](std::string_view name) {
      if (fails && agreement.rank == 2 && name.ends_with(".h5 verified"))
        throw std::runtime_error("disk lost");
    };
    CheckpointWriter writer(folder.path(), agreement, options);
    write_checkpoint(writer, 1, agreement.rank, 3);
    fails = true;
    expect_user_error([&] { write_checkpoint(writer, 2, agreement.rank, 3); }, {"disk lost"});
    const auto found = find_checkpoint(folder.path(), agreement);
    EXPECT_EQ(found->manifest.step, 1);
    fails = false;
    write_checkpoint(writer, 3, agreement.rank, 3);
    EXPECT_EQ(find_checkpoint(folder.path(), agreement)->manifest.step, 3);
  });
  EXPECT_EQ(names_in(folder.path()), (std::set<std::string>{"step_000001", "step_000003"}));
}

TEST(Checkpoint, FolderRemovedBetweenCheckpoints) {
  const ScratchFolder folder;
  CheckpointWriter writer(folder / "checkpoints", RankAgreement::alone());
  write_checkpoint(writer, 1);
  std::filesystem::remove_all(folder / "checkpoints");
  write_checkpoint(writer, 2);
  EXPECT_EQ(find_checkpoint(folder / "checkpoints", RankAgreement::alone())->manifest.step, 2);
  SmallJob job(3, 0, 1);
  writer.start(job.contents());
  std::error_code in_the_way;  // the writer is at work in the folder: files come and go under the removal
  while (std::filesystem::exists(folder / "checkpoints"))
    std::filesystem::remove_all(folder / "checkpoints", in_the_way);
  expect_user_error([&] { writer.commit(); }, {"No such file"});
}

}  // namespace
}  // namespace longhalo
