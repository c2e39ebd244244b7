// The mapping of a ring in the agent, guarded against an application that truncates it.
#include "usrbio/agent/ring.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace gdrkit::usrbio::agent {

SharedMapping::SharedMapping(int fd) {
    struct stat attributes {};
    if (fstat(fd, &attributes) != 0)
        throw std::system_error(errno, std::generic_category(), "fstat of the ring failed");
    if (!S_ISREG(attributes.st_mode) || attributes.st_size <= 0 ||
        ring_entries(static_cast<std::size_t>(attributes.st_size)) == 0)
        throw std::system_error(EINVAL, std::generic_category(), "the shared memory does not have the size of a ring");
    length_ = static_cast<std::size_t>(attributes.st_size);
    base_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base_ == MAP_FAILED)
        throw std::system_error(errno, std::generic_category(), "mmap of the ring failed");
    try {
        guard_ = std::make_unique<BusGuard>(base_, length_);
    } catch (...) {
        munmap(base_, length_);
        throw;
    }
}

SharedMapping::~SharedMapping() {
    guard_.reset();
    munmap(base_, length_);
}

Ring::Ring(Client& owner, const RingSpec& ring_spec, int fd) : client(owner), spec(ring_spec), memory(fd) {
    const auto timeout_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(ring_spec.timeout).count();
    const int status = AgentRing::attach(memory.base(), memory.length(), ring_spec.io_depth, timeout_ns, agent_side);
    if (status != 0)
        throw std::system_error(-status, std::generic_category(), "the shared memory does not contain a valid ring");
}

} // namespace gdrkit::usrbio::agent
