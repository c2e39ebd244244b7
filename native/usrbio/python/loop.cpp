// The Python module gdrkit.usrbio._loop: the binding of the agent's loop (native/usrbio/agent). Every call that waits
// releases the GIL.
#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <semaphore.h>

#include <cerrno>
#include <memory>
#include <system_error>
#include <tuple>

#include <nanobind/stl/tuple.h>

#include "common/gil.hpp"
#include "usrbio/agent/loop.hpp"

namespace nb = nanobind;
using namespace gdrkit::usrbio::agent;

namespace {

using Milliseconds = std::chrono::milliseconds;
using gdrkit::GilRelease;

Id parse_id(const nb::bytes& id_bytes) {
    Id id{};
    if (id_bytes.size() != id.size())
        throw std::system_error(EINVAL, std::generic_category(), "an id must have 16 bytes");
    std::copy_n(static_cast<const std::uint8_t*>(id_bytes.data()), id.size(), id.begin());
    return id;
}

nb::bytes pack_id(const Id& id) {
    return nb::bytes(id.data(), id.size());
}

// Converts std::system_error to OSError with the same errno.
void translate_system_error(const std::exception_ptr& exception, void*) {
    try {
        std::rethrow_exception(exception);
    } catch (const std::system_error& error) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
}

// Creates a named semaphore with the value 0 and the permissions `mode`. The agent and its clients open it by its name.
void create_semaphore(const std::string& name, unsigned mode) {
    sem_t* semaphore = sem_open(name.c_str(), O_CREAT | O_EXCL, static_cast<mode_t>(mode), 0);
    if (semaphore == SEM_FAILED)
        throw std::system_error(errno, std::generic_category(), "sem_open(" + name + ") failed");
    sem_close(semaphore);
}

// Returns a duplicate of a descriptor. Returns an empty Descriptor for -1, or if the process has too many descriptors.
// For a file without a descriptor, the loop sends every operation to the storage server.
gdrkit::Descriptor duplicate(int fd) {
    return gdrkit::Descriptor(fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0));
}

nb::dict make_statistics_dict(Loop& loop) {
    Statistics statistics;
    {
        const GilRelease release;
        statistics = loop.statistics();
    }
    nb::dict statistics_dict;
    statistics_dict["operations"] = statistics.operations;
    statistics_dict["local_reads"] = statistics.local_reads;
    statistics_dict["completions"] = statistics.completions;
    statistics_dict["bytes"] = statistics.bytes;
    statistics_dict["refused"] = statistics.refused;
    statistics_dict["failed"] = statistics.failed;
    statistics_dict["batches"] = statistics.batches;
    statistics_dict["sleeps"] = statistics.sleeps;
    statistics_dict["broken_rings"] = statistics.broken_rings;
    statistics_dict["disconnects"] = statistics.disconnects;
    statistics_dict["outstanding"] = statistics.outstanding;
    return statistics_dict;
}

const char* get_event_kind_name(Event::Kind kind) {
    switch (kind) {
    case Event::Kind::ring_broken:
        return "ring_broken";
    case Event::Kind::silent:
        return "silent";
    case Event::Kind::disconnected:
        break;
    }
    return "disconnected";
}

nb::list wait_for_events(Loop& loop, int timeout_ms) {
    std::vector<Event> events;
    {
        const GilRelease release;
        events = loop.events(Milliseconds(timeout_ms));
    }
    nb::list event_tuples;
    for (const Event& event : events)
        event_tuples.append(
            nb::make_tuple(get_event_kind_name(event.kind), event.client, pack_id(event.id), event.generation));
    return event_tuples;
}

} // namespace

