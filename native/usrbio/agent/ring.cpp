#include "usrbio/agent/ring.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <system_error>

namespace gdrkit::usrbio::agent {

SharedMapping::SharedMapping(int fd) {
    struct stat found {};
    if (fstat(fd, &found) != 0)
        throw std::system_error(errno, std::generic_category(), "fstat");
    if (!S_ISREG(found.st_mode) || found.st_size <= 0 || ring_entries(static_cast<std::size_t>(found.st_size)) == 0)
        throw std::system_error(EINVAL, std::generic_category(), "no ring has the size of this shared memory");
    length_ = static_cast<std::size_t>(found.st_size);
    base_ = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base_ == MAP_FAILED)
        throw std::system_error(errno, std::generic_category(), "mmap");
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

Ring::Ring(Client& owner, const RingSpec& what, int fd) : client(owner), spec(what), memory(fd) {
    const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(what.timeout).count();
    const int status = AgentRing::attach(memory.base(), memory.length(), what.io_depth, timeout, side);
    if (status != 0)
        throw std::system_error(-status, std::generic_category(), "this shared memory is no new ring");
}

} // namespace gdrkit::usrbio::agent
