// The Python module gdrkit.usrbio._hf3fs: a binding of the hf3fs user-space I/O interface (hf3fs_usrbio.h) for any
// client library that implements it.

#include "common/gil.hpp"
#include "hf3fs_errors.hpp"
#include "hf3fs_ioring.hpp"
#include "hf3fs_iovec.hpp"
#include "hf3fs_library.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cerrno>
#include <optional>

namespace gdrkit::usrbio {

using namespace nb::literals;

namespace {

std::optional<std::string> extract_mount_point(const std::string& path) {
    auto library_function = GDRKIT_REQUIRE(hf3fs_extract_mount_point);
    std::array<char, 4096> mount_path{};
    const int needed_bytes = library_function(mount_path.data(), static_cast<int>(mount_path.size()), path.c_str());
    if (needed_bytes < 0) {
        return std::nullopt;
    }
    if (static_cast<std::size_t>(needed_bytes) > mount_path.size()) {
        nb::dict error_arguments;
        error_arguments["path"] = path;
        raise_call_error("hf3fs_extract_mount_point", ENAMETOOLONG, error_arguments);
    }
    return std::string(mount_path.data());
}

nb::dict make_fd_error_arguments(int fd) {
    nb::dict error_arguments;
    error_arguments["fd"] = fd;
    return error_arguments;
}

void register_fd(int fd, std::uint64_t flags) {
    const auto library_function = GDRKIT_REQUIRE(hf3fs_reg_fd);
    int status = 0;
    {
        const GilRelease release;
        status = library_function(fd, flags);
    }
    if (status > 0) { // hf3fs_reg_fd returns a positive errno on failure, and 0 or less on success.
        raise_call_error("hf3fs_reg_fd", status, make_fd_error_arguments(fd));
    }
}

void deregister_fd(int fd) {
    const auto library_function = GDRKIT_REQUIRE(hf3fs_dereg_fd);
    const GilRelease release;
    library_function(fd);
}

void hardlink(const std::string& target, const std::string& link_name) {
    const auto library_function = GDRKIT_REQUIRE(hf3fs_hardlink);
    int status = 0;
    {
        const GilRelease release;
        status = library_function(target.c_str(), link_name.c_str());
    }
    if (status != 0) {
        nb::dict error_arguments;
        error_arguments["target"] = target;
        error_arguments["link_name"] = link_name;
        raise_call_error("hf3fs_hardlink", std::abs(status), error_arguments);
    }
}

void punch_hole(int fd, const std::vector<std::size_t>& hole_begins, const std::vector<std::size_t>& hole_ends,
                std::size_t flags) {
    const auto library_function = GDRKIT_REQUIRE(hf3fs_punchhole);
    if (hole_begins.size() != hole_ends.size()) {
        raise_misuse_error("start and end must have the same length: each hole has a start and an end", "bad_argument");
    }
    if (hole_begins.size() > 1000) { // The limit of hf3fs_punchhole.
        raise_misuse_error("one call can punch at most 1000 holes: use several calls", "bad_argument");
    }
    int status = 0;
    {
        const GilRelease release;
        status =
            library_function(fd, static_cast<int>(hole_begins.size()), hole_begins.data(), hole_ends.data(), flags);
    }
    if (status != 0) {
        nb::dict error_arguments = make_fd_error_arguments(fd);
        error_arguments["holes"] = hole_begins.size();
        raise_call_error("hf3fs_punchhole", std::abs(status), error_arguments);
    }
}

// Raises the error of a failed call of `function_name`, a function of a memory pool, unless `status` is 0.
void check_pool_call(const char* function_name, int status) {
    if (status != 0) {
        raise_call_error(function_name, std::abs(status), nb::dict());
    }
}

nb::dict gpu_pool_statistics() {
    GpuPoolStatistics statistics{};
    check_pool_call("gdrkit_gpu_pool_query", GDRKIT_REQUIRE(gdrkit_gpu_pool_query)(&statistics, sizeof statistics));
    nb::dict statistics_dict;
    statistics_dict["idle_bytes_max"] = statistics.idle_bytes_max;
    statistics_dict["idle_blocks"] = statistics.idle_blocks;
    statistics_dict["idle_bytes"] = statistics.idle_bytes;
    statistics_dict["in_use_blocks"] = statistics.in_use_blocks;
    statistics_dict["in_use_bytes"] = statistics.in_use_bytes;
    statistics_dict["hits"] = statistics.hits;
    statistics_dict["misses"] = statistics.misses;
    statistics_dict["trimmed_blocks"] = statistics.trimmed_blocks;
    statistics_dict["refused_blocks"] = statistics.refused_blocks;
    return statistics_dict;
}

void limit_gpu_pool(std::size_t idle_bytes_max, unsigned idle_ms_max) {
    const auto library_function = GDRKIT_REQUIRE(gdrkit_gpu_pool_limit);
    int status = 0;
    {
        const GilRelease release;
        status = library_function(idle_bytes_max, idle_ms_max);
    }
    check_pool_call("gdrkit_gpu_pool_limit", status);
}

// Calls `library_function`: gdrkit_gpu_pool_trim or gdrkit_host_pool_trim.
void trim(const char* function_name, int (*library_function)(std::size_t), std::size_t idle_bytes_max) {
    int status = 0;
    {
        const GilRelease release;
        status = library_function(idle_bytes_max);
    }
    check_pool_call(function_name, status);
}

void trim_gpu_pool(std::size_t idle_bytes_max) {
    trim("gdrkit_gpu_pool_trim", GDRKIT_REQUIRE(gdrkit_gpu_pool_trim), idle_bytes_max);
}

void trim_host_pool(std::size_t idle_bytes_max) {
    trim("gdrkit_host_pool_trim", GDRKIT_REQUIRE(gdrkit_host_pool_trim), idle_bytes_max);
}

} // namespace

NB_MODULE(_hf3fs, module) {
    store_module_reference(module);
    // If an agent does not complete operations, an ioring leaks their memory on purpose, so do not warn of leaks.
    nb::set_leak_warnings(false);
    module.def("open_library", &open_library, "path"_a);
    module.def("function_names", &function_names);
    module.def("extract_mount_point", &extract_mount_point, "path"_a);
    module.def(
        "is_hf3fs", [](int fd) { return GDRKIT_REQUIRE(hf3fs_is_hf3fs)(fd); }, "fd"_a);
    module.def("register_fd", &register_fd, "fd"_a, "flags"_a = 0);
    module.def("deregister_fd", &deregister_fd, "fd"_a);
    module.def("hardlink", &hardlink, "target"_a, "link_name"_a);
    module.def("punch_hole", &punch_hole, "fd"_a, "start"_a, "end"_a, "flags"_a = 0);
    module.def("gdr_available", [] { return GDRKIT_REQUIRE(hf3fs_gdr_available)(); });
    module.def("gdr_device_count", [] { return GDRKIT_REQUIRE(hf3fs_gdr_device_count)(); });
    module.def("gpu_pool_statistics", &gpu_pool_statistics);
    module.def("limit_gpu_pool", &limit_gpu_pool, "idle_bytes_max"_a, "idle_ms_max"_a);
    module.def("trim_gpu_pool", &trim_gpu_pool, "idle_bytes_max"_a);
    module.def("trim_host_pool", &trim_host_pool, "idle_bytes_max"_a);
    bind_iovec(module);
    bind_ioring(module);
}

} // namespace gdrkit::usrbio
