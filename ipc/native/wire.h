// The messages between runtime and stub, and between shim and launcher. Made of the tables in ipc/messages.py and
// runtime/triton/messages.py, which say what they are for: `python -m moonpool.runtime.triton.wire_header`.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "codec.h"
#include "msgpack.h"

namespace moonpool::wire {

enum class Side : uint8_t {
  RUNTIME = 1,
  STUB = 2,
};

enum class End : uint8_t {
  SHIM = 1,
  LAUNCHER = 2,
};

enum class Kind : uint8_t {
  START = 1,  // start
  COMPLETED = 2,  // config, is_fresh
  LOADED = 3,  // facts
  FAILED = 4,  // stage, message, traceback
  EXECUTE = 5,  // batch, core, released, blocks, layout, details, targets
  ANSWER = 6,  // batch, core, held, released, blocks, layout, remarks, states
  FINALIZE = 7,
  FINALIZED = 8,  // message, traceback
  CONFINED = 10,  // version, layers, left_out
  SLEEP = 50,
  SLEPT = 51,  // message, traceback
  WAKE = 52,
  WOKEN = 53,  // message, traceback
  INDIRECT = 9,  // region, offset, size
  SANDBOX = 15,  // policy
  REGION = 16,  // region, size, writer, device, handle
  GROW = 17,  // size, device
  REFUSED = 18,  // reason
  RELEASE = 19,  // places
  RETIRE = 20,  // region
  LOG = 21,  // level, message, file, line
  RESPONSES = 22,  // responses
  CANCEL = 23,  // batch, index
  METRICS = 24,  // changes, dropped
  LOGGING = 25,  // info, warning, error, verbose
  READY = 26,  // question
  READINESS = 27,  // question, reason
  LENT_REGION = 40,  // region, size
  EVENT = 48,  // device, handle
  DENIALS = 49,  // denials
  SLOTS = 54,
  INFER = 30,  // call, model, version, decoupled, timeout_us, released, blocks, inputs, outputs, details
  REPLY = 31,  // call, final, released, blocks, outputs, parameters, error
  WITHDRAW = 32,  // call
  LET_GO = 33,  // places
  LOAD_MODEL = 34,  // call, model, config, files
  UNLOAD_MODEL = 35,  // call, model, dependents
  IS_MODEL_READY = 36,  // call, model, version
  DONE = 37,  // call, error, values
  NEW_METRIC = 38,  // call, name, description, metric_kind, labels, buckets
  METRIC_VALUE = 39,  // call, metric
  CANCEL_CALL = 43,  // call
  FORK = 45,  // name
  REAP = 46,  // pid
  EXITED = 47,  // pid, code
};

enum class Word : uint8_t {
  LONG = 60,  // size
  BACKEND = 61,  // name, directory, config, server
  LOGGING = 62,  // info, warning, error, verbose
  MODEL = 63,  // model, name, version, directory, config, completes
  INSTANCE = 64,  // instance, model, name, kind, device
  LOST = 65,  // instance, generation, is_executing, is_shortage, why
  OVERDUE = 66,  // instance, generation
  END = 67,  // instance
  END_MODEL = 68,  // model
  RENEW = 69,  // instance, generation, served
  MEMORY = 70,  // question, instance, generation, writer, region, present, needed
  SCRUB = 71,  // question, model, text
  RETURNED = 72,  // instance, generation, writer, region
  HELLO = 80,  // version, protocol, moonpool, pid
  MODEL_READY = 81,  // model, config, reschedules, max_batch_size, inputs, outputs, execute_timeout_ms, is_private, log_lines_per_s, recycle_requests, may_ask, is_decoupled
  REFUSED = 82,  // number, code, message
  STARTED = 83,  // instance, generation, has_is_ready, sandbox
  DIED = 85,  // instance, generation, code, message, restarts_in_ms
  ENDED = 86,  // number
  NOTE = 88,  // level, message, file, line
  BORN = 89,  // instance, generation, pid, request_region, request_size, response_region, response_size
  GROWN = 90,  // instance, generation
  SET_ASIDE = 91,  // question, size
  SCRUBBED = 92,  // question, text
};

constexpr uint64_t kCounter = 0;
constexpr uint64_t kGauge = 1;
constexpr uint64_t kHistogram = 2;
constexpr uint64_t kIncrement = 0;
constexpr uint64_t kSet = 1;
constexpr uint64_t kObserve = 2;
constexpr uint64_t kProtocolVersion = 9;
constexpr uint64_t kMaxDims = 32;
constexpr uint64_t kMaxDevices = 4096;
constexpr int64_t kNoDevice = -1;
constexpr uint64_t kHandleBytes = 64;
constexpr uint64_t kMaxBatch = 65536;
constexpr uint64_t kMaxPlaces = 1048576;
constexpr uint64_t kMaxPlacesInPacket = 1024;
constexpr uint64_t kMaxMetricChanges = 256;
constexpr uint64_t kMaxObservations = 1048576;
constexpr uint64_t kMaxMetricParts = 65536;
constexpr uint64_t kLong = 1048576;
constexpr uint64_t kShort = 4096;
constexpr uint64_t kMaxParameters = 4096;
constexpr uint64_t kMaxTensors = 65536;
constexpr uint64_t kMaxFiles = 65536;
constexpr uint64_t kMaxFileBytes = 2147483648;
constexpr uint64_t kLargestConfig = 4194304;
constexpr uint64_t kMaxStoredBytes = 67108864;
constexpr uint64_t kMaxCallBytes = 16777216;
constexpr uint64_t kAnyMemory = 0;
constexpr uint64_t kOrdinaryMemory = 1;
constexpr uint64_t kDeviceMemory = 2;
constexpr uint64_t kNoCore = 127;
constexpr uint64_t kAnswered = 0;
constexpr uint64_t kOpen = 1;
constexpr uint64_t kRescheduled = 2;
constexpr uint64_t kFinal = 1;
constexpr uint64_t kAgain = 2;
constexpr uint64_t kMaxResponsesInPacket = 64;
constexpr uint64_t kMaxCalls = 4096;
constexpr uint64_t kLauncherVersion = 6;
constexpr uint64_t kMaxMessageBytes = 67108864;
constexpr uint64_t kFirstRegion = 4294967296;
constexpr uint64_t kMessagesPerS = 20000;
constexpr uint64_t kMessageBytes = 512;
constexpr uint64_t kPauseMs = 20;
constexpr uint64_t kObservationsPerMessage = 100;
constexpr uint64_t kMaxMetrics = 10000;
constexpr uint64_t kMetricsCharacters = 16777216;
constexpr uint64_t kMetricPartCharacters = 64;
constexpr uint64_t kModelMetricsCharacters = 67108864;
constexpr uint64_t kLogLineBytes = 8192;
constexpr uint64_t kMaxTasks = 64;
constexpr uint64_t kCopiedBytes = 67108864;
constexpr uint64_t kCopiedLoadsBytes = 1073741824;
constexpr uint64_t kJsonFactor = 20;
constexpr uint64_t kKeepMs = 5000;
constexpr uint64_t kKeepFirstMs = 60000;
constexpr uint64_t kUnreadBytes = 67108864;
constexpr uint64_t kUnreadAnswerBytes = 64;
constexpr uint64_t kLongestError = 65536;
constexpr uint64_t kReleaseAt = 64;
constexpr uint64_t kShortMessage = 7000;
constexpr uint64_t kMaxPacketBytes = 32768;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kLargestClass = 1048576;
constexpr uint64_t kMaxElements = 576460752303423488;
constexpr uint64_t kLengthBytes = 4;
constexpr uint64_t kBytes = 13;
// Bytes that an element takes, by its datatype; 0 for BYTES, and for 0, which is none.
constexpr std::array<uint8_t, 15> kItemBytes = {0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 0, 2};
// Characters that a line of the log shows as escapes, from the first to the last.
constexpr std::array<std::array<uint32_t, 2>, 7> kShownCodes = {{{0, 8}, {10, 31}, {127, 159}, {1564, 1564}, {8206, 8207}, {8232, 8238}, {8294, 8303}}};
constexpr uint64_t kFork = 6;
constexpr std::array<std::string_view, 9> kDenialWords = {"read", "write to", "make a socket of", "listen at", "connect to", "find the address of", "start a process", "start the program", "signal process"};
constexpr std::array<std::string_view, 9> kDenialOptions = {"MOONPOOL_SANDBOX_PATHS would allow it", "MOONPOOL_SANDBOX_PATHS would allow it", "no option allows it", "no option allows it", "MOONPOOL_SANDBOX_PORTS would allow it", "MOONPOOL_SANDBOX_PORTS would allow it", "MOONPOOL_SANDBOX_SYSCALLS=fork would allow it", "MOONPOOL_SANDBOX_SYSCALLS=fork,execve would allow it", "no option allows it"};
static_assert(kMaxValues == 2097152, "as in ipc/codec.py");

// How many messages one counts as, beside its size.
constexpr double cost_of(Kind kind) {
  switch (kind) {
    case Kind::GROW: return 100;
    case Kind::LOAD_MODEL: return 20;
    case Kind::UNLOAD_MODEL: return 20;
    case Kind::IS_MODEL_READY: return 20;
    default: return 1;
  }
}

struct Place {
  uint64_t region{};
  uint64_t offset{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, region, offset);
  }
  void write(Writer& writer) const {
    writer.array(2);
    write_all(writer, region, offset);
  }
};

