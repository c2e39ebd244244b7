// Reads and checks the GDRKIT_TWINS_* environment variables, and draws random numbers and delays.

#include "model/config.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string_view>

#include "model/gpu.hpp"
#include "model/sockets.hpp"

namespace gdrkit::twin {
namespace {

constexpr unsigned max_nic_count = 16;
constexpr std::size_t min_secret_bytes = 16, max_secret_bytes = 256;

// Store and print the first error only.
void report_malformed(Config* config, std::string_view variable, std::string_view value, std::string_view expected) {
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

std::uint64_t read_number(Config* config, const char* variable, std::uint64_t default_value, std::uint64_t max_value) {
    const char* text = std::getenv(variable);
    if (text == nullptr) {
        return default_value;
    }
    std::uint64_t value = 0;
    if (!parse_number(text, &value) || value > max_value) {
        report_malformed(config, variable, text, "a number from 0 to " + std::to_string(max_value));
        return default_value;
    }
    return value;
}

bool is_valid_domain(std::string_view name) {
    constexpr std::string_view allowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-";
    return !name.empty() && name.size() <= 32 && name.find_first_not_of(allowed) == std::string_view::npos;
}

GaudiGeneration read_gaudi_generation(Config* config) {
    const char* text = std::getenv("GDRKIT_TWINS_GAUDI");
    const std::string_view name = text == nullptr ? "gaudi2" : text;
    if (name != "gaudi" && name != "gaudi2" && name != "gaudi3") {
        report_malformed(config, "GDRKIT_TWINS_GAUDI", name, "gaudi, gaudi2 or gaudi3");
    }
    return name == "gaudi" ? GaudiGeneration::gaudi
                           : (name == "gaudi3" ? GaudiGeneration::gaudi3 : GaudiGeneration::gaudi2);
}

int read_cufile_version(Config* config) {
    const char* text = std::getenv("GDRKIT_TWINS_CUFILE");
    const std::string_view version = text == nullptr ? "1.20" : text;
    if (version != "1.15" && version != "1.20") {
        report_malformed(config, "GDRKIT_TWINS_CUFILE", version, "1.15 or 1.20");
    }
    return version == "1.15" ? 1150 : 1200;
}

// Return the secret of the fabric, or an empty text if there is none. The variable contains the secret or the path of a
// file with the secret.
std::string read_secret() {
    const char* const text = std::getenv("GDRKIT_TWINS_FABRIC_SECRET");
    std::string secret = text == nullptr ? "" : text;
    if (secret.starts_with('/')) {
        const Fd file(open(secret.c_str(), O_RDONLY | O_CLOEXEC));
        secret.resize(max_secret_bytes + 1);
        const ssize_t read_bytes = file ? read(file.get(), secret.data(), secret.size()) : -1;
        secret.resize(read_bytes > 0 ? static_cast<std::size_t>(read_bytes) : 0);
        while (secret.ends_with('\n')) {
            secret.pop_back();
        }
    }
    return secret;
}

void read_fabric(Config* config) {
    const char* const text = std::getenv("GDRKIT_TWINS_FABRIC");
    if (text == nullptr) {
        return;
    }
    const auto addresses = find_fabric_addresses(text);
    if (!addresses) {
        report_malformed(config, "GDRKIT_TWINS_FABRIC", text,
                         "tcp:// and IP addresses or networks of this machine, such as tcp://10.1.0.0/16");
        return;
    }
    config->fabric_secret = read_secret();
    if (config->fabric_secret.size() < min_secret_bytes || config->fabric_secret.size() > max_secret_bytes) {
        // The value is not printed, because logs are less protected than a secret must be.
        report_malformed(config, "GDRKIT_TWINS_FABRIC_SECRET", "...",
                         "a secret of 16 to 256 bytes, or the absolute path of a file that contains one");
        return;
    }
    config->fabric_addresses = *addresses;
}

Config read_config() {
    Config config;
    if (const char* domain = std::getenv("GDRKIT_TWINS_DOMAIN"); domain != nullptr) {
        if (is_valid_domain(domain)) {
            config.domain = domain;
        } else {
            report_malformed(&config, "GDRKIT_TWINS_DOMAIN", domain, "1 to 32 letters, digits, '_', '.' or '-'");
        }
    }
    read_fabric(&config);
    std::uint64_t random_seed = 0;
    if (getrandom(&random_seed, sizeof random_seed, 0) != sizeof random_seed) {
        random_seed = static_cast<std::uint64_t>(getpid());
    }
    config.seed = read_number(&config, "GDRKIT_TWINS_SEED", random_seed, UINT64_MAX);
    const auto address_count = static_cast<unsigned>(config.fabric_addresses.size());
    config.nic_count = static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_NICS",
                                                         address_count > 0 ? address_count : config.nic_count,
                                                         address_count > 0 ? address_count : max_nic_count));
    config.gpu_count =
        static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_GPUS", config.gpu_count, max_gpu_count));
    config.gaudi_count = static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_GAUDIS", config.gaudi_count, 16));
    config.gaudi_generation = read_gaudi_generation(&config);
    config.gaudi_bar_mib = read_number(&config, "GDRKIT_TWINS_GAUDI_BAR_MIB", 0, 1 << 20);
    config.cufile_version = read_cufile_version(&config);
    config.has_peermem = read_number(&config, "GDRKIT_TWINS_PEERMEM", 1, 1) != 0;
    config.udev_knows_all_disks = read_number(&config, "GDRKIT_TWINS_UDEV", 1, 1) != 0;
    config.max_delay_us =
        static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_LATE_US", config.max_delay_us, 10'000'000));
    config.delayed_percent =
        static_cast<unsigned>(read_number(&config, "GDRKIT_TWINS_LATE_SHARE", config.delayed_percent, 100));
    config.writes_ordering =
        static_cast<int>(read_number(&config, "GDRKIT_TWINS_WRITES_ORDERING", config.writes_ordering, 200));
    config.flush_options =
        static_cast<int>(read_number(&config, "GDRKIT_TWINS_FLUSH_OPTIONS", config.flush_options, 3));
    if (const char* path = std::getenv("GDRKIT_TWINS_FAULTS"); path != nullptr) {
        config.fault_plan_path = path;
    }
    return config;
}

} // namespace

const Config& config() {
    // The object is never destroyed, because threads of the twins may read it while the process exits.
    static const Config* const instance = new Config(read_config());
    return *instance;
}

std::uint64_t random_u64() {
    static std::mutex mutex;
    // The process id is part of the seed, so that two processes of one run draw different keys. A process with the same
    // seed and the same process id draws the same numbers again.
    static std::mt19937_64* const generator =
        new std::mt19937_64(config().seed ^ (static_cast<std::uint64_t>(getpid()) << 32));
    std::lock_guard lock(mutex);
    return (*generator)();
}

std::uint64_t random_delay_us() {
    const Config& settings = config();
    if (settings.max_delay_us == 0 || random_u64() % 100 >= settings.delayed_percent) {
        return 0;
    }
    return random_u64() % (settings.max_delay_us + 1);
}

void sleep_random_delay() {
    const auto delay_ns = static_cast<long>(random_delay_us()) * 1000;
    if (delay_ns == 0) {
        return;
    }
    timespec remaining{delay_ns / 1'000'000'000, delay_ns % 1'000'000'000};
    while (nanosleep(&remaining, &remaining) != 0) {
    }
}

} // namespace gdrkit::twin
