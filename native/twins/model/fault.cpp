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
    std::string stop; // Of a file; empty: nobody is stopped.

    bool does_something() const { return code || delay.count() != 0 || !stop.empty(); }
};

struct Plan {
    std::map<std::string, std::vector<Rule>, std::less<>> rules;
};

// Calls of one point that the plan holds up: now, and at most at the same time.
struct Held {
    int now = 0;
    int most = 0;
};

} // namespace

// Of one point, since the library was loaded, and as many of these as came before the plan that is set.
struct FaultCount {
    std::atomic<std::uint64_t> calls{0};
    std::uint64_t before_plan = 0;
    std::atomic<bool> planned{false};
};

namespace {

struct Faults {
    std::mutex mutex;
    std::map<std::string, FaultPoint, std::less<>> points;
    std::vector<std::string> prefixes;
    Plan plan;
    std::map<std::string, FaultCount, std::less<>> counts;
    std::map<std::string, Held, std::less<>> held; // since the plan was set
};

Faults& faults() {
    static auto* const all = new Faults;
    return *all;
}

struct Name {
    std::string_view name;
    int code;
};

// The errnos that the kernel and libibverbs give for what the twins do; 524 is the kernel's own ENOTSUPP.
constexpr Name errno_names[] = {
    {"EPERM", EPERM},     {"ENOENT", ENOENT},         {"EIO", EIO},
    {"ENXIO", ENXIO},     {"EBADF", EBADF},           {"EAGAIN", EAGAIN},
    {"ENOMEM", ENOMEM},   {"EACCES", EACCES},         {"EFAULT", EFAULT},
    {"EBUSY", EBUSY},     {"ENODEV", ENODEV},         {"EINVAL", EINVAL},
    {"EMFILE", EMFILE},   {"ENOSPC", ENOSPC},         {"EPIPE", EPIPE},
    {"ENOSYS", ENOSYS},   {"EPROTO", EPROTO},         {"EOVERFLOW", EOVERFLOW},
    {"ENOTSUP", ENOTSUP}, {"EOPNOTSUPP", EOPNOTSUPP}, {"EPROTONOSUPPORT", EPROTONOSUPPORT},
    {"ENOTSUPP", 524},    {"ETIMEDOUT", ETIMEDOUT},   {"ECONNREFUSED", ECONNREFUSED},
};

// The ways of a transfer between a file and a device, by what a cuFile plan calls them.
constexpr Name route_names[] = {{"p2p", 1}, {"nvfs", 2}, {"posix", 3}};

// Nobody waits longer for a call that a plan holds up: ten seconds.
constexpr std::uint32_t delay_us_most = 10'000'000;

// The prefixes of all twins: a rule that belongs to none of them is nobody's, and a mistake.
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

bool find_name(std::span<const Name> names, std::string_view text, int* code) {
    const auto found = std::ranges::find(names, text, &Name::name);
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
    return parse(text, code) && *code >= point.code_least && *code <= point.code_most;
}

// The prefix by which a name belongs to a library: the longest, since cuFile begins as CUDA does. Empty: nobody's.
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
    return "a name or number from " + std::to_string(point.code_least) + " to " + std::to_string(point.code_most) +
           " after " + std::string(code_key_of(point.kind));
}