struct Block {
  uint64_t region{};
  uint64_t offset{};
  uint64_t size{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, region, offset, size);
  }
  void write(Writer& writer) const {
    writer.array(3);
    write_all(writer, region, offset, size);
  }
};

struct Details {
  std::string_view request_id{};
  Value correlation_id{};
  uint64_t flags{};
  uint64_t timeout_us{};
  uint64_t priority{};
  std::optional<Entries> parameters{};
  std::optional<List<uint64_t>> outputs{};
  std::optional<std::string_view> trace{};
  uint64_t memory{};
  uint64_t device{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, request_id, correlation_id, flags, timeout_us, priority, parameters, outputs, trace, memory, device);
  }
};

struct Target {
  uint64_t request{};
  uint64_t output{};
  uint64_t region{};
  uint64_t offset{};
  uint64_t size{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, request, output, region, offset, size);
  }
  void write(Writer& writer) const {
    writer.array(5);
    write_all(writer, request, output, region, offset, size);
  }
};

struct Error {
  uint64_t code{};
  std::string_view message{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, code, message);
  }
  void write(Writer& writer) const {
    writer.array(2);
    write_all(writer, code, message);
  }
};

struct Remarks {
  std::optional<Entries> parameters{};
  std::optional<Error> error{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, parameters, error);
  }
};

