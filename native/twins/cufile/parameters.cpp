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
    std::size_t normally, least, most;
};

// As cuFile 1.20 answers them; a largest value of 0 is one that it derives from the GPU.
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
constexpr int retired_bool = 5; // CUFILE_PARAM_PROFILE_NVTX

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

std::optional<bool> variable(const char* name) {
    const char* const text = std::getenv(name);
    if (text == nullptr) {
        return std::nullopt;
    }
    return std::strcmp(text, "1") == 0 || std::strcmp(text, "true") == 0;
}

// cufile.json without its comments.
std::string configuration() {
    const char* const path = std::getenv("CUFILE_ENV_PATH_JSON");
    std::ifstream file(path == nullptr ? "/etc/cufile.json" : path);
    std::string text, line;
    while (std::getline(file, line)) {
        text += line.substr(0, line.find("//"));
        text += ' ';
    }
    return text;
}

// The value after "key": in the text; only numbers and flags are asked for, and their names occur once in that file.
std::string value_of(std::string_view text, std::string_view key) {
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

// By call, else by the variable, else by the file, else as it normally is.
bool decided(const std::optional<bool>& by_call, const char* name, const std::string& in_file, bool normally) {
    if (by_call) {
        return *by_call;
    }
    if (const auto by_variable = variable(name)) {
        return *by_variable;
    }
    return in_file.empty() ? normally : in_file == "true";
}

template <typename Value> Error give(std::string_view symbol, Value* where, int which, int count, Value (*read)(int)) {
    return entry(symbol, [&] {
        if (where == nullptr || which < 0 || which >= count || (count == bool_parameters && which == retired_bool)) {
            throw Refused{invalid_value};
        }
        *where = read(which);
    });
}

void require_closed() {
    if (is_open()) {
        throw Refused{driver_already_open};
    }
}

} // namespace

std::size_t size_parameter(int which) {
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    return all.size[which].value_or(sizes[which].normally);
}

bool bool_parameter(int which) {
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    return all.flag[which].value_or(bools[which]);
}

void set_size_parameter(int which, std::size_t value) {
    const Limits& limits = sizes[which];
    if (value < limits.least || (limits.most != 0 && value > limits.most)) {
        throw Refused{invalid_value};
    }
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    all.size[which] = value;
}

void set_bool_parameter(int which, bool value) {
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    all.flag[which] = value;
}

Modes apply_parameters() {
    const std::string file = configuration();
    Parameters& all = parameters();
    std::lock_guard lock(all.mutex);
    Modes modes;
    modes.allow_compat = decided(all.flag[bool_allow_compat], "CUFILE_ALLOW_COMPAT_MODE",
                                 value_of(file, "allow_compat_mode"), bools[bool_allow_compat]);
    modes.force_compat = decided(all.flag[bool_force_compat], "CUFILE_FORCE_COMPAT_MODE",
                                 value_of(file, "force_compat_mode"), bools[bool_force_compat]);
    // What is in force is what the caller reads from now on.
    all.flag[bool_allow_compat] = modes.allow_compat;
    all.flag[bool_force_compat] = modes.force_compat;
    const char* const level = std::getenv("CUFILE_STATS_LEVEL");
    const std::string wanted = level != nullptr ? level : value_of(file, "cufile_stats");
    if (all.size[size_profile_stats]) {
        use_level(static_cast<int>(*all.size[size_profile_stats]));
    } else if (!wanted.empty()) {
        use_level(std::atoi(wanted.c_str()));
    }
    return modes;
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterSizeT(int which, std::size_t* value) {
    return give("cuFileGetParameterSizeT", value, which, size_parameters, size_parameter);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterBool(int which, bool* value) {
    return give("cuFileGetParameterBool", value, which, bool_parameters, bool_parameter);
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterMinMaxValue(int which, std::size_t* least, std::size_t* most) {
    return entry("cuFileGetParameterMinMaxValue", [&] {
        if (least == nullptr || most == nullptr || which <= size_profile_stats || which >= size_parameters) {
            throw Refused{invalid_value};
        }
        *least = sizes[which].least;
        *most = sizes[which].most;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileGetParameterString(int which, char* value, int length_bytes) {
    return entry("cuFileGetParameterString", [&] {
        Parameters& all = parameters();
        std::lock_guard lock(all.mutex);
        if (value == nullptr || which < 0 || which >= string_parameters || length_bytes <= 0 ||
            all.text[which].size() >= static_cast<std::size_t>(length_bytes)) {
            throw Refused{invalid_value};
        }
        std::memcpy(value, all.text[which].c_str(), all.text[which].size() + 1);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterSizeT(int which, std::size_t value) {
    return entry("cuFileSetParameterSizeT", [&] {
        require_closed();
        if (which < 0 || which >= size_parameters) {
            throw Refused{invalid_value};
        }
        set_size_parameter(which, value);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterBool(int which, bool value) {
    return entry("cuFileSetParameterBool", [&] {
        require_closed();
        if (which < 0 || which >= bool_parameters || which == retired_bool) {
            throw Refused{invalid_value};
        }
        set_bool_parameter(which, value);
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterString(int which, const char* value) {
    return entry("cuFileSetParameterString", [&] {
        require_closed();
        if (value == nullptr || which < 0 || which >= string_parameters) {
            throw Refused{invalid_value};
        }
        Parameters& all = parameters();
        std::lock_guard lock(all.mutex);
        all.text[which] = value;
    });
}

GDRKIT_CUFILE_ENTRY Error cuFileSetParameterPosixPoolSlabArray(const std::size_t* sizes_kb, const std::size_t* counts,
                                                               int length) {
    return entry("cuFileSetParameterPosixPoolSlabArray", [&] {
        require_closed();
        if (sizes_kb == nullptr || counts == nullptr || length <= 0) {
            throw Refused{invalid_value};
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
            throw Refused{invalid_value};
        }
        std::copy(all.slab_kb.begin(), all.slab_kb.end(), sizes_kb);
        std::copy(all.slab_count.begin(), all.slab_count.end(), counts);
    });
}

} // namespace gdrkit::twin::cufile
