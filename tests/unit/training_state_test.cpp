// What a training job keeps of itself beside arrays: its place, its settings, its metrics.
#include <gtest/gtest.h>

#include <filesystem>

#include "../storage/scratch.hpp"
#include "app/continued_metrics.hpp"
#include "app/training_state.hpp"

namespace longhalo {
namespace {

using namespace testing;

TEST(ContinuedMetrics, TakesBackWhatIsLaterAndHalfLines) {
  const ScratchFolder folder;
  const std::filesystem::path file = folder / "metrics.jsonl";
  take_back_metrics(file, 3);
  EXPECT_FALSE(std::filesystem::exists(file)) << "a missing file stays missing";
  const std::string kept =
      "{\"event\":\"run\",\"config\":{\"step\":9}}\n"
      "{\"event\":\"step\",\"step\":2}\n"
      "{\"event\":\"validation\",\"step\":3}\n"
      "{\"event\":\"note\",\"step\":\"late\"}\n";
  write_text(file, kept);
  const auto written = std::filesystem::last_write_time(file);
  take_back_metrics(file, 3);
  EXPECT_EQ(read_text(file), kept);
  EXPECT_EQ(std::filesystem::last_write_time(file), written) << "nothing to take back, nothing written";
  // A checkpoint is recorded some steps after its own; the kill left half a line.
  write_text(file, kept + "{\"event\":\"step\",\"step\":4}\n{\"event\":\"checkpoint\",\"step\":3}\n" +
                       "{\"event\":\"step\",\"step\":5,\"lo");
  take_back_metrics(file, 3);
  EXPECT_EQ(read_text(file), kept + "{\"event\":\"checkpoint\",\"step\":3}\n");
  EXPECT_EQ(count_files(folder.path()), 1);
}

TrainingSettings settings_of(const Config& config, const std::string& data = "d") {
  return TrainingSettings::of(config, "{1, 0, 8}", "p", data);
}

TEST(TrainingState, ComesBack) {
  const TrainingSettings settings = settings_of({});
  const TrainingState state{70, 140, 68, 2, 1};
  // Through text, as a manifest holds it.
  const nlohmann::json stored = nlohmann::json::parse(job_state_of(state, settings).dump());
  const TrainingState back = training_state_of(stored, settings, "folder", Say::kNo);
  EXPECT_EQ(back.step, 70);
  EXPECT_EQ(back.sequences, 140);
  EXPECT_EQ(back.updates, 68);
  EXPECT_EQ(back.skipped, 2);
  EXPECT_EQ(back.skipped_in_a_row, 1);
}

TEST(TrainingState, OfAnotherJobIsRefusedWithAllThatDiffers) {
  Config config;
  const nlohmann::json stored = job_state_of({}, settings_of(config));
  // How far it goes, how it learns and how often it reports are free.
  config.train.steps *= 2;
  config.train.learning_rate *= 2;
  config.train.accumulation = 3;
  config.train.log_every = 7;
  config.train.checkpoint_keep = 5;
  EXPECT_NO_THROW(training_state_of(stored, settings_of(config), "folder", Say::kNo));
  config.train.seed = 4;
  config.train.packing = PackingSetting::kOneDocument;
  const std::string message =
      expect_user_error([&] { training_state_of(stored, settings_of(config, "e"), "the/folder", Say::kNo); },
                        {"train.seed was 0, is 4", "train.packing was \"packed\", is \"one_document\"",
                         "the training data was \"d\", is \"e\"", "the/folder"});
  EXPECT_EQ(message.find("learning_rate"), std::string::npos);
  for (const char* missing : {"step", "updates", "fixed", "settings"}) {
    nlohmann::json part = stored;
    part.erase(missing);
    expect_user_error([&] { training_state_of(part, settings_of({}), "the/folder", Say::kNo); },
                      {missing, "the/folder"});
  }
}

}  // namespace
}  // namespace longhalo
