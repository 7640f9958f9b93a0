// What a training job keeps of itself beside arrays: its place, its settings, its metrics.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

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
                         "the training data was \"d\", is \"e\" (the text of input.documents", "the/folder"});
  EXPECT_EQ(message.find("learning_rate"), std::string::npos);
  // What only a job that begins looks at would do nothing in one that goes on.
  config = {};
  config.attention.landmark_bias = -1;
  config.model.seed = 2;
  config.model.weights = WeightsSource::kRandom;
  expect_user_error([&] { training_state_of(stored, settings_of(config), "the/folder", Say::kNo); },
                    {"attention.landmark_bias was \"auto\", is -1", "model.seed was 0, is 2",
                     "model.weights was \"checkpoint\", is \"random\""});
  for (const char* missing : {"step", "updates", "fixed", "settings"}) {
    nlohmann::json part = stored;
    part.erase(missing);
    expect_user_error([&] { training_state_of(part, settings_of({}), "the/folder", Say::kNo); },
                      {missing, "the/folder"});
  }
}

TEST(TrainingState, OfALaterStepThanTheLastIsRefused) {
  Config config;
  config.train.steps = 9;
  const nlohmann::json stored = job_state_of({8, 8, 8, 0, 0}, settings_of(config));
  for (const int64_t good : {8, 100}) {
    config.train.steps = good;
    EXPECT_EQ(training_state_of(stored, settings_of(config), "folder", Say::kNo).step, 8) << good;
  }
  config.train.steps = 7;
  expect_user_error([&] { training_state_of(stored, settings_of(config), "the/folder", Say::kNo); },
                    {"of step 8, beyond train.steps, which is 7", "set train.steps to 8", "the/folder"});
}

TEST(TrainingState, EverySettingOfModelAndTrainingIsCompared) {
  const nlohmann::json job = job_state_of({}, settings_of({}));
  std::string known;
  for (const char* part : {"fixed", "settings"})
    for (const auto& [key, value] : job.at(part).items())
      known += " " + key + " ";
  const nlohmann::json all = nlohmann::json::parse(dump_json({}));
  // Fixed by content: the bands, the arrays. Free: how far a job goes, how often it reports and writes.
  const std::set<std::string> otherwise{"attention.window", "attention.landmark_stride", "attention.bands",
                                        "model.shape"};
  const std::set<std::string> free{"train.validate_every",   "train.validation_sequences",
                                   "train.log_every",        "train.save_every",
                                   "train.checkpoint_every", "train.checkpoint_keep"};
  for (const char* section : {"model", "attention", "train"})
    for (const auto& [key, value] : all.at(section).items()) {
      const std::string name = std::string(section) + "." + key;
      const bool is_compared = known.find(" " + name + " ") != std::string::npos;
      EXPECT_EQ(is_compared, !otherwise.contains(name) && !free.contains(name)) << name;
    }
}

TEST(TrainingState, OfAnotherVersionSaysNothingOfSomeSettings) {
  nlohmann::json stored = job_state_of({}, settings_of({}));
  stored["fixed"].erase("attention.landmark_bias");
  stored["settings"].erase("train.clip");
  ::testing::internal::CaptureStderr();
  EXPECT_NO_THROW(training_state_of(stored, settings_of({}), "folder", Say::kYes));
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("says nothing:\n  attention.landmark_bias is \"auto\"\n  train.clip is 1.0"),
            std::string::npos)
      << said;
  for (const char* part : {"fixed", "settings"}) {
    nlohmann::json broken = stored;
    broken[part] = 3;
    expect_user_error([&] { training_state_of(broken, settings_of({}), "the/folder", Say::kNo); },
                      {"not of a training job", "the/folder"});
  }
}

}  // namespace
}  // namespace longhalo