struct Response {
  uint64_t batch{};
  uint64_t index{};
  uint64_t flags{};
  List<Block> blocks{};
  std::optional<Raw> layout{};
  std::optional<Remarks> remarks{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, batch, index, flags, blocks, layout, remarks);
  }
};

struct MetricsChanges {
  uint64_t metric{};
  uint64_t operation{};
  double value{};
  uint64_t count{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, metric, operation, value, count);
  }
  void write(Writer& writer) const {
    writer.array(4);
    write_all(writer, metric, operation, value, count);
  }
};

struct DenialsDenials {
  uint64_t what{};
  uint64_t count{};
  std::string_view text{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, what, count, text);
  }
  void write(Writer& writer) const {
    writer.array(3);
    write_all(writer, what, count, text);
  }
};

struct NamedTensor {
  std::string_view name{};
  uint64_t datatype{};
  List<uint64_t> shape{};
  uint64_t block{};
  uint64_t offset{};
  uint64_t size{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, name, datatype, shape, block, offset, size);
  }
};

struct InferDetails {
  std::string_view request_id{};
  Value correlation_id{};
  uint64_t flags{};
  std::optional<Entries> parameters{};
  std::optional<std::string_view> trace{};
  uint64_t memory{};
  uint64_t device{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, request_id, correlation_id, flags, parameters, trace, memory, device);
  }
};

struct LoadModelFiles {
  std::string_view path{};
  Raw contents{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, path, contents);
  }
  void write(Writer& writer) const {
    writer.array(2);
    write_all(writer, path, contents);
  }
};

struct NewMetricLabels {
  std::string_view name{};
  std::string_view value{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, name, value);
  }
  void write(Writer& writer) const {
    writer.array(2);
    write_all(writer, name, value);
  }
};

struct Tensor {
  uint64_t index{};
  uint64_t datatype{};
  List<uint64_t> shape{};
  uint64_t block{};
  uint64_t offset{};
  uint64_t size{};
  void read(Reader& reader) {
    reader.array();
    read_all(reader, index, datatype, shape, block, offset, size);
  }
};

struct Confined {
  uint64_t version{};
  List<std::string_view> layers{};
  List<std::string_view> left_out{};
  explicit Confined(Reader reader) { read_all(reader, version, layers, left_out); }
};

struct Completed {
  std::string_view config{};
  bool is_fresh{};
  explicit Completed(Reader reader) { read_all(reader, config, is_fresh); }
};

struct Loaded {
  Entries facts{};
  explicit Loaded(Reader reader) { read_all(reader, facts); }
};

struct Failed {
  std::string_view stage{};
  std::string_view message{};
  std::string_view traceback{};
  explicit Failed(Reader reader) { read_all(reader, stage, message, traceback); }
};

struct Execute {
  uint64_t batch{};
  uint64_t core{};
  List<Place> released{};
  List<Block> blocks{};
  Raw layout{};
  std::optional<List<std::optional<Details>>> details{};
  std::optional<List<Target>> targets{};
  explicit Execute(Reader reader) { read_all(reader, batch, core, released, blocks, layout, details, targets); }
};

struct Answer {
  uint64_t batch{};
  uint64_t core{};
  List<Place> held{};
  List<Place> released{};
  List<Block> blocks{};
  Raw layout{};
  std::optional<List<std::optional<Remarks>>> remarks{};
  std::optional<List<uint64_t>> states{};
  explicit Answer(Reader reader) { read_all(reader, batch, core, held, released, blocks, layout, remarks, states); }
};

struct Slept {
  std::string_view message{};
  std::string_view traceback{};
  explicit Slept(Reader reader) { read_all(reader, message, traceback); }
};

struct Woken {
  std::string_view message{};
  std::string_view traceback{};
  explicit Woken(Reader reader) { read_all(reader, message, traceback); }
};

struct Finalized {
  std::string_view message{};
  std::string_view traceback{};
  explicit Finalized(Reader reader) { read_all(reader, message, traceback); }
};

struct Indirect {
  uint64_t region{};
  uint64_t offset{};
  uint64_t size{};
  explicit Indirect(Reader reader) { read_all(reader, region, offset, size); }
};

struct Grow {
  uint64_t size{};
  int64_t device{};
  explicit Grow(Reader reader) { read_all(reader, size, device); }
};

struct Event {
  uint64_t device{};
  Raw handle{};
  explicit Event(Reader reader) { read_all(reader, device, handle); }
};

struct Release {
  List<Place> places{};
  explicit Release(Reader reader) { read_all(reader, places); }
};

struct Retire {
  uint64_t region{};
  explicit Retire(Reader reader) { read_all(reader, region); }
};

struct Log {
  uint64_t level{};
  std::string_view message{};
  std::string_view file{};
  uint64_t line{};
  explicit Log(Reader reader) { read_all(reader, level, message, file, line); }
};