NB_MODULE(_loop, module) {
    module.doc() = "The agent's loop, which executes the operations of the rings of applications.";
    nb::register_exception_translator(translate_system_error);
    module.def("limit_arenas", &limit_arenas);
    module.def("create_semaphore", &create_semaphore, nb::arg("name"), nb::arg("mode"));

    nb::class_<Loop>(module, "Loop")
        .def(
            "__init__",
            [](Loop* self, const std::array<std::string, priority_class_count>& semaphore_names, int spin_us,
               std::size_t outstanding_max, std::uint32_t server_timeout_ms) {
                Options options;
                options.spin_time = std::chrono::microseconds(spin_us);
                options.outstanding_max = outstanding_max;
                options.server_timeout = Milliseconds(server_timeout_ms);
                new (self) Loop(options, semaphore_names);
            },
            nb::kw_only(), nb::arg("semaphore_names"), nb::arg("spin_us"), nb::arg("outstanding_max"),
            nb::arg("server_timeout_ms"))
        .def("add_client", &Loop::add_client, nb::arg("client_number"), nb::call_guard<GilRelease>())
        .def("remove_client", &Loop::remove_client, nb::arg("client_number"), nb::call_guard<GilRelease>())
        .def(
            "add_buffer",
            [](Loop& loop, std::uint64_t client_number, const nb::bytes& id, std::uint64_t length,
               std::uint64_t block_bytes,
               const std::vector<std::tuple<std::uint64_t, std::uint32_t>>& address_rkey_pairs,
               std::vector<std::uint16_t> preferred_nics, std::uintptr_t mapping_address) {
                BufferSpec spec{.id = parse_id(id),
                                .length = length,
                                .block_bytes = block_bytes,
                                .remote_keys = {},
                                .preferred_nics = std::move(preferred_nics),
                                .mapping = mapping_address};
                for (const auto& [address, rkey] : address_rkey_pairs)
                    spec.remote_keys.push_back({address, rkey});
                const GilRelease release;
                loop.add_buffer(client_number, spec);
            },
            nb::arg("client_number"), nb::arg("id"), nb::kw_only(), nb::arg("length_bytes"), nb::arg("block_bytes"),
            nb::arg("addresses_and_rkeys"), nb::arg("preferred_nic_indices"), nb::arg("host_address") = 0)
        .def(
            "set_file",
            [](Loop& loop, std::uint64_t client_number, std::uint64_t inode, std::uint64_t read_handle,
               std::uint64_t write_handle, bool readable, bool writable, int file_fd) {
                const FileSpec spec{inode, read_handle, write_handle, readable, writable};
                const GilRelease release;
                loop.set_file(client_number, spec, duplicate(file_fd));
            },
            nb::arg("client_number"), nb::arg("inode"), nb::kw_only(), nb::arg("read_handle"), nb::arg("write_handle"),
            nb::arg("readable"), nb::arg("writable"), nb::arg("file_fd") = -1)
        .def(
            "set_local_store",
            [](Loop& loop, int checksums_folder_fd, int generation_fd) {
                loop.set_local_store(duplicate(checksums_folder_fd), duplicate(generation_fd));
            },
            nb::arg("checksums_folder_fd"), nb::arg("generation_fd"), nb::call_guard<GilRelease>())
        .def(
            "add_ring",
            [](Loop& loop, std::uint64_t client_number, const nb::bytes& id, int fd, bool for_read, int io_depth,
               int priority, std::uint32_t timeout_ms, std::uint64_t flags) {
                const RingSpec spec{parse_id(id), for_read, io_depth, priority, Milliseconds(timeout_ms), flags};
                const GilRelease release;
                loop.add_ring(client_number, spec, fd);
            },
            nb::arg("client_number"), nb::arg("id"), nb::kw_only(), nb::arg("fd"), nb::arg("for_read"),
            nb::arg("io_depth"), nb::arg("priority"), nb::arg("timeout_ms"), nb::arg("flags"))
        .def(
            "remove_buffer",
            [](Loop& loop, std::uint64_t client_number, const nb::bytes& id, int timeout_ms) {
                const Id buffer_id = parse_id(id);
                const GilRelease release;
                return loop.remove_buffer(client_number, buffer_id, Milliseconds(timeout_ms));
            },
            nb::arg("client_number"), nb::arg("id"), nb::kw_only(), nb::arg("timeout_ms"))
        .def(
            "remove_ring",
            [](Loop& loop, std::uint64_t client_number, const nb::bytes& id, int timeout_ms) {
                const Id ring_id = parse_id(id);
                const GilRelease release;
                return loop.remove_ring(client_number, ring_id, Milliseconds(timeout_ms));
            },
            nb::arg("client_number"), nb::arg("id"), nb::kw_only(), nb::arg("timeout_ms"))
        .def(
            "remove_file",
            [](Loop& loop, std::uint64_t client_number, std::uint64_t inode, int timeout_ms) {
                const GilRelease release;
                return loop.remove_file(client_number, inode, Milliseconds(timeout_ms));
            },
            nb::arg("client_number"), nb::arg("inode"), nb::kw_only(), nb::arg("timeout_ms"))
        .def("connect", &Loop::connect, nb::arg("socket_fd"), nb::kw_only(), nb::arg("queue_pair_nic_indices"),
             nb::arg("generation"), nb::call_guard<GilRelease>(),
             "Send operations over a socket. The loop owns the socket, and closes it even if this call fails.")
        .def("disconnect", &Loop::disconnect, nb::call_guard<GilRelease>())
        .def("abandon", &Loop::abandon, nb::call_guard<GilRelease>())
        .def("statistics", &make_statistics_dict)
        .def("events", &wait_for_events, nb::arg("timeout_ms"))
        .def("stop", &Loop::stop, nb::call_guard<GilRelease>());
}
