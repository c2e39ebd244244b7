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

struct Rule {
    std::uint64_t first = 1;
    std::uint64_t last = UINT64_MAX;
    std::optional<int> code;
    std::chrono::microseconds delay{0};
    std::string stop_file; // path of the trigger file; empty: the rule stops no process

    bool does_something() const { return code || delay.count() != 0 || !stop_file.empty(); }
};

struct Plan {
    std::map<std::string, std::vector<Rule>, std::less<>> rules;
};

// Calls of one point that are being delayed: the present number and the largest so far.
struct DelayedCalls {
    int now = 0;
    int most = 0;
};

} // namespace

// Counts the calls of one point since the library was loaded. `calls_before_plan` of them were made under earlier
// plans.
struct FaultCount {
    std::atomic<std::uint64_t> calls{0};
    std::uint64_t calls_before_plan = 0;
    std::atomic<bool> has_rule{false};
};

namespace {

struct Faults {
    std::mutex mutex;
    std::map<std::string, FaultPoint, std::less<>> points;
    std::vector<std::string> prefixes;
    Plan plan;
    std::map<std::string, FaultCount, std::less<>> counts;
    std::map<std::string, DelayedCalls, std::less<>> delayed_calls; // reset when a plan is set
};

Faults& faults() {
    static auto* const all = new Faults;
    return *all;
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

// Names of the paths that a transfer between a file and a device can take, as a cuFile plan writes them.
constexpr NamedCode route_names[] = {{"p2p", 1}, {"nvfs", 2}, {"posix", 3}};

// Largest delay_us= of a rule: ten seconds.
constexpr std::uint32_t max_delay_us_of_rule = 10'000'000;

// Prefixes of all twins. A rule that matches none of them is an error in every library.
constexpr std::array<std::string_view, 7> all_prefixes = {"ibv_",   "_ibv_",   "wc.",     "cu",
                                                          "cuFile", "cufile.", "hlthunk_"};

template <typename Number> bool parse(std::string_view text, Number* value) {
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    return error == std::errc{} && end == text.data() + text.size() && !text.empty();
}

bool parse_calls(std::string_view text, Rule* rule) {
    if (text == "*") {
        return true;
    }
    const auto dash = text.find('-');
    if (!parse(text.substr(0, dash), &rule->first) || rule->first == 0) {
        return false;
    }
    rule->last = rule->first;
    return dash == std::string_view::npos || (parse(text.substr(dash + 1), &rule->last) && rule->last >= rule->first);
}

bool find_name(std::span<const NamedCode> names, std::string_view text, int* code) {
    const auto found = std::ranges::find(names, text, &NamedCode::name);
    if (found != names.end()) {
        *code = found->code;
    }
    return found != names.end();
}

bool parse_code(std::string_view text, const FaultPoint& point, int* code) {
    if (point.kind == FaultKind::route) {
        return find_name(route_names, text, code);
    }
    if (point.kind == FaultKind::errno_value && find_name(errno_names, text, code)) {
        return true;
    }
    return parse(text, code) && *code >= point.code_min && *code <= point.code_max;
}

// Return the longest prefix that `name` starts with, since "cuFile" starts with CUDA's "cu"; empty if there is none.
std::string_view prefix_of(std::string_view name) {
    std::string_view longest;
    for (const std::string_view prefix : all_prefixes) {
        if (name.starts_with(prefix) && prefix.size() > longest.size()) {
            longest = prefix;
        }
    }
    return longest;
}

std::string_view code_key_of(FaultKind kind) {
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

std::string expected_code(const FaultPoint& point) {
    if (point.kind == FaultKind::route) {
        return "p2p, nvfs or posix after route=";
    }
    return "a name or number from " + std::to_string(point.code_min) + " to " + std::to_string(point.code_max) +
           " after " + std::string(code_key_of(point.kind));
}

// Parse one rule and add it to the plan. Return an error text or an empty string. Rules of other libraries are skipped.
std::string parse_rule(const Faults& all, const std::vector<std::string>& words, Plan* plan) {
    const std::string& name = words[0];
    const auto point = all.points.find(name);
    if (point == all.points.end()) {
        const std::string_view prefix = prefix_of(name);
        const bool is_own_prefix = std::ranges::find(all.prefixes, prefix) != all.prefixes.end();
        return !prefix.empty() && !is_own_prefix ? ""
                                                 : "'" + name + "' is not the name of a fault point of this library";
    }
    const std::string_view code_key = code_key_of(point->second.kind);
    Rule rule;
    bool have_call = false;
    for (std::size_t index = 1; index < words.size(); ++index) {
        const std::string_view word = words[index];
        if (word.starts_with("call=") && !have_call) {
            have_call = parse_calls(word.substr(5), &rule);
            if (!have_call) {
                return "'" + words[index] + "': expected call=N, call=N-M or call=*";
            }
        } else if (word.starts_with(code_key) && !rule.code) {
            int code = 0;
            if (!parse_code(word.substr(code_key.size()), point->second, &code)) {
                return "'" + words[index] + "': expected " + expected_code(point->second);
            }
            rule.code = code;
        } else if (word.starts_with("delay_us=") && rule.delay.count() == 0) {
            std::uint32_t delay_us = 0;
            if (!parse(word.substr(9), &delay_us) || delay_us == 0 || delay_us > max_delay_us_of_rule) {
                return "'" + words[index] + "': expected a number from 1 to " + std::to_string(max_delay_us_of_rule) +
                       " after delay_us=";
            }
            rule.delay = std::chrono::microseconds(delay_us);
        } else if (word.starts_with("stop=") && rule.stop_file.empty()) {
            rule.stop_file = word.substr(5);
            if (!rule.stop_file.starts_with('/')) {
                return "'" + words[index] + "': expected the absolute path of a file after stop=";
            }
        } else {
            return "'" + words[index] + "' is not expected here";
        }
    }
    if (!have_call || !rule.does_something()) {
        return "expected '" + name + " call=... " + std::string(code_key) + "..., delay_us=... or stop=...'";
    }
    plan->rules[name].push_back(rule);
    return "";
}

std::string parse_plan(const Faults& all, std::string_view text, Plan* plan) {
    std::istringstream lines{std::string(text)};
    std::string line;
    bool header_seen = false;
    for (int number = 1; std::getline(lines, line); ++number) {
        std::istringstream stream(line.substr(0, line.find('#')));
        const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
        if (words.empty()) {
            continue;
        }
        const std::string where = "line " + std::to_string(number) + ": ";
        if (!header_seen) {
            if (words != std::vector<std::string>{"gdrkit-faults", "1"}) {
                return where + "expected 'gdrkit-faults 1' first";
            }
            header_seen = true;
        } else if (std::string error = parse_rule(all, words, plan); !error.empty()) {
            return where + error;
        }
    }
    return header_seen ? "" : "line 1: expected 'gdrkit-faults 1' first";
}

std::string set_plan(Faults* all, std::string_view text) {
    Plan plan;
    std::string error = parse_plan(*all, text, &plan);
    if (error.empty()) {
        all->plan = std::move(plan);
        all->delayed_calls.clear();
        for (auto& [name, count] : all->counts) {
            count.calls_before_plan = count.calls;
            count.has_rule = all->plan.rules.contains(name);
        }
    }
    return error;
}

FaultCount& count_of(Faults* all, std::string_view point) {
    auto found = all->counts.find(point);
    if (found == all->counts.end()) {
        found = all->counts.try_emplace(std::string(point)).first;
        found->second.has_rule = all->plan.rules.contains(found->first);
    }
    return found->second;
}

// Stop this process if the trigger file exists. rename() is atomic, so exactly one of several calls takes the file, and
// the file's new name contains the process id.
void stop_process_if_file_exists(const std::string& file) {
    const std::string taken = file + "." + std::to_string(getpid());
    if (std::rename(file.c_str(), taken.c_str()) == 0) {
        raise(SIGSTOP);
    }
}

// Apply the rule without holding the lock, and return the injected result.
std::optional<int> apply_rule(Faults* all, std::unique_lock<std::mutex>* lock, std::string_view point,
                              const Rule& rule) {
    // Copied, because the plan may be replaced while the lock is released.
    const Rule rule_copy = rule;
    const std::string name(point);
    if (!rule_copy.stop_file.empty()) {
        lock->unlock();
        stop_process_if_file_exists(rule_copy.stop_file);
        lock->lock();
    }
    if (rule_copy.delay.count() == 0) {
        return rule_copy.code;
    }
    DelayedCalls& delayed_calls = all->delayed_calls[name];
    delayed_calls.most = std::max(delayed_calls.most, ++delayed_calls.now);
    lock->unlock();
    std::this_thread::sleep_for(rule_copy.delay);
    lock->lock();
    if (const auto found = all->delayed_calls.find(name); found != all->delayed_calls.end() && found->second.now > 0) {
        --found->second.now;
    }
    return rule_copy.code;
}

} // namespace

std::string load_faults(std::span<const FaultPoint> points, std::span<const std::string_view> prefixes) {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    for (const FaultPoint& point : points) {
        all.points.emplace(point.name, point);
    }
    all.prefixes.assign(prefixes.begin(), prefixes.end());
    const std::string& path = config().fault_plan_path;
    if (path.empty()) {
        return "";
    }
    // Read through the stream: reading from its buffer throws if the path is a directory.
    std::ifstream file(path, std::ios::binary);
    std::string text;
    for (char letter = 0; file.get(letter);) {
        text += letter;
    }
    std::string error = file.is_open() && !file.bad() ? set_plan(&all, text)
                                                      : "the file cannot be read; check that it exists and is readable";
    if (!error.empty()) {
        error = "fault plan " + path + ": " + error;
        std::fprintf(stderr, "gdrkit twin: %s\n", error.c_str());
    }
    return error;
}

std::string replace_faults(std::string_view plan) {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    return set_plan(&all, plan);
}

std::optional<int> injected_fault(std::string_view point) {
    Faults& all = faults();
    std::unique_lock lock(all.mutex);
    FaultCount& count = count_of(&all, point);
    const std::uint64_t call = ++count.calls - count.calls_before_plan;
    if (const auto rules = all.plan.rules.find(point); rules != all.plan.rules.end()) {
        for (const Rule& rule : rules->second) {
            if (rule.first <= call && call <= rule.last) {
                return apply_rule(&all, &lock, point, rule);
            }
        }
    }
    return std::nullopt;
}

FaultSite::FaultSite(std::string_view point) : point_(point) {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    count_ = &count_of(&all, point);
}

std::optional<int> FaultSite::injected_fault() {
    if (has_rule()) {
        return twin::injected_fault(point_);
    }
    ++count_->calls;
    return std::nullopt;
}

bool FaultSite::has_rule() const {
    return count_->has_rule.load(std::memory_order_relaxed);
}

std::string delayed_calls_json() {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    std::string json = "{";
    for (const auto& [name, delayed_calls] : all.delayed_calls) {
        json += (json.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(delayed_calls.most);
    }
    return json + "}";
}

std::string calls_json() {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    std::string json = "{";
    for (const auto& [name, count] : all.counts) {
        if (const std::uint64_t calls = count.calls; calls > 0) {
            json += (json.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(calls);
        }
    }
    return json + "}";
}

} // namespace gdrkit::twin
