// Implements access to memory regions. Each access holds a shared lock, so that deregistration waits until the access
// has ended.

#include "ibverbs/region.hpp"

#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "ibverbs/grants.hpp"

namespace gdrkit::twin::verbs {

RegionError Region::read(std::uint64_t address, BounceBuffer* bounce, std::size_t bounce_offset,
                         std::size_t size_bytes) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    return memory_->read(address - iova, bounce, bounce_offset, size_bytes) == 0 ? RegionError::none
                                                                                 : RegionError::fault;
}

RegionError Region::write(std::uint64_t address, const BounceBuffer& bounce, std::size_t bounce_offset,
                          std::size_t size_bytes) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    return memory_->write(address - iova, bounce, bounce_offset, size_bytes) == 0 ? RegionError::none
                                                                                  : RegionError::fault;
}

bool Region::is_mapped() {
    std::shared_lock lock(mutex_);
    return memory_ != nullptr && memory_->mapped_address(0) != nullptr;
}

RegionError Region::splice_to_pipe(std::uint64_t address, Pipe* pipe, std::size_t size_bytes) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    return pipe->splice_in(memory_->mapped_address(address - iova), size_bytes) == 0 ? RegionError::none
                                                                                     : RegionError::fault;
}

RegionError Region::read_from_pipe(std::uint64_t address, Pipe* pipe, std::size_t size_bytes) {
    std::shared_lock lock(mutex_);
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    const int error = pipe->read(memory_->mapped_address(address - iova), size_bytes);
    return error == 0 ? RegionError::none : error == EPIPE ? RegionError::lost : RegionError::fault;
}

// Replace addresses in the region by addresses in this process. The caller holds the lock and has checked memory_.
void Region::translate_to_mapped_addresses(std::span<iovec> chunks) {
    for (iovec& chunk : chunks) {
        chunk.iov_base = memory_->mapped_address(reinterpret_cast<std::uint64_t>(chunk.iov_base) - iova);
    }
}

RegionError Region::splice_to_pipe(std::span<iovec> chunks, Pipe* pipe, std::size_t* succeeded_count) {
    std::shared_lock lock(mutex_);
    *succeeded_count = 0;
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    translate_to_mapped_addresses(chunks);
    return pipe->splice_in(chunks, succeeded_count) == 0 ? RegionError::none : RegionError::fault;
}

RegionError Region::read_from_pipe(std::span<iovec> chunks, Pipe* pipe, std::size_t* succeeded_count) {
    std::shared_lock lock(mutex_);
    *succeeded_count = 0;
    if (memory_ == nullptr) {
        return RegionError::refused;
    }
    translate_to_mapped_addresses(chunks);
    const int error = pipe->read(chunks, succeeded_count);
    return error == 0 ? RegionError::none : error == EPIPE ? RegionError::lost : RegionError::fault;
}

RegionError Region::atomic_update(std::uint64_t address, std::uint64_t* original_value,
                                  const std::function<std::uint64_t(std::uint64_t)>& compute_new) {
    // All regions share this mutex, because two regions may cover the same memory.
    static std::mutex* const atomic_mutex = new std::mutex;
    std::lock_guard lock(*atomic_mutex);
    // The buffer is not shared with a peer, so that no peer can change the value between the read and the write.
    static BounceBuffer* bounce = nullptr;
    if (bounce == nullptr) {
        bounce = BounceBuffer::make(sizeof *original_value).release();
    }
    if (bounce == nullptr) {
        return RegionError::fault;
    }
    if (const RegionError error = read(address, bounce, 0, sizeof *original_value); error != RegionError::none) {
        return error;
    }
    std::memcpy(original_value, bounce->data_at(0), sizeof *original_value);
    const std::uint64_t new_value = compute_new(*original_value);
    std::memcpy(bounce->data_at(0), &new_value, sizeof new_value);
    return write(address, *bounce, 0, sizeof new_value);
}

std::byte* Region::add_issuer(std::weak_ptr<GrantIssuer> issuer) {
    std::shared_lock lock(mutex_);
    std::byte* const address = memory_ == nullptr ? nullptr : memory_->mapped_address(0);
    if (address != nullptr) {
        std::lock_guard issuers_lock(issuers_mutex_);
        // Remove expired issuers, and the entry that the same issuer has already.
        std::erase_if(issuers_, [&](const std::weak_ptr<GrantIssuer>& known_issuer) {
            return known_issuer.expired() || (!known_issuer.owner_before(issuer) && !issuer.owner_before(known_issuer));
        });
        issuers_.push_back(std::move(issuer));
    }
    return address;
}

std::unique_ptr<Memory> Region::take_memory() {
    is_revoked_ = true;
    std::unique_ptr<Memory> memory;
    {
        std::unique_lock lock(mutex_);
        memory = std::move(memory_);
    }
    // No issuer is added any more, because memory_ is null. The caller releases the memory after all grants are
    // revoked.
    std::vector<std::weak_ptr<GrantIssuer>> issuers;
    {
        std::lock_guard lock(issuers_mutex_);
        issuers.swap(issuers_);
    }
    for (const std::weak_ptr<GrantIssuer>& weak_issuer : issuers) {
        if (const auto issuer = weak_issuer.lock()) {
            issuer->revoke(rkey);
        }
    }
    return memory;
}

} // namespace gdrkit::twin::verbs
