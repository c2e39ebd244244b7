// Configuration parameters: set by calls, the environment and cufile.json.

#include "cufile/parameters.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cufile/entry.hpp"
#include "cufile/statistics.hpp"

namespace gdrkit::twin::cufile {
namespace {

struct Limits {
    std::size_t default_value, min, max;
};

// Defaults and limits of cuFile 1.20. A maximum of 0 is one that the real library derives from the GPU.
constexpr Limits sizes[size_parameters] = {
    {0, 0, 3},
    {128, 1, 256},
    {8, 0, 128},
    {1024, 4, 4294967295},
    {4, 0, 8},
    {16384, 64, 16384},
    {131072, 0, 0},
    {1024, 64, 16384},
    {4294967292, 64, 0},
    {64, 1, 256},
    {4, 4, 18014398509481980},
    {5, 1, 1000},
};
constexpr bool bools[bool_parameters] = {false, true, false, false, true};
constexpr int removed_bool_parameter = 5; // CUFILE_PARAM_PROFILE_NVTX

enum StringParameter { string_logging_level = 0, string_log_path = 1, string_log_folder = 2, string_transport = 3 };
constexpr int string_parameters = 4;

struct Parameters {
    std::mutex mutex;
    std::optional<std::size_t> size[size_parameters];
    std::optional<bool> flag[bool_parameters];
    std::string text[string_parameters] = {"WARN", "", "", "DC_V1"};
    std::vector<std::size_t> slab_kb = {4, 1024, 16384}, slab_count = {128, 64, 64};
};

Parameters& parameters() {
    static auto* const all = new Parameters;
    return *all;
}

std::optional<bool> bool_from_environment(const char* name) {
    const char* const text = std::getenv(name);
    if (text == nullptr) {
        return std::nullopt;
    }
    return std::strcmp(text, "1") == 0 || std::strcmp(text, "true") == 0;
}

// Return the text of cufile.json without comments.
std::string read_configuration() {
    const char* const path = std::getenv("CUFILE_ENV_PATH_JSON");
    std::ifstream file(path == nullptr ? "/etc/cufile.json" : path);
    std::string text, line;
    while (std::getline(file, line)) {
        text += line.substr(0, line.find("//"));
        text += ' ';
    }
    return text;
}

// Return the value after "key":. Only numbers and flags are read, and their keys occur once in the file.
std::string json_value_of(std::string_view text, std::string_view key) {
    const std::string quoted = "\"" + std::string(key) + "\"";
    const auto found = text.find(quoted);
    if (found == std::string_view::npos) {
        return "";
    }
    const auto begin = text.find_first_not_of(" \t:", found + quoted.size());
    if (begin == std::string_view::npos) {
        return "";
    }
    return std::string(text.substr(begin, text.find_first_of(" \t,}", begin) - begin));
}

// Return the value set by call, else by the environment, else by the file, else the default.
bool resolve_bool(const std::optional<bool>& set_by_call, const char* name, const std::string& from_file,
                  bool default_value) {
    if (set_by_call) {
        return *set_by_call;
    }
    if (const auto by_variable = bool_from_environment(name)) {
        return *by_variable;
    }
    return from_file.empty() ? default_value : from_file == "true";
}

template <typename Value>
Error get_parameter(std::string_view symbol, Value* where, int index, int count, Value (*read)(int)) {
    return entry(symbol, [&] {
        if (where == nullptr || index < 0 || index >= count ||
            (count == bool_parameters && index == removed_bool_parameter)) {
            throw CufileError{invalid_value};
        }
        *where = read(index);
    });
}

void require_closed() {
    if (is_open()) {
        throw CufileError{driver_already_open};
    }
}

} // namespace

std::size_t size_parameter(int index) {
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    return all.size[index].value_or(sizes[index].default_value);
}

bool bool_parameter(int index) {
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    return all.flag[index].value_or(bools[index]);
}

void set_size_parameter(int index, std::size_t value) {
    const Limits& limits = sizes[index];
    if (value < limits.min || (limits.max != 0 && value > limits.max)) {
        throw CufileError{invalid_value};
    }
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    all.size[index] = value;
}

void set_bool_parameter(int index, bool value) {
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    all.flag[index] = value;
}

Modes apply_parameters() {
    const std::string file = read_configuration();
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    Modes modes;
    modes.allow_compat = resolve_bool(all.flag[bool_allow_compat], "CUFILE_ALLOW_COMPAT_MODE",
                                      json_value_of(file, "allow_compat_mode"), bools[bool_allow_compat]);
    modes.force_compat = resolve_bool(all.flag[bool_force_compat], "CUFILE_FORCE_COMPAT_MODE",
                                      json_value_of(file, "force_compat_mode"), bools[bool_force_compat]);
    // From now on the caller reads the effective values.
    all.flag[bool_allow_compat] = modes.allow_compat;
    all.flag[bool_force_compat] = modes.force_compat;
    const char* const level = std::getenv("CUFILE_STATS_LEVEL");
    const std::string requested = level != nullptr ? level : json_value_of(file, "cufile_stats");
    if (all.size[size_profile_stats]) {
        set_default_level(static_cast<int>(*all.size[size_profile_stats]));
    } else if (!requested.empty()) {
        set_default_level(std::atoi(requested.c_str()));
    }
    return modes;
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterSizeT(int index, std::size_t* value) {
    return get_parameter("cuFileGetParameterSizeT", value, index, size_parameters, size_parameter);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterBool(int index, bool* value) {
    return get_parameter("cuFileGetParameterBool", value, index, bool_parameters, bool_parameter);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterMinMaxValue(int index, std::size_t* min, std::size_t* max) {
    return entry("cuFileGetParameterMinMaxValue", [&] {
        if (min == nullptr || max == nullptr || index <= size_profile_stats || index >= size_parameters) {
            throw CufileError{invalid_value};
        }
        *min = sizes[index].min;
        *max = sizes[index].max;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterString(int index, char* value, int length_bytes) {
    return entry("cuFileGetParameterString", [&] {
        Parameters& all = parameters();
        std::lock_guard lock(all.mutex);
        if (value == nullptr || index < 0 || index >= string_parameters || length_bytes <= 0 ||
            all.text[index].size() >= static_cast<std::size_t>(length_bytes)) {
            throw CufileError{invalid_value};
        }
        std::memcpy(value, all.text[index].c_str(), all.text[index].size() + 1);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterSizeT(int index, std::size_t value) {
    return entry("cuFileSetParameterSizeT", [&] {
        require_closed();
        if (index < 0 || index >= size_parameters) {
            throw CufileError{invalid_value};
        }
        set_size_parameter(index, value);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterBool(int index, bool value) {
    return entry("cuFileSetParameterBool", [&] {
        require_closed();
        if (index < 0 || index >= bool_parameters || index == removed_bool_parameter) {
            throw CufileError{invalid_value};
        }
        set_bool_parameter(index, value);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterString(int index, const char* value) {
    return entry("cuFileSetParameterString", [&] {
        require_closed();
        if (value == nullptr || index < 0 || index >= string_parameters) {
            throw CufileError{invalid_value};
        }
        Parameters& all = parameters();
        std::lock_guard lock(all.mutex);
        all.text[index] = value;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterPosixPoolSlabArray(const std::size_t* sizes_kb, const std::size_t* counts,
                                                               int length) {
    return entry("cuFileSetParameterPosixPoolSlabArray", [&] {
        require_closed();
        if (sizes_kb == nullptr || counts == nullptr || length <= 0) {
            throw CufileError{invalid_value};
        }
        Parameters& all = parameters();
        std::lock_guard lock(all.mutex);
        all.slab_kb.assign(sizes_kb, sizes_kb + length);
        all.slab_count.assign(counts, counts + length);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterPosixPoolSlabArray(std::size_t* sizes_kb, std::size_t* counts, int length) {
    return entry("cuFileGetParameterPosixPoolSlabArray", [&] {
        Parameters& all = parameters();
        std::lock_guard lock(all.mutex);
        if (sizes_kb == nullptr || counts == nullptr || length < 0 ||
            static_cast<std::size_t>(length) != all.slab_kb.size()) {
            throw CufileError{invalid_value};
        }
        std::copy(all.slab_kb.begin(), all.slab_kb.end(), sizes_kb);
        std::copy(all.slab_count.begin(), all.slab_count.end(), counts);
    });
}

} // namespace gdrkit::twin::cufile
