// gdrkit.verbs._initiator: the RDMA initiator of initiator.hpp for Python. The GIL is released during each measurement.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>

#include "common/gil.hpp"
#include "verbs/error.hpp"
#include "verbs/initiator.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace gdrkit::verbs {

namespace {

[[noreturn]] void raise_os_error(int error_number, const std::string& message) {
    PyErr_SetObject(PyExc_OSError, nb::make_tuple(error_number, message).ptr());
    throw nb::python_error();
}

// Runs a function without the GIL and returns its result. An Error becomes an OSError with the errno.
template <typename Function> auto run_without_gil(const Function& function) {
    int error_number = 0;
    std::string message;
    {
        const GilRelease release;
        try {
            return function();
        } catch (const Error& error) {
            error_number = error.error_number();
            message = error.what();
        }
    }
    raise_os_error(error_number, message);
}

Endpoint parse_endpoint(const nb::dict& fields) {
    Endpoint endpoint;
    endpoint.qp_number = nb::cast<std::uint32_t>(fields["qp_number"]);
    endpoint.psn = nb::cast<std::uint32_t>(fields["psn"]);
    endpoint.lid = nb::cast<std::uint16_t>(fields["lid"]);
    endpoint.mtu_bytes = nb::cast<std::uint32_t>(fields["mtu_bytes"]);
    if (!parse_gid(nb::cast<std::string>(fields["gid"]), endpoint.gid)) {
        raise_os_error(EINVAL, "gid must be eight groups of four hexadecimal digits with colons between them");
    }
    return endpoint;
}

nb::dict make_endpoint_dict(const Endpoint& endpoint) {
    nb::dict fields;
    fields["qp_number"] = endpoint.qp_number;
    fields["psn"] = endpoint.psn;
    fields["gid"] = format_gid(endpoint.gid);
    fields["lid"] = endpoint.lid;
    fields["mtu_bytes"] = endpoint.mtu_bytes;
    return fields;
}

Burst make_burst(bool to_peer, std::uint64_t remote_address, std::uint32_t remote_key, std::uint32_t length_bytes,
                 std::uint32_t slots, std::uint64_t operations, std::uint32_t depth, std::uint32_t list_length,
                 double time_limit_s) {
    Burst burst;
    burst.direction = to_peer ? Transfer::Direction::to_peer : Transfer::Direction::from_peer;
    burst.length_bytes = length_bytes;
    burst.slot_count = slots;
    burst.operation_count = operations;
    burst.depth = depth;
    burst.list_length = list_length;
    burst.remote_address = remote_address;
    burst.remote_key = remote_key;
    burst.time_limit = std::chrono::nanoseconds(static_cast<std::int64_t>(time_limit_s * 1e9));
    return burst;
}

nb::dict make_outcome_dict(const Outcome& outcome) {
    nb::dict fields;
    fields["elapsed_ns"] = outcome.elapsed_ns;
    fields["done"] = outcome.completed_count;
    fields["status"] = static_cast<int>(outcome.status);
    fields["vendor_error"] = outcome.vendor_error;
    fields["timed_out"] = outcome.timed_out;
    return fields;
}

void bind_initiator(nb::module_& module) {
    nb::class_<Initiator>(module, "Initiator",
                          "Queue pairs and their local memory. connect(), run() and run_singly() release the GIL.")
        .def(
            "__init__",
            [](Initiator* self, const std::string& device, std::size_t memory_bytes, std::size_t queue_pairs,
               std::uint32_t depth_max) {
                run_without_gil([&] { return new (self) Initiator(device, memory_bytes, queue_pairs, depth_max); });
            },
            "device"_a, nb::kw_only(), "memory_bytes"_a, "queue_pairs"_a, "depth_max"_a)
        .def_prop_ro("endpoints",
                     [](const Initiator& self) {
                         nb::list endpoints;
                         for (const Endpoint& endpoint : self.endpoints()) {
                             endpoints.append(make_endpoint_dict(endpoint));
                         }
                         return endpoints;
                     })
        .def_prop_ro("reads_max", &Initiator::reads_max)
        .def_prop_ro("address",
                     [](const Initiator& self) { return reinterpret_cast<std::uintptr_t>(self.memory().data()); })
        .def(
            "connect",
            [](Initiator& self, const std::vector<nb::dict>& peers, std::uint8_t reads_max) {
                std::vector<Endpoint> endpoints;
                for (const nb::dict& peer : peers) {
                    endpoints.push_back(parse_endpoint(peer));
                }
                run_without_gil([&] { self.connect(endpoints, reads_max); });
            },
            "peers"_a, nb::kw_only(), "reads_max"_a)
        .def(
            "memory",
            [](Initiator& self) {
                const auto memory = self.memory();
                PyObject* const view = PyMemoryView_FromMemory(reinterpret_cast<char*>(memory.data()),
                                                               static_cast<Py_ssize_t>(memory.size()), PyBUF_WRITE);
                return nb::steal<nb::object>(view);
            },
            nb::sig("def memory(self) -> memoryview"),
            "Return a view of the memory. Delete the view before this object, because the view does not own the "
            "memory.")
        .def(
            "run",
            [](Initiator& self, bool to_peer, std::uint64_t remote_address, std::uint32_t remote_key,
               std::uint32_t length_bytes, std::uint32_t slots, std::uint64_t operations, std::uint32_t depth,
               std::uint32_t list_length, double time_limit_s) {
                const Burst burst = make_burst(to_peer, remote_address, remote_key, length_bytes, slots, operations,
                                               depth, list_length, time_limit_s);
                return make_outcome_dict(run_without_gil([&] { return self.run(burst); }));
            },
            nb::kw_only(), "to_peer"_a, "remote_address"_a, "remote_key"_a, "length_bytes"_a, "slots"_a, "operations"_a,
            "depth"_a, "list_length"_a, "time_limit_s"_a)
        .def(
            "run_singly",
            [](Initiator& self, bool to_peer, std::uint64_t remote_address, std::uint32_t remote_key,
               std::uint32_t length_bytes, std::uint32_t slots, std::uint64_t operations, double time_limit_s) {
                const Burst burst = make_burst(to_peer, remote_address, remote_key, length_bytes, slots, operations, 1,
                                               1, time_limit_s);
                std::vector<std::uint64_t> times_ns(operations);
                nb::dict fields = make_outcome_dict(run_without_gil([&] { return self.run_singly(burst, times_ns); }));
                fields["times_ns"] = times_ns;
                return fields;
            },
            nb::kw_only(), "to_peer"_a, "remote_address"_a, "remote_key"_a, "length_bytes"_a, "slots"_a, "operations"_a,
            "time_limit_s"_a);
}

} // namespace

} // namespace gdrkit::verbs

NB_MODULE(_initiator, module) {
    module.doc() = "An RDMA initiator that measures bursts and single operations against a passive peer.";
    gdrkit::verbs::bind_initiator(module);
}
