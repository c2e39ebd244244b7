#include "model/config.hpp"

#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string_view>

namespace gdrkit::twin {
namespace {

// Appends to `error` only the first complaint: the first is the cause.
void complain(Config* config, std::string_view variable, std::string_view value, std::string_view expected) {
    if (!config->error.empty()) {
        return;
    }
    config->error = std::string(variable) + "=" + std::string(value) + ": expected " + std::string(expected);
    std::fprintf(stderr, "gdrkit twin: %s\n", config->error.c_str());
}

bool parse_number(std::string_view text, std::uint64_t* value) {
    int base = 10;
    if (text.starts_with("0x") || text.starts_with("0X")) {
        text.remove_prefix(2);
        base = 16;
    }
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value, base);
    return error == std::errc{} && end == text.data() + text.size() && !text.empty();
}

std::uint64_t read_number(Config* config, const char* variable, std::uint64_t fallback, std::uint64_t largest) {
    const char* text = std::getenv(variable);
    if (text == nullptr) {
        return fallback;
    }
    std::uint64_t value = 0;
    if (!parse_number(text, &value) || value > largest) {
        complain(config, variable, text, "a number from 0 to " + std::to_string(largest));
        return fallback;
    }
    return value;
}

bool good_domain(std::string_view name) {
    constexpr std::string_view allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-";
    return !name.empty() && name.size() <= 32 && name.find_first_not_of(allowed) == std::string_view::npos;
}

GaudiGeneration read_generation(Config* config) {
    const char* text = std::getenv("GDRKIT_TWINS_GAUDI");
    const std::string_view name = text == nullptr ? "gaudi2" : text;
    if (name != "gaudi" && name != "gaudi2" && name != "gaudi3") {
        complain(config, "GDRKIT_TWINS_GAUDI", name, "gaudi, gaudi2 or gaudi3");
    }
    return name == "gaudi" ? GaudiGeneration::gaudi
                           : (name == "gaudi3" ? GaudiGeneration::gaudi3 : GaudiGeneration::gaudi2);
}

Config read_config() {
    Config config;
    if (const char* domain = std::getenv("GDRKIT_TWINS_DOMAIN"); domain != nullptr) {
        if (good_domain(domain)) {
            config.domain = domain;
        } else {
            complain(&config, "GDRKIT_TWINS_DOMAIN", domain, "1 to 32 letters, digits, '_', '.' or '-'");
        }
    }
    if (const char* folder = std::getenv("GDRKIT_TWINS_FABRIC"); folder != nullptr) {
        config.fabric = folder;
        // The address of a socket has 107 bytes, and a name in the folder up to 56.
        if (config.fabric.empty() || config.fabric.front() != '/' || config.fabric.size() > 50) {
            complain(&config, "GDRKIT_TWINS_FABRIC", folder, "the path of a folder from the root, of at most 50 bytes");
            config.fabric.clear();
        }
    }
    std::uint64_t drawn = 0;
    if (getrandom(&drawn, sizeof drawn, 0) != sizeof drawn) {
        drawn = static_cast<std::uint64_t>(getpid());
    }
    config.seed = read_number(&config, "GDRKIT_TWINS_SEED", drawn, UINT64_MAX);
    config.nic_count = static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_NICS", config.nic_count, 16));
    config.gpu_count = static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_GPUS", config.gpu_count, 16));
    config.gaudi_count = static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_GAUDIS", config.gaudi_count, 16));
    config.gaudi = read_generation(&config);
    config.gaudi_bar_mib = read_number(&config, "GDRKIT_TWINS_GAUDI_BAR_MIB", 0, 1 << 20);
    config.peermem = read_number(&config, "GDRKIT_TWINS_PEERMEM", 1, 1) != 0;
    config.udev = read_number(&config, "GDRKIT_TWINS_UDEV", 0, 1) != 0;
    config.late_us_max =
        static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_LATE_US", config.late_us_max, 10'000'000));
    if (const char* path = std::getenv("GDRKIT_TWINS_FAULTS"); path != nullptr) {
        config.fault_plan_path = path;
    }
    return config;
}

} // namespace

const Config& config() {
    // Never destroyed: threads of the twins may still ask while the process exits.
    static const Config* const the_config = new Config(read_config());
    return *the_config;
}

std::uint64_t random_u64() {
    static std::mutex mutex;
    // The pid keeps two processes of one run from drawing the same keys; with one seed, one process draws the same
    // again.
    static std::mt19937_64* const generator =
        new std::mt19937_64(config().seed ^ (static_cast<std::uint64_t>(getpid()) << 32));
    std::lock_guard lock(mutex);
    return (*generator)();
}

std::uint64_t lateness_us() {
    const unsigned most = config().late_us_max;
    return most == 0 ? 0 : random_u64() % (most + 1);
}

void be_late() {
    const auto late_ns = static_cast<long>(lateness_us()) * 1000;
    if (late_ns == 0) {
        return;
    }
    timespec time{late_ns / 1'000'000'000, late_ns % 1'000'000'000};
    while (nanosleep(&time, &time) != 0) {
    }
}

} // namespace gdrkit::twin
