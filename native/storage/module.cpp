// gdrkit.storage._engine, the native part of the storage server, whose control part is Python. Methods that may wait
// for a disk, a device or a thread release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstdio>
#include <map>
#include <system_error>

#include "common/gil.hpp"
#include "storage/crc32c.hpp"
#include "storage/open_beneath.hpp"
#include "storage/session.hpp"
#include "verbs/error.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace gdrkit::storage {

namespace {

[[noreturn]] void raise_os_error(int error_number, const std::string& message) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(error_number, message).ptr());
    throw nb::python_error();
}

// Runs a function without the GIL and returns its result. Turns a verbs::Error or std::system_error into an OSError
// with the same errno.
template <typename Function> auto run_without_gil(const Function& function) {
    int error_number = 0;
    std::string message;
    {
        const GilRelease release;
        try {
            return function();
        } catch (const verbs::Error& error) {
            error_number = error.error_number();
            message = error.what();
        } catch (const std::system_error& error) {
            error_number = error.code().value();
            message = error.what();
        }
    }
    raise_os_error(error_number, message);
}

// Raises an OSError if `status` is -errno.
void check_status(int status, const char* function_name) {
    if (status < 0) {
        raise_os_error(-status, function_name);
    }
}

// Holds the memory of an object with the buffer protocol. Until the destructor runs, the object cannot free or resize
// this memory.
struct BufferView {
    explicit BufferView(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_SIMPLE) != 0) {
            throw nb::python_error();
        }
    }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;
    ~BufferView() { PyBuffer_Release(&view); }
    Py_buffer view{};
};

template <std::uint32_t (*compute_crc)(const void*, std::size_t, std::uint32_t) noexcept>
std::uint32_t compute_checksum(nb::handle data, std::uint32_t initial_crc) {
    const BufferView buffer(data);
    const GilRelease release;
    return compute_crc(buffer.view.buf, static_cast<std::size_t>(buffer.view.len), initial_crc);
}

verbs::Endpoint parse_endpoint(const nb::dict& fields) {
    verbs::Endpoint endpoint;
    endpoint.qp_number = nb::cast<std::uint32_t>(fields["qp_number"]);
    endpoint.psn = nb::cast<std::uint32_t>(fields["psn"]);
    endpoint.lid = nb::cast<std::uint16_t>(fields["lid"]);
    endpoint.mtu_bytes = nb::cast<std::uint32_t>(fields["mtu_bytes"]);
    if (!verbs::parse_gid(nb::cast<std::string>(fields["gid"]), endpoint.gid)) {
        raise_os_error(EINVAL, "gid must be eight groups of four hexadecimal digits with colons between them");
    }
    return endpoint;
}

nb::dict make_endpoint_dict(const verbs::Endpoint& endpoint) {
    nb::dict fields;
    fields["qp_number"] = endpoint.qp_number;
    fields["psn"] = endpoint.psn;
    fields["gid"] = verbs::format_gid(endpoint.gid);
    fields["lid"] = endpoint.lid;
    fields["mtu_bytes"] = endpoint.mtu_bytes;
    return fields;
}

std::map<std::string, std::uint64_t> read_counters(Store& store) {
    const Counters& counters = store.counters();
    return {{"reads", counters.reads},
            {"writes", counters.writes},
            {"read_bytes", counters.read_bytes},
            {"written_bytes", counters.written_bytes},
            {"corruptions", counters.corruptions},
            {"outside_changes", counters.outside_changes}, // changes of files by other programs
            {"rdma_errors", counters.rdma_errors},
            {"refused_frames", counters.refused_frames},
            {"sessions", counters.sessions}};
}

void bind_files(nb::module_& module) {
    nb::class_<Store>(
        module, "Store",
        "The files of a store and their checksums (sums). `sums_folder_fd` is a descriptor of the folder with "
        "the sums files. `generation_fd` is a descriptor of the memory in which the server counts new sums files, or "
        "-1 if no other process reads the sums. The caller keeps these descriptors open and closes them.")
        .def(
            "__init__",
            [](Store* self, int sums_folder_fd, std::uint32_t chunk_bytes, int generation_fd) {
                if (chunk_bytes < 4096 || chunk_bytes > 65536 || (chunk_bytes & (chunk_bytes - 1)) != 0) {
                    raise_os_error(EINVAL, "chunk_bytes must be a power of two from 4096 to 65536");
                }
                new (self) Store(sums_folder_fd, chunk_bytes, generation_fd);
            },
            "sums_folder_fd"_a, "chunk_bytes"_a, nb::kw_only(), "generation_fd"_a = -1)
        .def(
            "adopt",
            [](Store& self, int fd, bool may_read, bool may_write) {
                Descriptor owned_descriptor(fd);
                return run_without_gil([&] { return self.adopt(std::move(owned_descriptor), may_read, may_write); });
            },
            "fd"_a, nb::kw_only(), "read"_a, "write"_a,
            "Return an OpenFile that owns the descriptor. If this function raises, it closes the descriptor.")
        .def("remove_sums", &Store::remove_sums, "inode"_a, nb::call_guard<GilRelease>())
        .def("counters", &read_counters);
    nb::class_<OpenFile>(module, "OpenFile", "An open file. It is closed with its last reference.")
        .def_prop_ro("fd", [](const OpenFile& self) { return self.fd.get(); })
        .def_ro("may_read", &OpenFile::may_read)
        .def_ro("may_write", &OpenFile::may_write)
        .def(
            "truncate",
            [](OpenFile& self, std::uint64_t size_bytes) {
                check_status(run_without_gil([&] { return self.inode->truncate(self.fd.get(), size_bytes); }),
                             "ftruncate");
            },
            "size_bytes"_a)
        .def(
            "punch",
            [](OpenFile& self, std::uint64_t begin, std::uint64_t end) {
                check_status(run_without_gil([&] { return self.inode->punch(self.fd.get(), begin, end); }),
                             "fallocate");
            },
            "begin"_a, "end"_a)
        .def(
            "set_times",
            [](OpenFile& self, std::optional<std::int64_t> access_ns, std::optional<std::int64_t> modification_ns) {
                check_status(
                    run_without_gil([&] { return self.inode->set_times(self.fd.get(), access_ns, modification_ns); }),
                    "futimens");
            },
            "access_time_ns"_a.none(), "modification_time_ns"_a.none());
}