struct Responses {
  List<Response> responses{};
  explicit Responses(Reader reader) { read_all(reader, responses); }
};

struct Metrics {
  List<MetricsChanges> changes{};
  List<uint64_t> dropped{};
  explicit Metrics(Reader reader) { read_all(reader, changes, dropped); }
};

struct Denials {
  List<DenialsDenials> denials{};
  explicit Denials(Reader reader) { read_all(reader, denials); }
};

struct Readiness {
  uint64_t question{};
  std::optional<std::string_view> reason{};
  explicit Readiness(Reader reader) { read_all(reader, question, reason); }
};

struct Exited {
  uint64_t pid{};
  int64_t code{};
  explicit Exited(Reader reader) { read_all(reader, pid, code); }
};

struct Infer {
  uint64_t call{};
  std::string_view model{};
  int64_t version{};
  bool decoupled{};
  uint64_t timeout_us{};
  List<Place> released{};
  List<Block> blocks{};
  List<NamedTensor> inputs{};
  List<std::string_view> outputs{};
  std::optional<InferDetails> details{};
  explicit Infer(Reader reader) { read_all(reader, call, model, version, decoupled, timeout_us, released, blocks, inputs, outputs, details); }
};

struct CancelCall {
  uint64_t call{};
  explicit CancelCall(Reader reader) { read_all(reader, call); }
};

struct Withdraw {
  uint64_t call{};
  explicit Withdraw(Reader reader) { read_all(reader, call); }
};

struct LetGo {
  List<Place> places{};
  explicit LetGo(Reader reader) { read_all(reader, places); }
};

struct LoadModel {
  uint64_t call{};
  std::string_view model{};
  std::string_view config{};
  std::optional<List<LoadModelFiles>> files{};
  explicit LoadModel(Reader reader) { read_all(reader, call, model, config, files); }
};

struct UnloadModel {
  uint64_t call{};
  std::string_view model{};
  bool dependents{};
  explicit UnloadModel(Reader reader) { read_all(reader, call, model, dependents); }
};

struct IsModelReady {
  uint64_t call{};
  std::string_view model{};
  std::string_view version{};
  explicit IsModelReady(Reader reader) { read_all(reader, call, model, version); }
};

struct NewMetric {
  uint64_t call{};
  std::string_view name{};
  std::string_view description{};
  uint64_t metric_kind{};
  std::optional<List<NewMetricLabels>> labels{};
  std::optional<List<double>> buckets{};
  explicit NewMetric(Reader reader) { read_all(reader, call, name, description, metric_kind, labels, buckets); }
};

struct MetricValue {
  uint64_t call{};
  uint64_t metric{};
  explicit MetricValue(Reader reader) { read_all(reader, call, metric); }
};

struct Long {
  uint64_t size{};
  explicit Long(Reader reader) { read_all(reader, size); }
};

struct ModelReady {
  uint64_t model{};
  std::optional<std::string_view> config{};
  bool reschedules{};
  uint64_t max_batch_size{};
  List<std::string_view> inputs{};
  List<std::string_view> outputs{};
  std::optional<uint64_t> execute_timeout_ms{};
  bool is_private{};
  uint64_t log_lines_per_s{};
  std::optional<uint64_t> recycle_requests{};
  std::optional<List<std::string_view>> may_ask{};
  bool is_decoupled{};
  explicit ModelReady(Reader reader) { read_all(reader, model, config, reschedules, max_batch_size, inputs, outputs, execute_timeout_ms, is_private, log_lines_per_s, recycle_requests, may_ask, is_decoupled); }
};

struct Refused {
  uint64_t number{};
  uint64_t code{};
  std::string_view message{};
  explicit Refused(Reader reader) { read_all(reader, number, code, message); }
};

struct Born {
  uint64_t instance{};
  uint64_t generation{};
  uint64_t pid{};
  uint64_t request_region{};
  uint64_t request_size{};
  uint64_t response_region{};
  uint64_t response_size{};
  explicit Born(Reader reader) { read_all(reader, instance, generation, pid, request_region, request_size, response_region, response_size); }
};

struct Started {
  uint64_t instance{};
  uint64_t generation{};
  bool has_is_ready{};
  std::string_view sandbox{};
  explicit Started(Reader reader) { read_all(reader, instance, generation, has_is_ready, sandbox); }
};

struct SetAside {
  uint64_t question{};
  uint64_t size{};
  explicit SetAside(Reader reader) { read_all(reader, question, size); }
};

struct Scrubbed {
  uint64_t question{};
  std::string_view text{};
  explicit Scrubbed(Reader reader) { read_all(reader, question, text); }
};

struct Grown {
  uint64_t instance{};
  uint64_t generation{};
  explicit Grown(Reader reader) { read_all(reader, instance, generation); }
};

struct Died {
  uint64_t instance{};
  uint64_t generation{};
  uint64_t code{};
  std::string_view message{};
  std::optional<uint64_t> restarts_in_ms{};
  explicit Died(Reader reader) { read_all(reader, instance, generation, code, message, restarts_in_ms); }
};

struct Ended {
  uint64_t number{};
  explicit Ended(Reader reader) { read_all(reader, number); }
};

