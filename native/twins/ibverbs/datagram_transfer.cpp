// Sends or receives one datagram: gathers or scatters its payload, and makes or checks its frame.

#include <algorithm>
#include <utility>

#include "ibverbs/datagram_queue_pair.hpp"
#include "ibverbs/region.hpp"
#include "ibverbs/session.hpp"
#include "model/fabric.hpp"

namespace gdrkit::twin::verbs {
namespace {

// Time during which the twin tries to send to a receiver whose queue is full. After this time the twin assumes that the
// process of the receiver is stopped, and drops the datagram.
constexpr std::chrono::milliseconds full_queue_timeout{1000};
// When stalled_names_ has this number of names, the twin forgets them all.
constexpr std::size_t max_stalled_names = 64;
// A send request whose Q_Key has this bit uses the Q_Key of its queue pair instead.
constexpr std::uint32_t controlled_qkey_bit = 0x80000000U;

// Call move_part(region, address, offset, part_bytes) for each part of a request's memory, up to `size_bytes` bytes in
// total. `offset` counts the bytes of the parts before. Return the status of the request.
template <typename Sges, typename MovePart>
ibv_wc_status move_bytes(const Sges& sges, std::size_t size_bytes, const ProtectionDomain* domain, unsigned access,
                         MovePart move_part) {
    std::size_t offset = 0;
    for (const ibv_sge& sge : sges) {
        const std::size_t part_bytes = std::min<std::size_t>(sge.length, size_bytes - offset);
        if (part_bytes == 0) {
            continue;
        }
        const auto region = find_by_lkey(sge.lkey, domain, access, sge.addr, part_bytes);
        if (region == nullptr || move_part(region.get(), sge.addr, offset, part_bytes) != RegionError::none) {
            return IBV_WC_LOC_PROT_ERR;
        }
        offset += part_bytes;
    }
    return IBV_WC_SUCCESS;
}

FaultSite& fault_site_before_send() {
    static FaultSite site("wc.send");
    return site;
}

FaultSite& fault_site_after_send() {
    static FaultSite site("wc.send.landed");
    return site;
}

} // namespace

bool DatagramQueuePair::has_send_fault_rule() {
    return fault_site_before_send().has_rule() || fault_site_after_send().has_rule();
}

std::optional<ibv_wc_status> DatagramQueuePair::transmit(DatagramWork* work, std::uint32_t own_qkey) {
    FaultSite& before_send_site = fault_site_before_send();
    FaultSite& after_send_site = fault_site_after_send();
    const bool has_started = std::exchange(work->has_started, true);
    if (!has_started) {
        if (const auto fault = find_injected_fault(&before_send_site)) {
            return static_cast<ibv_wc_status>(*fault);
        }
    }
    const std::shared_ptr<const AddressVector> destination = work->destination.lock();
    if (destination == nullptr || !is_same_protection_domain(destination->domain, domain_)) {
        return IBV_WC_LOC_QP_OP_ERR;
    }
    // A ConnectX reports IBV_WC_LOC_LEN_ERR for a datagram that is longer than the path MTU. Soft-RoCE reports success
    // and sends nothing.
    if (work->send_work.length_bytes > max_datagram_bytes) {
        return IBV_WC_LOC_LEN_ERR;
    }
    if (const ibv_wc_status status = gather(work->send_work); status != IBV_WC_SUCCESS) {
        return status;
    }
    const DatagramHeader header = make_header(*work, *destination, own_qkey);
    const bool is_to_group = is_multicast_gid(header.destination_gid);
    // A datagram is lost if only the destination GID, or only the destination queue pair number, means a multicast
    // group.
    if (is_to_group == (header.destination_qpn == multicast_qpn)) {
        // Each member of a group gets a copy. If the queue of a member is full, the next attempt begins with that
        // member.
        for (; is_to_group && work->next_member_index < max_multicast_members; ++work->next_member_index) {
            if (!send_to(make_multicast_socket_name(header.destination_gid, work->next_member_index), header, work)) {
                return std::nullopt;
            }
        }
        if (!is_to_group && is_on_other_machine(make_fabric_address(header.destination_gid))) {
            send_to_other_machine(header);
        } else if (!is_to_group &&
                   !send_to(make_datagram_socket_name(header.destination_gid, header.destination_qpn), header, work)) {
            return std::nullopt;
        }
    }
    Traffic::Direction& sent_traffic = context_->device->traffic.sent;
    ++sent_traffic.requests;
    sent_traffic.send_bytes += work->send_work.length_bytes;
    const auto fault = find_injected_fault(&after_send_site);
    return fault ? static_cast<ibv_wc_status>(*fault) : IBV_WC_SUCCESS;
}

ibv_wc_status DatagramQueuePair::gather(const SendWork& work) {
    if (work.is_inline) {
        std::copy(work.inline_data.begin(), work.inline_data.end(), send_buffer_->data_at(0));
        return IBV_WC_SUCCESS;
    }
    return move_bytes(work.sges, work.length_bytes, domain_, 0,
                      [this](Region* region, std::uint64_t address, std::size_t offset, std::size_t part_bytes) {
                          return region->read(address, send_buffer_.get(), offset, part_bytes);
                      });
}

DatagramHeader DatagramQueuePair::make_header(const DatagramWork& work, const AddressVector& destination,
                                              std::uint32_t own_qkey) const {
    const ibv_global_route& route = destination.path.grh;
    DatagramHeader header{};
    header.magic = datagram_magic;
    header.version = datagram_version;
    header.source_gid = context_->device->gid;
    header.destination_gid = route.dgid;
    header.source_qpn = qp_num_;
    header.destination_qpn = work.remote_qpn;
    header.qkey = (work.remote_qkey & controlled_qkey_bit) != 0 ? own_qkey : work.remote_qkey;
    header.immediate_data = work.send_work.immediate_data;
    header.payload_bytes = static_cast<std::uint32_t>(work.send_work.length_bytes);
    // A flow label has 20 bits in the packet, but 32 in ibv_global_route. UCX sets all 32, and the kernel does not
    // check them.
    header.flow_label = route.flow_label & 0xfffff;
    header.flags = (work.send_work.opcode == IBV_WR_SEND_WITH_IMM ? datagram_has_immediate : 0) |
                   (work.send_work.is_solicited ? datagram_is_solicited : 0);
    header.traffic_class = route.traffic_class;
    header.hop_limit = route.hop_limit;
    header.service_level = destination.path.sl;
    header.is_roce_v2 = get_gid_type(route.sgid_index) == IBV_GID_TYPE_ROCE_V2 ? 1 : 0;
    return header;
}

bool DatagramQueuePair::send_to(const std::string& socket_name, const DatagramHeader& header, DatagramWork* work) {
    const iovec parts[] = {{const_cast<DatagramHeader*>(&header), sizeof header},
                           {send_buffer_->data_at(0), header.payload_bytes}};
    // An error other than EAGAIN means that no pair receives at this name, or that the system has no memory left. The
    // datagram is then lost.
    if (send_datagram(send_socket_.get(), socket_name, parts) != EAGAIN) {
        stalled_names_.erase(socket_name);
        work->blocked_since.reset();
        return true;
    }
    const Clock::time_point now = Clock::now();
    if (!stalled_names_.contains(socket_name) && now - work->blocked_since.value_or(now) < full_queue_timeout) {
        work->blocked_since = work->blocked_since.value_or(now);
        return false;
    }
    work->blocked_since.reset();
    if (stalled_names_.size() >= max_stalled_names) {
        stalled_names_.clear();
    }
    // Unread datagrams of a stopped process stay in the send buffer of the socket that sent them. Use a new socket, so
    // that they do not block datagrams to other receivers.
    if (stalled_names_.insert(socket_name).second) {
        if (Fd sender(open_datagram_sender()); sender) {
            send_socket_ = std::move(sender);
        }
    }
    return true;
}

void DatagramQueuePair::send_to_other_machine(const DatagramHeader& header) {
    const iovec header_part{const_cast<DatagramHeader*>(&header), sizeof header};
    const iovec payload{send_buffer_->data_at(0), header.payload_bytes};
    // An error means that the datagram is lost.
    send_fabric_datagram(remote_receiver_->socket.get(), make_fabric_address(header.destination_gid),
                         static_cast<std::uint16_t>(header.destination_qpn), header_part, payload);
}

bool DatagramQueuePair::receive_frame(const Receiver& receiver, DatagramHeader* header) {
    const iovec parts[] = {{header, sizeof *header}, {receive_buffer_->data_at(grh_bytes), max_datagram_bytes}};
    std::size_t frame_bytes = 0;
    const int error = receiver.is_remote
                          ? receive_fabric_datagram(receiver.socket.get(), parts[0], parts[1], &frame_bytes)
                          : receive_datagram(receiver.socket.get(), parts, &frame_bytes);
    if (error == EAGAIN) {
        return false;
    }
    const bool is_for_receiver = receiver.group ? is_same_gid(header->destination_gid, *receiver.group)
                                                : is_same_gid(header->destination_gid, context_->device->gid) &&
                                                      header->destination_qpn == qp_num_;
    if (error != 0 || !is_well_formed(*header, frame_bytes) || !is_for_receiver) {
        header->magic = 0;
        // EPERM: a frame from an untrusted sender, or of an invalid size, was received and discarded.
        return error == 0 || error == EPERM;
    }
    const auto network_header = make_network_header(*header);
    std::copy(network_header.begin(), network_header.end(), receive_buffer_->data_at(0));
    return true;
}

// Move a received frame into the memory of the next receive request. A frame with another Q_Key, or one for which no
// request is posted, is lost.
void DatagramQueuePair::deliver_frame(Lock* lock, const DatagramHeader& header) {
    if (!can_receive() || header.qkey != attr_.qkey) {
        return;
    }
    std::optional<ReceiveWork> work = take_receive(*lock);
    if (!work) {
        return;
    }
    lock->unlock();
    const ibv_wc_status status = scatter(*work, header);
    lock->lock();
    if (state_ == IBV_QPS_RESET) {
        if (shared_receive_queue_ != nullptr) {
            // A shared queue is not reset with the pair, so it gets the request back.
            shared_receive_queue_->put_back(std::move(*work));
        }
        return;
    }
    ibv_wc wc{};
    wc.status = status;
    wc.opcode = IBV_WC_RECV;
    if (status == IBV_WC_SUCCESS) {
        wc.byte_len = static_cast<std::uint32_t>(grh_bytes) + header.payload_bytes;
        wc.wc_flags = IBV_WC_GRH;
        wc.src_qp = header.source_qpn;
        wc.sl = header.service_level;
        if ((header.flags & datagram_has_immediate) != 0) {
            wc.wc_flags |= IBV_WC_WITH_IMM;
            wc.imm_data = header.immediate_data;
        }
        Traffic::Direction& served_traffic = context_->device->traffic.served;
        ++served_traffic.requests;
        served_traffic.send_bytes += header.payload_bytes;
    }
    complete_receive(*lock, *work, wc, (header.flags & datagram_is_solicited) != 0);
    if (status != IBV_WC_SUCCESS) {
        enter_error(*lock, IBV_QPS_ERR);
    }
}

ibv_wc_status DatagramQueuePair::scatter(const ReceiveWork& work, const DatagramHeader& header) {
    const std::size_t size_bytes = grh_bytes + header.payload_bytes;
    if (work.length_bytes < size_bytes) {
        return IBV_WC_LOC_LEN_ERR;
    }
    const ProtectionDomain* const domain = shared_receive_queue_ != nullptr ? shared_receive_queue_->domain() : domain_;
    return move_bytes(work.sges, size_bytes, domain, IBV_ACCESS_LOCAL_WRITE,
                      [this](Region* region, std::uint64_t address, std::size_t offset, std::size_t part_bytes) {
                          return region->write(address, *receive_buffer_, offset, part_bytes);
                      });
}

} // namespace gdrkit::twin::verbs