void bind_sessions(nb::module_& module) {
    nb::class_<Fabric>(
        module, "Fabric",
        "The open RDMA devices of a server. An empty list of names opens every device with an active port.")
        .def(
            "__init__",
            [](Fabric* self, const std::vector<std::string>& device_names) {
                run_without_gil([&] { return new (self) Fabric(device_names); });
            },
            "names"_a)
        .def_prop_ro("names", [](const Fabric& self) {
            std::vector<std::string> names;
            for (const auto& device : self.devices()) {
                names.push_back(device->name());
            }
            return names;
        });
    nb::class_<Session>(
        module, "Session",
        "The queue pairs, the open files and the thread of one client. `outstanding_max` is the largest number of "
        "operations without a result, and `length_bytes_max` the largest length of one operation.")
        .def(
            "__init__",
            [](Session* self, std::shared_ptr<Store> store, std::shared_ptr<Fabric> fabric,
               const std::vector<nb::dict>& endpoint_dicts, std::uint32_t outstanding_max,
               std::uint64_t length_bytes_max) {
                std::vector<verbs::Endpoint> client_endpoints;
                for (const nb::dict& endpoint_dict : endpoint_dicts) {
                    client_endpoints.push_back(parse_endpoint(endpoint_dict));
                }
                SessionLimits limits;
                limits.outstanding_max = outstanding_max;
                limits.length_bytes_max = length_bytes_max;
                run_without_gil(
                    [&] { return new (self) Session(std::move(store), std::move(fabric), client_endpoints, limits); });
            },
            "store"_a, "fabric"_a, "peer_endpoints"_a, nb::kw_only(), "outstanding_max"_a, "length_bytes_max"_a)
        .def_prop_ro("endpoints",
                     [](const Session& self) {
                         nb::list endpoints;
                         for (const verbs::Endpoint& endpoint : self.endpoints()) {
                             endpoints.append(make_endpoint_dict(endpoint));
                         }
                         return endpoints;
                     })
        // Largest number of outstanding RDMA READs of the server on one queue pair.
        .def_prop_ro("reads_max", &Session::reads_max)
        // A descriptor that becomes readable when the session has ended.
        .def_prop_ro("ended_fd", &Session::ended_fd)
        .def("add_file", &Session::add_file, "handle"_a, "file"_a)
        .def("remove_file", &Session::remove_file, "handle"_a, nb::call_guard<GilRelease>())
        .def(
            "start",
            [](Session& self, int fd) {
                Descriptor owned_descriptor(fd);
                run_without_gil([&] { self.start(std::move(owned_descriptor)); });
            },
            "data_fd"_a,
            "Start the thread that serves the data connection. The session owns the descriptor, even if the call "
            "raises.")
        .def("close", &Session::close, nb::call_guard<GilRelease>());
}

} // namespace

} // namespace gdrkit::storage

NB_MODULE(_engine, module) {
    namespace storage = gdrkit::storage;
    module.doc() = "The native part of the storage service: RDMA transfers, files and their checksums.";
    // Largest write for which a client may send the checksum: the server transfers such a write in one segment.
    module.attr("CHECKSUM_GIVEN_BYTES_MAX") = storage::SessionLimits{}.segment_bytes;
    module.def("crc32c", &storage::compute_checksum<storage::crc32c>, "data"_a, "initial"_a = 0);
    module.def("crc32c_portable", &storage::compute_checksum<storage::crc32c_portable>, "data"_a, "initial"_a = 0);
    module.def("crc32c_combine", &storage::crc32c_combine, "first"_a, "second"_a, "second_bytes"_a);
    module.def(
        "open_beneath",
        // If `by_component` is true, this function works as on kernels without openat2(2).
        [](int folder, const nb::bytes& path, int flags, unsigned mode, bool by_component) {
            const std::string path_string(path.c_str(), path.size());
            const int descriptor = storage::run_without_gil([&] {
                return by_component ? storage::open_beneath_by_component(folder, path_string, flags, mode)
                                    : storage::open_beneath(folder, path_string, flags, mode);
            });
            storage::check_status(descriptor, "open");
            return descriptor;
        },
        "folder"_a, "path"_a, "flags"_a, "mode"_a = 0, "by_component"_a = false);
    module.def(
        "rename",
        [](int from_folder, const nb::bytes& name, int to_folder, const nb::bytes& new_name, bool exclusive,
           bool exchange) {
            const unsigned flags = (exclusive ? RENAME_NOREPLACE : 0U) | (exchange ? RENAME_EXCHANGE : 0U);
            storage::check_status(
                storage::run_without_gil([&] {
                    return renameat2(from_folder, name.c_str(), to_folder, new_name.c_str(), flags) != 0 ? -errno : 0;
                }),
                "renameat2");
        },
        "from_folder"_a, "name"_a, "to_folder"_a, "new_name"_a, nb::kw_only(), "exclusive"_a, "exchange"_a);
    storage::bind_files(module);
    storage::bind_sessions(module);
}