struct Hello {
  uint64_t version{};
  uint64_t protocol{};
  std::string_view moonpool{};
  uint64_t pid{};
  explicit Hello(Reader reader) { read_all(reader, version, protocol, moonpool, pid); }
};

struct Note {
  uint64_t level{};
  std::string_view message{};
  std::string_view file{};
  uint64_t line{};
  explicit Note(Reader reader) { read_all(reader, level, message, file, line); }
};

inline constexpr Spec kSpecs[] = {
    {"version", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"layers", Type::kList, false, 3, 1, 0, 64u},
    {"left_out", Type::kList, false, 4, 1, 0, 64u},
    {"", Type::kText, false, 0, 0, 0, 256u},
    {"", Type::kText, false, 0, 0, 0, 4096u},
    {"start", Type::kText, false, 0, 0, 0, 268435456u},
    {"config", Type::kText, false, 0, 0, 0, 4194304u},
    {"is_fresh", Type::kFlag, false, 0, 0, 0, 0u},
    {"facts", Type::kTable, false, 0, 0, 0, 64u},
    {"stage", Type::kText, false, 0, 0, 0, 64u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"traceback", Type::kText, false, 0, 0, 0, 1048576u},
    {"batch", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"core", Type::kInt, false, 0, 0, 0, 127u},
    {"released", Type::kList, false, 19, 1, 0, 1048576u},
    {"blocks", Type::kList, false, 22, 1, 0, 131072u},
    {"layout", Type::kRaw, false, 0, 0, 0, 268435456u},
    {"details", Type::kList, true, 26, 1, 0, 65536u},
    {"targets", Type::kList, true, 40, 1, 0, 65536u},
    {"", Type::kRow, false, 20, 2, 0, 0u},
    {"region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"offset", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"", Type::kRow, false, 23, 3, 0, 0u},
    {"region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"offset", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"", Type::kRow, true, 27, 10, 0, 0u},
    {"request_id", Type::kText, false, 0, 0, 0, 1048576u},
    {"correlation_id", Type::kOneOf, false, 37, 2, 0, 0u},
    {"flags", Type::kInt, false, 0, 0, 0, 4294967295u},
    {"timeout_us", Type::kInt, false, 0, 0, 0, 18446744073709551615u},
    {"priority", Type::kInt, false, 0, 0, 0, 18446744073709551615u},
    {"parameters", Type::kTable, true, 0, 0, 0, 4096u},
    {"outputs", Type::kList, true, 39, 1, 0, 65536u},
    {"trace", Type::kText, true, 0, 0, 0, 4096u},
    {"memory", Type::kInt, false, 0, 0, 0, 2u},
    {"device", Type::kInt, false, 0, 0, 0, 4095u},
    {"", Type::kInt, false, 0, 0, 0, 18446744073709551615u},
    {"", Type::kText, false, 0, 0, 0, 4096u},
    {"", Type::kInt, false, 0, 0, 0, 65535u},
    {"", Type::kRow, false, 41, 5, 0, 0u},
    {"request", Type::kInt, false, 0, 0, 0, 65535u},
    {"output", Type::kInt, false, 0, 0, 0, 65535u},
    {"region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"offset", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"batch", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"core", Type::kInt, false, 0, 0, 0, 127u},
    {"held", Type::kList, false, 19, 1, 0, 1048576u},
    {"released", Type::kList, false, 19, 1, 0, 1048576u},
    {"blocks", Type::kList, false, 22, 1, 0, 131072u},
    {"layout", Type::kRaw, false, 0, 0, 0, 268435456u},
    {"remarks", Type::kList, true, 54, 1, 0, 65536u},
    {"states", Type::kList, true, 59, 1, 0, 65536u},
    {"", Type::kRow, true, 55, 2, 0, 0u},
    {"parameters", Type::kTable, true, 0, 0, 0, 4096u},
    {"error", Type::kRow, true, 57, 2, 0, 0u},
    {"code", Type::kInt, false, 0, 0, 0, 7u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"", Type::kInt, false, 0, 0, 0, 2u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"traceback", Type::kText, false, 0, 0, 0, 1048576u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"traceback", Type::kText, false, 0, 0, 0, 1048576u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"traceback", Type::kText, false, 0, 0, 0, 1048576u},
    {"policy", Type::kText, false, 0, 0, 0, 65536u},
    {"region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"writer", Type::kInt, false, 0, 0, 1, 2u},
    {"device", Type::kInt, false, 0, 0, -1, 4095u},
    {"handle", Type::kRaw, false, 0, 0, 0, 64u},
    {"region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"device", Type::kInt, false, 0, 0, -1, 4095u},
    {"device", Type::kInt, false, 0, 0, 0, 4095u},
    {"handle", Type::kRaw, false, 0, 0, 0, 64u},
    {"reason", Type::kText, false, 0, 0, 0, 4096u},
    {"places", Type::kList, false, 19, 1, 0, 1024u},
    {"region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"level", Type::kInt, false, 0, 0, 0, 3u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"file", Type::kText, false, 0, 0, 0, 4096u},
    {"line", Type::kInt, false, 0, 0, 0, 2147483648u},
    {"responses", Type::kList, false, 86, 1, 0, 64u},
    {"", Type::kRow, false, 87, 6, 0, 0u},
    {"batch", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"index", Type::kInt, false, 0, 0, 0, 65535u},
    {"flags", Type::kInt, false, 0, 0, 0, 2u},
    {"blocks", Type::kList, false, 22, 1, 0, 131072u},
    {"layout", Type::kRaw, true, 0, 0, 0, 268435456u},
    {"remarks", Type::kRow, true, 55, 2, 0, 0u},
    {"batch", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"index", Type::kInt, false, 0, 0, 0, 65535u},
    {"changes", Type::kList, false, 97, 1, 0, 256u},
    {"dropped", Type::kList, false, 102, 1, 0, 256u},
    {"", Type::kRow, false, 98, 4, 0, 0u},
    {"metric", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"operation", Type::kInt, false, 0, 0, 0, 2u},
    {"value", Type::kReal, false, 0, 0, 0, 0u},
    {"count", Type::kInt, false, 0, 0, 1, 1048576u},
    {"", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"denials", Type::kList, false, 104, 1, 0, 17u},
    {"", Type::kRow, false, 105, 3, 0, 0u},
    {"what", Type::kInt, false, 0, 0, 0, 8u},
    {"count", Type::kInt, false, 0, 0, 1, 4294967295u},
    {"text", Type::kText, false, 0, 0, 0, 1024u},
    {"info", Type::kFlag, false, 0, 0, 0, 0u},
    {"warning", Type::kFlag, false, 0, 0, 0, 0u},
    {"error", Type::kFlag, false, 0, 0, 0, 0u},
    {"verbose", Type::kFlag, false, 0, 0, 0, 0u},
    {"question", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"question", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"reason", Type::kText, true, 0, 0, 0, 4096u},
    {"name", Type::kText, false, 0, 0, 0, 4096u},
    {"pid", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"pid", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"code", Type::kInt, false, 0, 0, -255, 255u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"model", Type::kText, false, 0, 0, 0, 1048576u},
    {"version", Type::kInt, false, 0, 0, -1, 9223372036854775807u},
    {"decoupled", Type::kFlag, false, 0, 0, 0, 0u},
    {"timeout_us", Type::kInt, false, 0, 0, 0, 18446744073709551615u},
    {"released", Type::kList, false, 19, 1, 0, 1048576u},
    {"blocks", Type::kList, false, 22, 1, 0, 131072u},
    {"inputs", Type::kList, false, 129, 1, 0, 65536u},
    {"outputs", Type::kList, false, 137, 1, 0, 65536u},
    {"details", Type::kRow, true, 138, 7, 0, 0u},
    {"", Type::kRow, false, 130, 6, 0, 0u},
    {"name", Type::kText, false, 0, 0, 0, 1048576u},
    {"datatype", Type::kInt, false, 0, 0, 1, 14u},
    {"shape", Type::kList, false, 136, 1, 0, 32u},
    {"block", Type::kInt, false, 0, 0, 0, 131072u},
    {"offset", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"", Type::kText, false, 0, 0, 0, 1048576u},
    {"request_id", Type::kText, false, 0, 0, 0, 1048576u},
    {"correlation_id", Type::kOneOf, false, 145, 2, 0, 0u},
    {"flags", Type::kInt, false, 0, 0, 0, 4294967295u},
    {"parameters", Type::kTable, true, 0, 0, 0, 4096u},
    {"trace", Type::kText, true, 0, 0, 0, 4096u},
    {"memory", Type::kInt, false, 0, 0, 0, 2u},
    {"device", Type::kInt, false, 0, 0, 0, 4095u},
    {"", Type::kInt, false, 0, 0, 0, 18446744073709551615u},
    {"", Type::kText, false, 0, 0, 0, 4096u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"final", Type::kFlag, false, 0, 0, 0, 0u},
    {"released", Type::kList, false, 19, 1, 0, 1048576u},
    {"blocks", Type::kList, false, 22, 1, 0, 131072u},
    {"outputs", Type::kList, false, 129, 1, 0, 65536u},
    {"parameters", Type::kTable, true, 0, 0, 0, 4096u},
    {"error", Type::kRow, true, 57, 2, 0, 0u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"places", Type::kList, false, 19, 1, 0, 1024u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"model", Type::kText, false, 0, 0, 0, 4096u},
    {"config", Type::kText, false, 0, 0, 0, 4194304u},
    {"files", Type::kList, true, 160, 1, 0, 65536u},
    {"", Type::kRow, false, 161, 2, 0, 0u},
    {"path", Type::kText, false, 0, 0, 0, 1048576u},
    {"contents", Type::kRaw, false, 0, 0, 0, 2147483648u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"model", Type::kText, false, 0, 0, 0, 4096u},
    {"dependents", Type::kFlag, false, 0, 0, 0, 0u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"model", Type::kText, false, 0, 0, 0, 4096u},
    {"version", Type::kText, false, 0, 0, 0, 4096u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"name", Type::kText, false, 0, 0, 0, 1048576u},
    {"description", Type::kText, false, 0, 0, 0, 1048576u},
    {"metric_kind", Type::kInt, false, 0, 0, 0, 2u},
    {"labels", Type::kList, true, 175, 1, 0, 65536u},
    {"buckets", Type::kList, true, 178, 1, 0, 65536u},
    {"", Type::kRow, false, 176, 2, 0, 0u},
    {"name", Type::kText, false, 0, 0, 0, 1048576u},
    {"value", Type::kText, false, 0, 0, 0, 1048576u},
    {"", Type::kReal, false, 0, 0, 0, 0u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"metric", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"call", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"error", Type::kRow, true, 57, 2, 0, 0u},
    {"values", Type::kTable, false, 0, 0, 0, 64u},
    {"size", Type::kInt, false, 0, 0, 1, 67108864u},
    {"name", Type::kText, false, 0, 0, 0, 4096u},
    {"directory", Type::kText, false, 0, 0, 0, 4096u},
    {"config", Type::kText, false, 0, 0, 0, 16777216u},
    {"server", Type::kText, false, 0, 0, 0, 4096u},
    {"info", Type::kFlag, false, 0, 0, 0, 0u},
    {"warning", Type::kFlag, false, 0, 0, 0, 0u},
    {"error", Type::kFlag, false, 0, 0, 0, 0u},
    {"verbose", Type::kFlag, false, 0, 0, 0, 0u},
    {"model", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"name", Type::kText, false, 0, 0, 0, 4096u},
    {"version", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"directory", Type::kText, false, 0, 0, 0, 4096u},
    {"config", Type::kText, false, 0, 0, 0, 16777216u},
    {"completes", Type::kFlag, false, 0, 0, 0, 0u},
    {"model", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"config", Type::kText, true, 0, 0, 0, 16777216u},
    {"reschedules", Type::kFlag, false, 0, 0, 0, 0u},
    {"max_batch_size", Type::kInt, false, 0, 0, 0, 2147483647u},
    {"inputs", Type::kList, false, 211, 1, 0, 65536u},
    {"outputs", Type::kList, false, 211, 1, 0, 65536u},
    {"execute_timeout_ms", Type::kInt, true, 0, 0, 0, 9223372036854775807u},
    {"is_private", Type::kFlag, false, 0, 0, 0, 0u},
    {"log_lines_per_s", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"recycle_requests", Type::kInt, true, 0, 0, 1, 9223372036854775807u},
    {"may_ask", Type::kList, true, 211, 1, 0, 4096u},
    {"is_decoupled", Type::kFlag, false, 0, 0, 0, 0u},
    {"", Type::kText, false, 0, 0, 0, 4096u},
    {"number", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"code", Type::kInt, false, 0, 0, 0, 7u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"model", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"name", Type::kText, false, 0, 0, 0, 4096u},
    {"kind", Type::kText, false, 0, 0, 0, 16u},
    {"device", Type::kInt, false, 0, 0, 0, 65535u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"pid", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"request_region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"request_size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"response_region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"response_size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"has_is_ready", Type::kFlag, false, 0, 0, 0, 0u},
    {"sandbox", Type::kText, false, 0, 0, 0, 1048576u},
    {"question", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"writer", Type::kInt, false, 0, 0, 1, 2u},
    {"region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"present", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"needed", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"writer", Type::kInt, false, 0, 0, 1, 2u},
    {"region", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"question", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"size", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"question", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"model", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"text", Type::kText, false, 0, 0, 0, 1048576u},
    {"question", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"text", Type::kText, false, 0, 0, 0, 1048576u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"is_executing", Type::kFlag, false, 0, 0, 0, 0u},
    {"is_shortage", Type::kFlag, false, 0, 0, 0, 0u},
    {"why", Type::kText, false, 0, 0, 0, 1048576u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"served", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"generation", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"code", Type::kInt, false, 0, 0, 0, 7u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"restarts_in_ms", Type::kInt, true, 0, 0, 0, 9223372036854775807u},
    {"instance", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"model", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"number", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"version", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"protocol", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"moonpool", Type::kText, false, 0, 0, 0, 64u},
    {"pid", Type::kInt, false, 0, 0, 1, 9223372036854775807u},
    {"level", Type::kInt, false, 0, 0, 0, 3u},
    {"message", Type::kText, false, 0, 0, 0, 1048576u},
    {"file", Type::kText, false, 0, 0, 0, 4096u},
    {"line", Type::kInt, false, 0, 0, 0, 2147483648u},
    {"", Type::kList, false, 278, 1, 0, 65536u},
    {"", Type::kList, false, 279, 1, 0, 65536u},
    {"", Type::kRow, false, 280, 6, 0, 0u},
    {"index", Type::kInt, false, 0, 0, 0, 65535u},
    {"datatype", Type::kInt, false, 0, 0, 1, 14u},
    {"shape", Type::kList, false, 136, 1, 0, 32u},
    {"block", Type::kInt, false, 0, 0, 0, 131072u},
    {"offset", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
    {"size", Type::kInt, false, 0, 0, 0, 9223372036854775807u},
};

constexpr Table<Kind, 14> kWork = {{{
    {"CONFINED", 10, 2, 0, 3},
    {"START", 1, 1, 5, 1},
    {"COMPLETED", 2, 2, 6, 2},
    {"LOADED", 3, 2, 8, 1},
    {"FAILED", 4, 2, 9, 3},
    {"EXECUTE", 5, 1, 12, 7},
    {"ANSWER", 6, 2, 46, 8},
    {"SLEEP", 50, 1, 60, 0},
    {"SLEPT", 51, 2, 60, 2},
    {"WAKE", 52, 1, 60, 0},
    {"WOKEN", 53, 2, 62, 2},
    {"FINALIZE", 7, 1, 60, 0},
    {"FINALIZED", 8, 2, 64, 2},
    {"INDIRECT", 9, 0, 23, 3},
}}, kSpecs};

constexpr Table<Kind, 21> kControl = {{{
    {"SANDBOX", 15, 1, 66, 1},
    {"REGION", 16, 1, 67, 5},
    {"SLOTS", 54, 1, 60, 0},
    {"LENT_REGION", 40, 1, 72, 2},
    {"GROW", 17, 2, 74, 2},
    {"EVENT", 48, 0, 76, 2},
    {"REFUSED", 18, 1, 78, 1},
    {"RELEASE", 19, 0, 79, 1},
    {"RETIRE", 20, 0, 80, 1},
    {"LOG", 21, 2, 81, 4},
    {"RESPONSES", 22, 2, 85, 1},
    {"CANCEL", 23, 1, 93, 2},
    {"INDIRECT", 9, 0, 23, 3},
    {"METRICS", 24, 2, 95, 2},
    {"DENIALS", 49, 2, 103, 1},
    {"LOGGING", 25, 1, 108, 4},
    {"READY", 26, 1, 112, 1},
    {"READINESS", 27, 2, 113, 2},
    {"FORK", 45, 1, 115, 1},
    {"REAP", 46, 1, 116, 1},
    {"EXITED", 47, 2, 117, 2},
}}, kSpecs};

constexpr Table<Kind, 12> kCalls = {{{
    {"INFER", 30, 2, 119, 10},
    {"REPLY", 31, 1, 147, 7},
    {"CANCEL_CALL", 43, 2, 154, 1},
    {"WITHDRAW", 32, 2, 154, 1},
    {"LET_GO", 33, 2, 155, 1},
    {"LOAD_MODEL", 34, 2, 156, 4},
    {"UNLOAD_MODEL", 35, 2, 163, 3},
    {"IS_MODEL_READY", 36, 2, 166, 3},
    {"NEW_METRIC", 38, 2, 169, 6},
    {"METRIC_VALUE", 39, 2, 179, 2},
    {"DONE", 37, 1, 181, 3},
    {"INDIRECT", 9, 0, 23, 3},
}}, kSpecs};

constexpr Table<Word, 24> kLauncher = {{{
    {"LONG", 60, 0, 184, 1},
    {"BACKEND", 61, 1, 185, 4},
    {"LOGGING", 62, 1, 189, 4},
    {"MODEL", 63, 1, 193, 6},
    {"MODEL_READY", 81, 2, 199, 12},
    {"REFUSED", 82, 2, 212, 3},
    {"INSTANCE", 64, 1, 215, 5},
    {"BORN", 89, 2, 220, 7},
    {"STARTED", 83, 2, 227, 4},
    {"MEMORY", 70, 1, 231, 7},
    {"RETURNED", 72, 1, 238, 4},
    {"SET_ASIDE", 91, 2, 242, 2},
    {"SCRUB", 71, 1, 244, 3},
    {"SCRUBBED", 92, 2, 247, 2},
    {"LOST", 65, 1, 249, 5},
    {"OVERDUE", 66, 1, 254, 2},
    {"GROWN", 90, 2, 256, 2},
    {"RENEW", 69, 1, 258, 3},
    {"DIED", 85, 2, 261, 5},
    {"END", 67, 1, 266, 1},
    {"END_MODEL", 68, 1, 267, 1},
    {"ENDED", 86, 2, 268, 1},
    {"HELLO", 80, 2, 269, 4},
    {"NOTE", 88, 2, 273, 4},
}}, kSpecs};

constexpr size_t kLayoutSpec = 277;
// Returns true if the bytes are a layout of at most so many values; else `wrong` says why.
inline bool check_layout(std::string_view packed, uint64_t most, std::string* wrong) {
  return check_packed(kSpecs, kSpecs[kLayoutSpec], packed, most, wrong);
}

template <class Table>
constexpr size_t fields_in(const Table& table, typename Table::Kind kind) {
  for (const Message& message : table.messages) {
    if (message.kind == static_cast<uint8_t>(kind)) return message.count;
  }
  return 0;
}
constexpr size_t field_count(Kind kind) {
  return std::max({fields_in(kWork, kind), fields_in(kControl, kind), fields_in(kCalls, kind)});
}
constexpr size_t field_count(Word kind) { return fields_in(kLauncher, kind); }

// The packet of a message; its fields are checked for nothing but their number.
template <auto kind, class... Fields>
void encode(Writer& writer, const Fields&... fields) {
  static_assert(sizeof...(fields) == field_count(kind), "the table has another number of fields");
  writer.clear();
  writer.array(1 + sizeof...(fields));
  writer.uint(static_cast<uint64_t>(kind));
  write_all(writer, fields...);
}

}  // namespace moonpool::wire
