#include "app/infer.hpp"

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "app/agreed_model.hpp"
#include "app/answers.hpp"
#include "app/engine_setup.hpp"
#include "app/inputs.hpp"
#include "app/job_log.hpp"
#include "app/model_setup.hpp"
#include "app/plan.hpp"
#include "app/records.hpp"
#include "app/run_watch.hpp"
#include "app/share.hpp"
#include "app/signals.hpp"
#include "comm/shard_plan.hpp"
#include "core/clock.hpp"
#include "core/log.hpp"
#include "core/text.hpp"
#include "core/waiting.hpp"
#include "model/prefill.hpp"
#include "storage/results.hpp"
#include "storage/sha256.hpp"

namespace longhalo {
namespace {

IfResultsExist if_results_exist(IfExists choice) {
  switch (choice) {
    case IfExists::kError:
      return IfResultsExist::kError;
    case IfExists::kResume:
      return IfResultsExist::kResume;
    case IfExists::kReplace:
      return IfResultsExist::kReplace;
  }
  throw InvariantError("every choice of output.if_exists is known", std::source_location::current());
}

// What the records of each document depend on, beside task and prompt: the settings, and what was read.
ResultWriter::Settings settings_by_document(const Config& config, const AgreedModel& model,
                                            const Inputs& inputs, Precision precision) {
  const nlohmann::json all = nlohmann::json::parse(dump_json(config));
  const nlohmann::json chosen{
      {"model", all.at("model")},         {"model's files", model_fingerprint(config, model)},
      {"attention", all.at("attention")}, {"generate", all.at("generate")},
      {"embed", all.at("embed")},         {"system_prompt", all.at("input").at("system_prompt")},
      {"precision", name_of(precision)}};
  ResultWriter::Settings settings;
  for (int64_t i = 0; i < inputs.documents(); ++i)
    settings[inputs.document_key(i)] = sha256_of_text(chosen.dump() + inputs.fingerprint(i)).substr(0, 16);
  return settings;
}

// One job: what all documents share, and what is done with each of them.
class InferJob {
 public:
  InferJob(const MpiSession& session, const Config& config);
  ExitCode run();

 private:
  std::vector<int32_t> calibration() const;
  bool asked_to_stop() const;
  void read_document(int64_t index);
  Work remaining_work(int64_t index) const;
  void require_places() const;
  DocumentRun prefill_document(const Sequence& sequence, const Work& work,
                               std::unique_ptr<DocumentContext>& context, DocumentArrays& arrays);