// One rule; empty when good. A rule of the other library is left to it.
std::string parse_rule(const Faults& all, const std::vector<std::string>& words, Plan* plan) {
    const std::string& name = words[0];
    const auto point = all.points.find(name);
    if (point == all.points.end()) {
        const std::string_view prefix = prefix_of(name);
        const bool ours = std::ranges::find(all.prefixes, prefix) != all.prefixes.end();
        return !prefix.empty() && !ours ? "" : "'" + name + "' is not a function that can be made to fail";
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
            if (!parse(word.substr(9), &delay_us) || delay_us == 0 || delay_us > delay_us_most) {
                return "'" + words[index] + "': expected a number from 1 to " + std::to_string(delay_us_most) +
                       " after delay_us=";
            }
            rule.delay = std::chrono::microseconds(delay_us);
        } else if (word.starts_with("stop=") && rule.stop.empty()) {
            rule.stop = word.substr(5);
            if (!rule.stop.starts_with('/')) {
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
    bool headed = false;
    for (int number = 1; std::getline(lines, line); ++number) {
        std::istringstream stream(line.substr(0, line.find('#')));
        const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
        if (words.empty()) {
            continue;
        }
        const std::string where = "line " + std::to_string(number) + ": ";
        if (!headed) {
            if (words != std::vector<std::string>{"gdrkit-faults", "1"}) {
                return where + "expected 'gdrkit-faults 1' first";
            }
            headed = true;
        } else if (std::string error = parse_rule(all, words, plan); !error.empty()) {
            return where + error;
        }
    }
    return headed ? "" : "line 1: expected 'gdrkit-faults 1' first";
}

std::string set_plan(Faults* all, std::string_view text) {
    Plan plan;
    std::string error = parse_plan(*all, text, &plan);
    if (error.empty()) {
        all->plan = std::move(plan);
        all->held.clear();
        for (auto& [name, count] : all->counts) {
            count.before_plan = count.calls;
            count.planned = all->plan.rules.contains(name);
        }
    }
    return error;
}

FaultCount& count_of(Faults* all, std::string_view point) {
    auto found = all->counts.find(point);
    if (found == all->counts.end()) {
        found = all->counts.try_emplace(std::string(point)).first;
        found->second.planned = all->plan.rules.contains(found->first);
    }
    return found->second;
}

// Stops this process in this call if the file is there. Renaming it is the test: of all calls that look, one takes it,
// and whoever put it there sees by the new name which process that was.
void stop_if_wanted(const std::string& file) {
    const std::string taken = file + "." + std::to_string(getpid());
    if (std::rename(file.c_str(), taken.c_str()) == 0) {
        raise(SIGSTOP);
    }
}

// Does what the rule says, without the lock, and gives what it answers.
std::optional<int> held_up(Faults* all, std::unique_lock<std::mutex>* lock, std::string_view point, const Rule& rule) {
    // By value: the plan, and the counts, may be replaced meanwhile.
    const Rule wanted = rule;
    const std::string name(point);
    if (!wanted.stop.empty()) {
        lock->unlock();
        stop_if_wanted(wanted.stop);
        lock->lock();
    }
    if (wanted.delay.count() == 0) {
        return wanted.code;
    }
    Held& held = all->held[name];
    held.most = std::max(held.most, ++held.now);
    lock->unlock();
    std::this_thread::sleep_for(wanted.delay);
    lock->lock();
    if (const auto found = all->held.find(name); found != all->held.end() && found->second.now > 0) {
        --found->second.now;
    }
    return wanted.code;
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
    // Read by the stream, not from its buffer: the buffer throws when the path is that of a directory.
    std::ifstream file(path, std::ios::binary);
    std::string text;
    for (char letter = 0; file.get(letter);) {
        text += letter;
    }
    std::string error = file.is_open() && !file.bad() ? set_plan(&all, text) : "the file cannot be read";
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

std::optional<int> hit(std::string_view point) {
    Faults& all = faults();
    std::unique_lock lock(all.mutex);
    FaultCount& count = count_of(&all, point);
    const std::uint64_t call = ++count.calls - count.before_plan;
    if (const auto rules = all.plan.rules.find(point); rules != all.plan.rules.end()) {
        for (const Rule& rule : rules->second) {
            if (rule.first <= call && call <= rule.last) {
                return held_up(&all, &lock, point, rule);
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

std::optional<int> FaultSite::hit() {
    if (planned()) {
        return twin::hit(point_);
    }
    ++count_->calls;
    return std::nullopt;
}

bool FaultSite::planned() const {
    return count_->planned.load(std::memory_order_relaxed);
}

std::string held_json() {
    Faults& all = faults();
    std::lock_guard lock(all.mutex);
    std::string json = "{";
    for (const auto& [name, held] : all.held) {
        json += (json.size() > 1 ? ",\"" : "\"") + name + "\":" + std::to_string(held.most);
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
