// Counters of the bytes that the requests of a device move. One set of counters is for this process. The other set is
// for the port: all processes of the domain (the emulated machine) share it, and /sys/class/infiniband shows it.
#pragma once

#include <atomic>
#include <cstdint>

namespace gdrkit::twin::verbs {

enum class PortDirection { sent, received };
enum class Side { requester, responder };

// Count, at the port of a device, one message or one chunk of a message. A chunk must consist of whole packets.
void count_at_port(unsigned device_index, PortDirection direction, std::uint64_t length_bytes);

// Counts the payload bytes of one kind of request. `direction` is the direction of the payload at the port. The bytes
// of the requester also count as moved in the report of `gdrkit run`.
class PayloadCounter {
public:
    PayloadCounter(unsigned device_index, PortDirection direction, Side side)
        : device_index_(device_index), direction_(direction), side_(side) {}

    // Count one message, or one chunk of a message. A chunk must consist of whole packets.
    void operator+=(std::uint64_t length_bytes);
    // Count bytes that another process has counted at the port.
    void add_without_port(std::uint64_t length_bytes) { bytes_.fetch_add(length_bytes, std::memory_order_relaxed); }
    operator std::uint64_t() const { return bytes_.load(std::memory_order_relaxed); }

private:
    std::atomic<std::uint64_t> bytes_{0};
    unsigned device_index_;
    PortDirection direction_;
    Side side_;
};

} // namespace gdrkit::twin::verbs
