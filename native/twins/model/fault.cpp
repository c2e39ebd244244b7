// Implements fault injection: parses fault plans, counts calls, and applies the rule that matches a call.

#include "model/fault.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "model/config.hpp"

namespace gdrkit::twin {
namespace {

// A rule of a fault plan: what happens in the calls `first_call` to `last_call` of a fault point.
struct Rule {
    std::uint64_t first_call = 1;
    std::uint64_t last_call = UINT64_MAX;
    std::optional<int> code; // result of the call; empty: the call is carried out
    std::chrono::microseconds delay{0};
    std::string nic;       // the rule applies only to calls of this NIC; empty: to the calls of all NICs
    std::string hold_file; // path of a file; the call waits while it exists. Empty: the rule holds no call
    std::string stop_file; // path of the trigger file; empty: the rule stops no process

    bool applies_to(std::uint64_t call, std::span<const std::string_view> nics) const {
        return first_call <= call && call <= last_call && (nic.empty() || std::ranges::find(nics, nic) != nics.end());
    }
    bool is_delayed() const { return delay.count() != 0 || !hold_file.empty(); }
    bool has_effect() const { return code || is_delayed() || !stop_file.empty(); }
};

struct Plan {
    std::map<std::string, std::vector<Rule>, std::less<>> rules;
};

// Number of calls of one point that are delayed at present, and the largest number so far.
struct DelayedCalls {
    int current_count = 0;
    int max_count = 0;
};

} // namespace

// The number of calls of one point: `call_count` since the library was loaded, and `call_count_before_plan` until the
// current plan was set. `has_rule`: the current plan has a rule for the point.
struct FaultCount {
    std::atomic<std::uint64_t> call_count{0};
    std::uint64_t call_count_before_plan = 0;
    std::atomic<bool> has_rule{false};
};

namespace {

// The fault points of this library, its current plan and its counters.
struct Faults {
    std::mutex mutex;
    std::map<std::string, FaultPoint, std::less<>> points;
    std::vector<std::string> prefixes;
    Plan plan;
    std::map<std::string, FaultCount, std::less<>> counts;
    std::map<std::string, DelayedCalls, std::less<>> delayed_calls; // reset when a plan is set
};

Faults& faults() {
    static auto* const instance = new Faults;
    return *instance;
}

struct NamedCode {
    std::string_view name;
    int code;
};

// Names of the errnos that the emulated calls return. 524 is the kernel's internal ENOTSUPP.
constexpr NamedCode errno_names[] = {
    {"EPERM", EPERM},     {"ENOENT", ENOENT},         {"EIO", EIO},
    {"ENXIO", ENXIO},     {"EBADF", EBADF},           {"EAGAIN", EAGAIN},
    {"ENOMEM", ENOMEM},   {"EACCES", EACCES},         {"EFAULT", EFAULT},
    {"EBUSY", EBUSY},     {"ENODEV", ENODEV},         {"EINVAL", EINVAL},
    {"EMFILE", EMFILE},   {"ENOSPC", ENOSPC},         {"EPIPE", EPIPE},
    {"ENOSYS", ENOSYS},   {"EPROTO", EPROTO},         {"EOVERFLOW", EOVERFLOW},
    {"ENOTSUP", ENOTSUP}, {"EOPNOTSUPP", EOPNOTSUPP}, {"EPROTONOSUPPORT", EPROTONOSUPPORT},
    {"ENOTSUPP", 524},    {"ETIMEDOUT", ETIMEDOUT},   {"ECONNREFUSED", ECONNREFUSED},
};

// Values of route=: the paths that a cuFile transfer between a file and a device can take.
constexpr NamedCode route_names[] = {{"p2p", 1}, {"nvfs", 2}, {"posix", 3}};

// Largest delay_us= of a rule: ten seconds.
constexpr std::uint32_t max_rule_delay_us = 10'000'000;

// A hold= rule ends after this time, so that a test that does not remove its file cannot block a process for ever.
constexpr std::chrono::seconds max_hold_time{60};

// Prefixes of the fault points of all twins. A rule for a name with none of these prefixes is an error in every twin.
constexpr std::array<std::string_view, 8> all_prefixes = {"ibv_", "_ibv_",  "wc.",     "rdma_",
                                                          "cu",   "cuFile", "cufile.", "hlthunk_"};

template <typename Number> bool parse_number(std::string_view text, Number* value) {
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    return error == std::errc{} && end == text.data() + text.size() && !text.empty();
}

// Parse the value of call=, which is N, N-M or *.
bool parse_calls(std::string_view text, Rule* rule) {
    if (text == "*") {
        return true;
    }
    const auto dash = text.find('-');
    if (!parse_number(text.substr(0, dash), &rule->first_call) || rule->first_call == 0) {
        return false;
    }
    rule->last_call = rule->first_call;
    return dash == std::string_view::npos ||
           (parse_number(text.substr(dash + 1), &rule->last_call) && rule->last_call >= rule->first_call);
}

bool find_code(std::span<const NamedCode> names, std::string_view text, int* code) {
    const auto entry = std::ranges::find(names, text, &NamedCode::name);
    if (entry != names.end()) {
        *code = entry->code;
    }
    return entry != names.end();
}

bool parse_code(std::string_view text, const FaultPoint& point, int* code) {
    if (point.kind == FaultKind::route) {
        return find_code(route_names, text, code);
    }
    if (point.kind == FaultKind::errno_value && find_code(errno_names, text, code)) {
        return true;
    }
    return parse_number(text, code) && *code >= point.code_min && *code <= point.code_max;
}

// Return the longest prefix in all_prefixes with which `name` starts, or an empty text. The longest match counts,
// because "cuFile" also starts with CUDA's "cu".
std::string_view get_prefix(std::string_view name) {
    std::string_view longest;
    for (const std::string_view prefix : all_prefixes) {
        if (name.starts_with(prefix) && prefix.size() > longest.size()) {
            longest = prefix;
        }
    }
    return longest;
}

std::string_view get_code_key(FaultKind kind) {
    switch (kind) {
    case FaultKind::errno_value:
        return "errno=";
    case FaultKind::route:
        return "route=";
    case FaultKind::status:
        break;
    }
    return "status=";
}

std::string describe_expected_code(const FaultPoint& point) {
    if (point.kind == FaultKind::route) {
        return "p2p, nvfs or posix after route=";
    }
    return "a name or number from " + std::to_string(point.code_min) + " to " + std::to_string(point.code_max) +
           " after " + std::string(get_code_key(point.kind));
}

// Parse one rule and add it to the plan. Return an error text or an empty string. Rules of other libraries are skipped.
std::string parse_rule(const Faults& registry, const std::vector<std::string>& words, Plan* plan) {
    const std::string& name = words[0];
    const auto point_entry = registry.points.find(name);
    if (point_entry == registry.points.end()) {
        const std::string_view prefix = get_prefix(name);
        const bool is_own_prefix = std::ranges::find(registry.prefixes, prefix) != registry.prefixes.end();
        return !prefix.empty() && !is_own_prefix ? ""
                                                 : "'" + name + "' is not the name of a fault point of this library";
    }
    const std::string_view code_key = get_code_key(point_entry->second.kind);
    Rule rule;
    bool has_call = false;
    for (std::size_t index = 1; index < words.size(); ++index) {
        const std::string_view word = words[index];
        if (word.starts_with("call=") && !has_call) {
            has_call = parse_calls(word.substr(5), &rule);
            if (!has_call) {
                return "'" + words[index] + "': expected call=N, call=N-M or call=*";
            }
        } else if (word.starts_with(code_key) && !rule.code) {
            int code = 0;
            if (!parse_code(word.substr(code_key.size()), point_entry->second, &code)) {
                return "'" + words[index] + "': expected " + describe_expected_code(point_entry->second);
            }
            rule.code = code;
        } else if (word.starts_with("delay_us=") && rule.delay.count() == 0) {
            std::uint32_t delay_us = 0;
            if (!parse_number(word.substr(9), &delay_us) || delay_us == 0 || delay_us > max_rule_delay_us) {
                return "'" + words[index] + "': expected a number from 1 to " + std::to_string(max_rule_delay_us) +
                       " after delay_us=";
            }
            rule.delay = std::chrono::microseconds(delay_us);
        } else if (word.starts_with("hold=") && rule.hold_file.empty()) {
            rule.hold_file = word.substr(5);
            if (!rule.hold_file.starts_with('/')) {
                return "'" + words[index] + "': expected the absolute path of a file after hold=";
            }
        } else if (word.starts_with("nic=") && point_entry->second.has_nic && rule.nic.empty()) {
            rule.nic = word.substr(4);
            if (rule.nic.empty()) {
                return "'" + words[index] + "': expected the name of a NIC after nic=";
            }
        } else if (word.starts_with("stop=") && rule.stop_file.empty()) {
            rule.stop_file = word.substr(5);
            if (!rule.stop_file.starts_with('/')) {
                return "'" + words[index] + "': expected the absolute path of a file after stop=";
            }
        } else {
            return "'" + words[index] + "' is not expected here";
        }
    }
    if (!has_call || !rule.has_effect()) {
        return "expected '" + name + " call=... " + std::string(code_key) + "..., delay_us=..., hold=... or stop=...'";
    }
    plan->rules[name].push_back(rule);
    return "";
}

std::string parse_plan(const Faults& registry, std::string_view text, Plan* plan) {
    std::istringstream lines{std::string(text)};
    std::string line;
    bool has_header = false;
    for (int line_number = 1; std::getline(lines, line); ++line_number) {
        std::istringstream stream(line.substr(0, line.find('#')));
        const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
        if (words.empty()) {
            continue;
        }
        const std::string location = "line " + std::to_string(line_number) + ": ";
        if (!has_header) {
            if (words != std::vector<std::string>{"gdrkit-faults", "1"}) {
                return location + "expected 'gdrkit-faults 1' first";
            }
            has_header = true;
        } else if (std::string error = parse_rule(registry, words, plan); !error.empty()) {
            return location + error;
        }
    }
    return has_header ? "" : "line 1: expected 'gdrkit-faults 1' first";
}

// Replace the plan and restart the call counts. Return an error text, and keep the old plan, if the text is malformed.
std::string set_plan(Faults* registry, std::string_view text) {
    Plan plan;
    std::string error = parse_plan(*registry, text, &plan);
    if (error.empty()) {
        registry->plan = std::move(plan);
        registry->delayed_calls.clear();
        for (auto& [name, count] : registry->counts) {
            count.call_count_before_plan = count.call_count;
            count.has_rule = registry->plan.rules.contains(name);
        }
    }
    return error;
}

FaultCount& find_or_add_count(Faults* registry, std::string_view point_name) {
    auto entry = registry->counts.find(point_name);
    if (entry == registry->counts.end()) {
        entry = registry->counts.try_emplace(std::string(point_name)).first;
        entry->second.has_rule = registry->plan.rules.contains(entry->first);
    }
    return entry->second;
}

// Stop this process if the trigger file exists. rename() is atomic, so exactly one of several concurrent calls renames
// the file and stops its process. The new name tells which process has stopped.
void stop_process_if_file_exists(const std::string& file) {
    const std::string renamed_file = file + "." + std::to_string(getpid());
    if (std::rename(file.c_str(), renamed_file.c_str()) == 0) {
        raise(SIGSTOP);
    }
}

// Wait while the file exists, at most for max_hold_time. A test removes the file when the other threads have reached a
// certain point. So the order of events does not depend on the speed of the machine.
void wait_while_file_exists(const std::string& file) {
    const auto deadline = std::chrono::steady_clock::now() + max_hold_time;
    while (access(file.c_str(), F_OK) == 0 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

// Apply the rule and return the result that it injects. The lock is released while the process is stopped or the call
// is delayed.
std::optional<int> apply_rule(Faults* registry, std::unique_lock<std::mutex>* lock, std::string_view point_name,
                              const Rule& rule) {
    // The rule is copied, because the plan may be replaced while the lock is released.
    const Rule rule_copy = rule;
    const std::string name(point_name);
    if (!rule_copy.stop_file.empty()) {
        lock->unlock();
        stop_process_if_file_exists(rule_copy.stop_file);
        lock->lock();
    }
    if (!rule_copy.is_delayed()) {
        return rule_copy.code;
    }
    DelayedCalls& delayed_calls = registry->delayed_calls[name];
    delayed_calls.max_count = std::max(delayed_calls.max_count, ++delayed_calls.current_count);
    lock->unlock();
    std::this_thread::sleep_for(rule_copy.delay);
    if (!rule_copy.hold_file.empty()) {
        wait_while_file_exists(rule_copy.hold_file);
    }
    lock->lock();
    if (const auto entry = registry->delayed_calls.find(name);
        entry != registry->delayed_calls.end() && entry->second.current_count > 0) {
        --entry->second.current_count;
    }
    return rule_copy.code;
}

} // namespace

std::string load_faults(std::span<const FaultPoint> points, std::span<const std::string_view> prefixes) {
    Faults& registry = faults();
    std::lock_guard lock(registry.mutex);
    for (const FaultPoint& point : points) {
        registry.points.emplace(point.name, point);
    }
    registry.prefixes.assign(prefixes.begin(), prefixes.end());
    const std::string& path = config().fault_plan_path;
    if (path.empty()) {
        return "";
    }
    // The text is read by get(), which sets an error bit if the path is a directory. A read from the stream buffer
    // would throw an exception instead.
    std::ifstream file(path, std::ios::binary);
    std::string text;
    for (char character = 0; file.get(character);) {
        text += character;
    }
    std::string error = file.is_open() && !file.bad() ? set_plan(&registry, text)
                                                      : "the file cannot be read; check that it exists and is readable";
    if (!error.empty()) {
        error = "fault plan " + path + ": " + error;
        std::fprintf(stderr, "gdrkit twin: %s\n", error.c_str());
    }
    return error;
}

std::string replace_faults(std::string_view plan) {
    Faults& registry = faults();
    std::lock_guard lock(registry.mutex);
    return set_plan(&registry, plan);
}

std::optional<int> find_injected_fault(std::string_view point_name, std::span<const std::string_view> nics) {
    Faults& registry = faults();
    std::unique_lock lock(registry.mutex);
    FaultCount& count = find_or_add_count(&registry, point_name);
    const std::uint64_t call = ++count.call_count - count.call_count_before_plan; // counted from 1
    if (const auto rules = registry.plan.rules.find(point_name); rules != registry.plan.rules.end()) {
        for (const Rule& rule : rules->second) {
            if (rule.applies_to(call, nics)) {
                return apply_rule(&registry, &lock, point_name, rule);
            }
        }
    }
    return std::nullopt;
}

FaultSite::FaultSite(std::string_view point_name) : point_name_(point_name) {
    Faults& registry = faults();
    std::lock_guard lock(registry.mutex);
    count_ = &find_or_add_count(&registry, point_name);
}

std::optional<int> FaultSite::find_injected_fault(std::span<const std::string_view> nics) {
    if (has_rule()) {
        return twin::find_injected_fault(point_name_, nics);
    }
    ++count_->call_count;
    return std::nullopt;
}

bool FaultSite::has_rule() const {
    return count_->has_rule.load(std::memory_order_relaxed);
}

std::string format_delayed_calls_json() {
    Faults& registry = faults();
    std::lock_guard lock(registry.mutex);
    std::string json = "{";
    for (const auto& [name, delayed_calls] : registry.delayed_calls) {
        json += (json.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(delayed_calls.max_count);
    }
    return json + "}";
}

std::string format_calls_json() {
    Faults& registry = faults();
    std::lock_guard lock(registry.mutex);
    std::string json = "{";
    for (const auto& [name, count] : registry.counts) {
        if (const std::uint64_t call_count = count.call_count; call_count > 0) {
            json += (json.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(call_count);
        }
    }
    return json + "}";
}

} // namespace gdrkit::twin
