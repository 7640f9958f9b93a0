// What a job is refused for because it would spoil it: files that it reads, and its own output.
#include <gtest/gtest.h>

#include <filesystem>

#include "config/config.hpp"
#include "config_fixture.hpp"

namespace longhalo {
namespace {

using namespace test;

// The parts of `yaml` that name what the job writes; the rest is a job that is well.
std::string faults_of_outputs(Subcommand subcommand, const std::string& yaml) {
  const TemporaryFile file("model: {path: m}\ninput: {documents: [d.txt, in/e.txt]}\ntasks: [score]\n" +
                           yaml);
  return message_of(subcommand, ConfigSources{file.path(), {}, {}});
}

TEST(ConfigPlaces, AFileOfTwoKeys) {
  for (const auto& [subcommand, yaml, key, other, path] :
       {std::tuple{Subcommand::kInfer, "output: {directory: out}\nrun: {log: out/results.jsonl}", "run.log",
                   "output.directory", "out/results.jsonl"},
        {Subcommand::kTrain, "output: {directory: out}\nrun: {log: ./out/../out/metrics.jsonl}", "run.log",
         "output.directory", "./out/../out/metrics.jsonl"},
        {Subcommand::kInfer, "output: {directory: out}\nrun: {log: out/arrays/log}", "run.log",
         "output.directory", "out/arrays/log"},
        {Subcommand::kTrain, "output: {directory: out}\nrun: {log: out/checkpoints/log}", "run.log",
         "output.directory", "out/checkpoints/log"},
        {Subcommand::kInfer, "output: {directory: out}\nrun: {log: out/results.previous.jsonl}", "run.log",
         "output.directory", "out/results.previous.jsonl"},
        {Subcommand::kInfer, "output: {directory: out}\nrun: {log: d.txt}", "run.log", "input.documents",
         "d.txt"},
        {Subcommand::kInfer, "output: {directory: out}\nrun: {log: out/metrics.prom}",
         "telemetry.prometheus (default)", "run.log", "out/metrics.prom"},
        {Subcommand::kInfer, "output: {directory: out}\ntelemetry: {prometheus: out/log.jsonl}",
         "telemetry.prometheus", "run.log", "out/log.jsonl"},
        {Subcommand::kTrain, "output: {directory: out}\ntelemetry: {prometheus: out/metrics.jsonl}",
         "telemetry.prometheus", "output.directory", "out/metrics.jsonl"},
        {Subcommand::kTrain, "output: {directory: out}\ntelemetry: {prometheus: in/../in/e.txt}",
         "telemetry.prometheus", "input.documents", "in/../in/e.txt"},
        {Subcommand::kInfer, "output: {directory: out}\ntelemetry: {prometheus: x}\nrun: {log: x}",
         "telemetry.prometheus", "run.log", "x"},
        {Subcommand::kInfer, "output: {directory: out}\nrun: {log: m/tokenizer.json}", "run.log",
         "model.path", "m/tokenizer.json"},
        {Subcommand::kTrain, "output: {directory: out}\ntelemetry: {prometheus: m/a.safetensors}",
         "telemetry.prometheus", "model.path", "m/a.safetensors"},
        {Subcommand::kInfer, "output: {directory: out}\ntelemetry: {prometheus: m/added_tokens.json}",
         "telemetry.prometheus", "model.path", "m/added_tokens.json"},
        {Subcommand::kTrain, "output: {directory: out}\ntelemetry: {prometheus: m/merges.txt}",
         "telemetry.prometheus", "model.path", "m/merges.txt"}})
    EXPECT_TRUE(holds(faults_of_outputs(subcommand, yaml),
                      text(key, " and ", other, " would both have ", path, "; choose another file")))
        << yaml;
}

TEST(ConfigPlaces, FilesOfOneKeyEach) {
  for (const char* yaml :
       {"output: {directory: out}", "output: {directory: out}\nrun: {log: out/results.log}",
        "output: {directory: out}\nrun: {log: out/modelled}",
        "output: {directory: out}\nrun: {log: results.jsonl}", "output: {directory: m/out}",
        "output: {directory: out}\nrun: {log: m/log.jsonl}",
        "output: {directory: out}\nrun: {log: config.json}",
        "output: {directory: out}\nrun: {log: /dev/null}\ntelemetry: {prometheus: /dev/null}"})
    for (const Subcommand subcommand : {Subcommand::kInfer, Subcommand::kTrain})
      EXPECT_EQ(faults_of_outputs(subcommand, yaml), "") << yaml;
}

TEST(ConfigPlaces, OutputsThatAreTheConfigItselfAFolderOrALinkToNowhere) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path();
  for (const char* key : {"run.log", "telemetry.prometheus"}) {
    const TemporaryFile file(
        "model: {path: m}\ninput: {documents: [d]}\ntasks: [score]\noutput: {directory: out}\n");
    const auto with = [&](const std::filesystem::path& value) {
      return message_of(Subcommand::kInfer, ConfigSources{file.path(), {}, {text(key, "=", value.string())}});
    };
    EXPECT_TRUE(holds(with(file.path()), text(key, " and --config would both have ", file.path().string())));
    for (const std::filesystem::path& place :
         {folder, std::filesystem::path("out"), std::filesystem::path("./out")}) {
      const std::string message = with(place);
      EXPECT_TRUE(holds(message, text(key, ": ", place.string(), " is a folder; name a file")));
      EXPECT_EQ(count_faults(message), 1) << message;
    }
    const std::string link = file.path().string() + ".link";
    for (const std::string& target : {std::string("nowhere/log.jsonl"), link}) {
      std::filesystem::create_symlink(target, link);
      EXPECT_TRUE(holds(with(link), text(key, ": ", link, " is a link that leads nowhere; name a file")));
      std::filesystem::remove(link);
    }
    EXPECT_EQ(with(file.path().string() + ".log"), "");
  }
}

// Nobody has named them: what is in their way is.
TEST(ConfigPlaces, DefaultOutputsInWhosePlaceIsAFolder) {
  const TemporaryFile file("model: {path: m}\ninput: {documents: [d]}\ntasks: [score]\n");
  const std::string out = file.path().string() + ".out";
  for (const auto& [key, name] :
       {std::pair{"run.log", "log.jsonl"}, std::pair{"telemetry.prometheus", "metrics.prom"}}) {
    const std::string place = text(out, "/", name);
    const auto message = [&] {
      return message_of(Subcommand::kInfer,
                        ConfigSources{file.path(), {}, {"output.directory=" + out, text(key, "=")}});
    };
    const std::string remedy = text("; move that away, or set ", key, " to a file");
    std::filesystem::create_directories(place);
    const std::string folder = message();
    EXPECT_TRUE(holds(folder, text(key, " (default): ", place, " is a folder", remedy)));
    EXPECT_EQ(count_faults(folder), 1) << folder;
    std::filesystem::remove_all(out);
    EXPECT_EQ(message(), "");
    std::filesystem::create_directories(out);
    std::filesystem::create_symlink("nowhere/file", place);
    EXPECT_TRUE(holds(message(), text(key, " (default): ", place, " is a link that leads nowhere", remedy)));
    std::filesystem::remove_all(out);
    std::filesystem::create_directories(place);
    EXPECT_TRUE(
        holds(message_of(Subcommand::kInfer, ConfigSources{file.path(), {}, {"output.directory=" + out}}),
              text("--set output.directory=", out.substr(0, 8))))
        << "the place of the fault";
    std::filesystem::remove_all(out);
  }
}

// As on another disk, or where what was there has been cleared away. It counts as the file it leads to.
TEST(ConfigPlaces, OutputsThatAreLinksToAFileYetToBeMade) {
  namespace fs = std::filesystem;
  const fs::path start = fs::current_path();
  for (const char* key : {"run.log", "telemetry.prometheus"}) {
    const TemporaryFile file("model: {path: m}\ninput: {documents: [d]}\ntasks: [score]\n");
    const std::string link = file.path().string() + ".link", next = file.path().string() + ".next",
                      out = file.path().string() + ".out";
    const auto with = [&](const fs::path& place) {
      return message_of(
          Subcommand::kInfer,
          ConfigSources{file.path(), {}, {text("output.directory=", out), text(key, "=", place.string())}});
    };
    fs::create_symlink("not_yet.jsonl", next);
    for (const std::string& target : {std::string("not_yet.jsonl"), next, out + "/own.jsonl"}) {
      fs::create_symlink(target, link);
      EXPECT_EQ(with(link), "") << target;
      fs::current_path(file.path().parent_path());
      EXPECT_EQ(with(fs::path(link).filename()), "") << target;
      fs::current_path(start);
      fs::remove(link);
    }
    fs::create_symlink(out + "/results.jsonl", link);
    EXPECT_TRUE(holds(with(link), text(key, " and output.directory would both have ", link)));
    fs::remove(link);
    fs::remove(next);
  }
}

// A place that nobody can look at is no folder for that; the job says why it cannot be entered.
TEST(ConfigPlaces, OutputsOnABarredWayAreNoFolders) {
  const TemporaryFile file("model: {path: m}\ninput: {documents: [d]}\ntasks: [score]\n");
  const std::string loop = file.path().string() + ".loop";
  std::filesystem::create_symlink(loop, loop);
  const auto with = [&](std::vector<std::string> sets) {
    return message_of(Subcommand::kInfer, ConfigSources{file.path(), {}, std::move(sets)});
  };
  EXPECT_EQ(with({text("output.directory=", loop, "/out")}), "");
  EXPECT_EQ(with({text("output.directory=", loop, "/out"), text("run.log=", loop, "/log.jsonl")}), "");
  const std::string message = with({text("run.log=", loop, "/log.jsonl")});
  EXPECT_TRUE(holds(message, "output.directory is missing"));
  EXPECT_EQ(count_faults(message), 1) << message;
  std::filesystem::remove(loop);
}

// Rank 0 has looked when others get what it found well.
TEST(ConfigPlaces, PlacesAreLookedAtOnce) {
  const TemporaryFile file(
      "model: {path: m}\ninput: {documents: [d]}\ntasks: [score]\noutput: {directory: out}\nrun: {log: d}\n");
  ConfigSources sources{file.path(), {}, {}};
  EXPECT_TRUE(holds(message_of(Subcommand::kInfer, sources), "run.log and input.documents"));
  sources.look_at_places = LookAtPlaces::kNo;
  EXPECT_EQ(message_of(Subcommand::kInfer, sources), "");
}

}  // namespace
}  // namespace longhalo
