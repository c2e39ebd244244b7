// Implements direct writes into memory that the peer has mapped (riomap, riounmap, riowrite).

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "rdmacm/rsocket_stream.hpp"

namespace gdrkit::twin::rdmacm {

// Handle a message about a buffer that the peer has mapped or unmapped.
void StreamSocket::on_mapping_message(const std::uint8_t* bytes, std::size_t size_bytes, bool is_removal) {
    Mapping mapping{};
    if (size_bytes != sizeof mapping) {
        return end_connection(Stage::failed, EPROTO);
    }
    std::memcpy(&mapping, bytes, sizeof mapping);
    std::erase_if(peer_mappings_, [&](const Mapping& peer_mapping) { return peer_mapping.offset == mapping.offset; });
    if (is_removal) {
        return;
    }
    const bool has_overflow = mapping.offset + mapping.length_bytes < mapping.offset;
    if (has_overflow || peer_mappings_.size() >= static_cast<std::size_t>(options_.io_mapping_count)) {
        return end_connection(Stage::failed, EPROTO);
    }
    peer_mappings_.push_back(mapping);
}

int StreamSocket::map(void* buffer, std::size_t length, int protection, off_t* offset) {
    constexpr int writable = 2; // PROT_WRITE
    SocketLock lock(mutex_);
    if (const int error = wait_for_connection(&lock, 0); error != 0) {
        return error;
    }
    if ((protection & ~writable) != 0 || stage_ != Stage::connected) {
        return EINVAL;
    }
    // With PROT_WRITE, the peer may write to the buffer, and a message tells the peer its address. Otherwise the buffer
    // is only registered.
    const bool is_peer_writable = (protection & writable) != 0;
    const auto peer_writable_count =
        std::count_if(local_mappings_.begin(), local_mappings_.end(),
                      [](const LocalMapping& local_mapping) { return local_mapping.is_peer_writable; });
    if (is_peer_writable && static_cast<std::size_t>(peer_writable_count) >= peer_mapping_limit_) {
        return ENOMEM;
    }
    const int access_flags = IBV_ACCESS_LOCAL_WRITE | (is_peer_writable ? IBV_ACCESS_REMOTE_WRITE : 0);
    ibv_mr* const mr = ibv_reg_mr(id_->pd, buffer, length, access_flags);
    if (mr == nullptr) {
        return errno;
    }
    const auto address = reinterpret_cast<std::uint64_t>(buffer);
    if (*offset == -1) {
        *offset = static_cast<off_t>(address);
    }
    const Mapping mapping{static_cast<std::uint64_t>(*offset), address, length, mr->rkey, 0};
    local_mappings_.push_back({mr, mapping, is_peer_writable});
    if (!is_peer_writable) {
        return 0;
    }
    const int error = wait(&lock, false, [this] { return !free_send_slots_.empty() || are_writes_ended_; });
    return error != 0 ? error : are_writes_ended_ ? ECONNRESET : post_message(Kind::mapping, &mapping, sizeof mapping);
}

int StreamSocket::unmap(void* buffer, std::size_t length) {
    SocketLock lock(mutex_);
    const auto entry =
        std::find_if(local_mappings_.begin(), local_mappings_.end(), [&](const LocalMapping& local_mapping) {
            return local_mapping.mr->addr == buffer && local_mapping.mr->length == length;
        });
    if (entry == local_mappings_.end()) {
        return EINVAL;
    }
    const auto [mr, mapping, is_peer_writable] = *entry;
    ibv_dereg_mr(mr);
    local_mappings_.erase(entry);
    if (!is_peer_writable) {
        return 0;
    }
    const int error = wait(&lock, false, [this] { return !free_send_slots_.empty() || are_writes_ended_; });
    return error != 0 || are_writes_ended_ ? error : post_message(Kind::removed_mapping, &mapping, sizeof mapping);
}

int StreamSocket::write_mapped(const void* buffer, std::size_t count, off_t offset, int flags,
                               std::size_t* moved_bytes) {
    SocketLock lock(mutex_);
    const auto* bytes = static_cast<const std::uint8_t*>(buffer);
    if (stage_ == Stage::unconnected || stage_ == Stage::listening) {
        return ENOTCONN;
    }
    if (const int error = wait_for_connection(&lock, flags); error != 0) {
        return error;
    }
    while (*moved_bytes < count) {
        const auto current_offset = static_cast<std::uint64_t>(offset) + *moved_bytes;
        const int error =
            wait(&lock, is_nonblocking(flags), [this] { return !free_send_slots_.empty() || are_writes_ended_; });
        if (error != 0) {
            return *moved_bytes == 0 ? error : 0;
        }
        if (are_writes_ended_) {
            return ECONNRESET;
        }
        const auto target_mapping =
            std::find_if(peer_mappings_.begin(), peer_mappings_.end(), [&](const Mapping& mapping) {
                return current_offset >= mapping.offset && current_offset - mapping.offset < mapping.length_bytes;
            });
        if (target_mapping == peer_mappings_.end()) {
            return *moved_bytes == 0 ? EINVAL : 0;
        }
        const std::uint64_t offset_in_mapping = current_offset - target_mapping->offset;
        const std::size_t write_bytes =
            std::min({count - *moved_bytes, slot_bytes,
                      static_cast<std::size_t>(target_mapping->length_bytes - offset_in_mapping)});
        const unsigned slot = take_send_slot();
        std::memcpy(get_send_slot(slot), bytes + *moved_bytes, write_bytes);
        ibv_send_wr request{};
        request.opcode = IBV_WR_RDMA_WRITE;
        request.wr.rdma.remote_addr = target_mapping->address + offset_in_mapping;
        request.wr.rdma.rkey = target_mapping->rkey;
        if (const int post_error = post_slot(slot, write_bytes, &request); post_error != 0) {
            return post_error;
        }
        ++in_flight_send_count_;
        *moved_bytes += write_bytes;
    }
    return 0;
}

} // namespace gdrkit::twin::rdmacm