  const MpiSession& session_;
  const Config& config_;
  int threads_;
  AttentionPattern pattern_;
  ModelConfig shape_;
  std::unique_ptr<Inputs> inputs_;         // rank 0
  std::unique_ptr<ResultWriter> results_;  // rank 0
  std::unique_ptr<RunLog> log_;            // rank 0 writes
  std::unique_ptr<Engine> engine_;
  MatmulRates rates_;  // of all ranks together
  std::unique_ptr<RunWatch> watch_;
  int64_t done_ = 0;  // documents of this run
  std::vector<float> scores_, embeddings_;
};

// Everything that can be wrong with the input is found here, before work begins and before output is touched.
InferJob::InferJob(const MpiSession& session, const Config& config)
    : session_(session),
      config_(config),
      threads_(use_threads(session, config)),
      pattern_(attention_pattern(config)) {
  const AgreedModel model = agreed_model(session, config);
  shape_ = model.shape;
  session.together([&] {
    if (session.is_root()) inputs_ = std::make_unique<Inputs>(config, shape_.vocabulary);
  });
  engine_ = make_engine(session, config, shape_, pattern_);
  require_job_log(session, config);
  session.together([&] {
    if (!session.is_root()) return;
    ResultWriter::Tasks tasks;
    for (const Task task : config.tasks)
      tasks.emplace(task_name(task));
    results_ = std::make_unique<ResultWriter>(
        config.output.directory, if_results_exist(config.output.if_exists),
        settings_by_document(config, model, *inputs_, engine_->precision()), std::move(tasks));
    require_places();
  });
  log_ = open_job_log(session, config, "infer", threads_, computing_of(*engine_));
  load_weights(session, config, *engine_, calibration());
  rates_ = measured_matmul_rates(session, *engine_);
  watch_ = std::make_unique<RunWatch>(session, config, "infer");
}

// The same whatever an earlier run of this job has done already.
std::vector<int32_t> InferJob::calibration() const {
  std::vector<int32_t> tokens;
  session_.together([&] {
    if (session_.is_root() && calibration_tokens(*engine_) > 0)
      tokens = inputs_->beginnings(calibration_tokens(*engine_));
  });
  return share_tokens(session_, std::move(tokens));
}

ExitCode InferJob::run() {
  const int64_t documents = broadcast_count(session_, session_.is_root() ? inputs_->documents() : 0);
  int64_t done = 0;
  for (; done < documents && !asked_to_stop(); ++done)
    read_document(done);
  session_.together([&] {
    if (session_.is_root()) results_->finish();
  });
  watch_->end();
  if (session_.is_root())
    log_info(done < documents ? text("stopped on request after ", done, " of ", documents,
                                     " documents; go on with output.if_exists: resume")
                              : text("done: ", config_.output.directory, "/results.jsonl"));
  return done < documents ? ExitCode::kRequeue : ExitCode::kDone;
}

// Between two documents: what is finished is recorded, so there is nothing else to save.
bool InferJob::asked_to_stop() const {
  return bits_of_ranks(session_, JobSignals::asked_to_stop() ? 1 : 0) != 0;
}

void InferJob::read_document(int64_t index) {
  at_work("document", index + 1);
  const Work work = share_work(session_, session_.is_root() ? remaining_work(index) : Work{});
  if (work.nothing()) return;

  Sequence sequence;
  session_.together([&] {
    if (session_.is_root()) sequence = inputs_->sequence(index, progress_options(session_, config_));
  });
  sequence = share_sequence(session_, std::move(sequence));

  std::unique_ptr<DocumentContext> context;
  DocumentArrays arrays;
  DocumentRun run = prefill_document(sequence, work, context, arrays);
  std::vector<Answer> answers;
  if (context) {
    const GenerateOptions options{config_.generate.max_new_tokens, config_.generate.temperature,
                                  config_.generate.top_p};
    answers = answer_prompts(session_, *engine_, *context, sequence, work, options,
                             progress_options(session_, config_));
  }
  run.finish(session_, *engine_);

  session_.together([&] {
    if (!session_.is_root()) return;
    const std::string& name = inputs_->document_name(index);
    if (work.score || work.embed) run.arrays_file = results_->write_arrays(name, arrays);
    const std::vector<nlohmann::json> records =
        make_records(inputs_->document_key(index), *inputs_, sequence, work, run, arrays, answers);
    results_->write(records);
    for (const nlohmann::json& record : records)
      log_->write("record", record);
    PrometheusText figures = watch_->figures();
    run.add_to(figures);
    figures.counter("longhalo_documents_total", "Documents that this run has done.", {},
                    static_cast<double>(++done_));
    watch_->publish(figures);
  });
}

// What an earlier run of this job has not recorded yet.
Work InferJob::remaining_work(int64_t index) const {
  const std::string& name = inputs_->document_key(index);
  const auto missing = [&](const std::string& query, Task task) {
    return !results_->recorded().contains({name, query, std::string(task_name(task))});
  };
  Work work;
  for (const Task task : config_.tasks) {
    if (task == Task::kScore) work.score = missing("", task);
    if (task == Task::kEmbed) work.embed = missing("", task);
    if (task != Task::kGenerate) continue;
    for (size_t i = 0; i < inputs_->prompt_keys().size(); ++i) {
      const std::string& prompt = inputs_->prompt_keys()[i];
      if (!missing(prompt, task)) continue;
      work.prompts.push_back(static_cast<int64_t>(i));
      work.seeds.push_back(seed_of_answer(config_.generate.seed, name, prompt));
    }
  }
  // Scores and embeddings of a document share one file: what it held, or should hold, is made with what is
  // missing.
  const auto has_or_wants = [&](Task task) {
    return std::count(config_.tasks.begin(), config_.tasks.end(), task) > 0 || !missing("", task) ||
           results_->lost().contains({name, "", std::string(task_name(task))});
  };
  if (work.score || work.embed) {
    work.score_array = has_or_wants(Task::kScore);
    work.embed_array = has_or_wants(Task::kEmbed);
  }
  return work;
}

void InferJob::require_places() const {
  bool has_work = false;
  std::vector<std::string> with_arrays;
  for (int64_t i = 0; i < inputs_->documents(); ++i) {
    const Work work = remaining_work(i);
    has_work = has_work || !work.nothing();
    if (work.score || work.embed) with_arrays.push_back(inputs_->document_name(i));
  }
  if (has_work) results_->require_places(with_arrays);
}

DocumentRun InferJob::prefill_document(const Sequence& sequence, const Work& work,
                                       std::unique_ptr<DocumentContext>& context, DocumentArrays& arrays) {
  const Stopwatch watch;
  const auto tokens = static_cast<int64_t>(sequence.tokens.size());
  // Of tokens done on this rank, shown as its share of the document.
  const auto show = [tokens](Progress& progress, int64_t done, int64_t total) {
    progress.set(static_cast<int64_t>(static_cast<double>(tokens) * static_cast<double>(done) /
                                      static_cast<double>(total)));
  };
  const Wanted wanted{work.prompts.empty() ? KeepContext::kNo : KeepContext::kYes, work.score_array,
                      work.embed_array ? config_.embed.chunk_tokens : 0};
  const ShardPlan shards = plan_shards(shape_, pattern_, tokens, session_.ranks());
  const JobPlan plan = plan_document(session_, *engine_, shards, config_.run.token_tile, rates_, wanted);
  session_.together([&] { plan.require_memory(); });
  if (session_.is_root()) log_info(plan.describe());

  const std::unique_ptr<Reading> reading = engine_->read(shards, plan.tile);
  {
    Progress progress("prefill", tokens, ProgressUnit::kTokens, progress_options(session_, config_));
    reading->prefill(sequence.tokens, wanted.context,
                     [&](int64_t done, int64_t total) { show(progress, done, total); });
  }
  context = reading->take_context();
  session_.together([&] { reading->require_finite(); });
  DocumentRun run = DocumentRun::of(session_, *watch_, *log_, reading->cost(), shape_, pattern_, rates_,
                                    shards, context.get(), watch.seconds());

  if (work.score_array) {
    Progress progress("scoring", tokens, ProgressUnit::kTokens, progress_options(session_, config_));
    scores_ =
        reading->scores(sequence.tokens, [&](int64_t done, int64_t total) { show(progress, done, total); });
  }
  if (work.embed_array)
    embeddings_ = reading->embeddings(config_.embed.chunk_tokens, sequence.document_begin);
  if (session_.is_root()) {
    const auto begin = static_cast<size_t>(sequence.document_begin);
    arrays.tokens = std::span(sequence.tokens).subspan(begin);
    if (work.score_array) {
      scores_ = document_scores(std::move(scores_), sequence.document_begin);
      arrays.scores = scores_;
    }
    if (work.embed_array) arrays.embeddings = embeddings_;
    arrays.embedding_size = shape_.hidden;
  }
  run.total_seconds = watch.seconds();
  return run;
}

}  // namespace

ExitCode run_infer(const MpiSession& session, const Config& config) {
  const JobSignals signals(session.is_root() ? Say::kYes : Say::kNo);
  return InferJob(session, config).run();
}

}  // namespace longhalo
