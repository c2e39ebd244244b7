// Helpers for the tests of the software twin of libibverbs: they open devices, connect queue pairs, and post requests
// with one call.
#pragma once

#include <infiniband/verbs.h>
#include <poll.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/check.hpp"

namespace gdrkit::twin::tests {

// If GDRKIT_TWINS_DOMAIN (the name of the emulated machine) is not set, set it to a name with the id of this process.
// Then the twin of this process and the twins of tests that run at the same time are different machines, so that their
// NICs do not reach each other. Processes that a test starts inherit the name, and are on the same machine.
inline void isolate_from_other_processes() {
    if (std::getenv("GDRKIT_TWINS_DOMAIN") == nullptr) {
        setenv("GDRKIT_TWINS_DOMAIN", ("test." + std::to_string(getpid())).c_str(), 1);
    }
}

constexpr int read_write_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
constexpr int read_write_atomic_access = read_write_access | IBV_ACCESS_REMOTE_ATOMIC;

// Return a byte of the test pattern. Neighbouring bytes differ, and so do bytes at the same offset of neighbouring
// pages.
inline std::uint8_t pattern_at(std::size_t index) {
    return static_cast<std::uint8_t>(index * 131U + (index >> 8) * 7U + (index >> 16) + 1U);
}

// In fill_pattern() and has_pattern(), the first byte of the memory corresponds to pattern_at(first_index).
inline void fill_pattern(void* memory, std::size_t size_bytes, std::size_t first_index = 0) {
    auto* const bytes = static_cast<std::uint8_t*>(memory);
    for (std::size_t index = 0; index < size_bytes; ++index) {
        bytes[index] = pattern_at(index + first_index);
    }
}

inline bool has_pattern(const void* memory, std::size_t size_bytes, std::size_t first_index = 0) {
    const auto* const bytes = static_cast<const std::uint8_t*>(memory);
    for (std::size_t index = 0; index < size_bytes; ++index) {
        if (bytes[index] != pattern_at(index + first_index)) {
            return false;
        }
    }
    return true;
}

inline ibv_context* open_device(int device_index) {
    int count = 0;
    ibv_device** const devices = ibv_get_device_list(&count);
    CHECK(devices != nullptr && count > device_index);
    ibv_context* const context = ibv_open_device(devices[device_index]);
    CHECK(context != nullptr);
    ibv_free_device_list(devices);
    return context;
}

// The data about a queue pair that its peer needs for a connection.
struct QueuePairAddress {
    ibv_gid gid;
    std::uint32_t qp_num;
    std::uint32_t psn;
};

// The sizes and attributes with which an Endpoint creates and connects its queue pair.
struct EndpointSettings {
    std::uint32_t max_send_wr = 16, max_receive_wr = 16, max_sges = 4, max_inline_bytes = 64;
    int cq_entries = 64;
    int sq_sig_all = 0;
    unsigned access_flags = read_write_atomic_access;
    // Attributes for the transitions to RTR and RTS. Three values are codes: timeout 14 means 4.096 us * 2^14 (67 ms),
    // rnr_retry 7 means without limit, and min_rnr_timer 1 means 10 us.
    std::uint8_t timeout = 14, retry_count = 7, rnr_retry = 7, min_rnr_timer = 1, max_rd_atomic = 1;
    bool has_channel = false; // the completion queue has a completion channel
    ibv_qp_type type = IBV_QPT_RC;
};

// A queue pair with its device, protection domain and completion queue. A test that destroys `qp` or `srq` itself sets
// the pointer to nullptr.
struct Endpoint {
    ibv_context* context;
    ibv_pd* pd;
    ibv_comp_channel* channel = nullptr;
    ibv_cq* cq;
    ibv_srq* srq = nullptr; // if not null, create_queue_pair() makes the queue pair use it
    ibv_qp* qp;
    EndpointSettings settings;
    std::uint32_t psn = 0x123; // packet sequence number of the first packet that this queue pair sends

    explicit Endpoint(int device_index = 0, EndpointSettings endpoint_settings = {})
        : context(open_device(device_index)), settings(endpoint_settings) {
        pd = ibv_alloc_pd(context);
        CHECK(pd != nullptr);
        if (settings.has_channel) {
            channel = ibv_create_comp_channel(context);
            CHECK(channel != nullptr);
        }
        cq = ibv_create_cq(context, settings.cq_entries, this, channel, 0);
        CHECK(cq != nullptr);
        create_queue_pair();
    }
    ~Endpoint() {
        CHECK(qp == nullptr || ibv_destroy_qp(qp) == 0);
        CHECK(srq == nullptr || ibv_destroy_srq(srq) == 0);
        CHECK(ibv_destroy_cq(cq) == 0);
        CHECK(channel == nullptr || ibv_destroy_comp_channel(channel) == 0);
        CHECK(ibv_dealloc_pd(pd) == 0);
        CHECK(ibv_close_device(context) == 0);
    }
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;

    void create_queue_pair() {
        ibv_qp_init_attr init{};
        init.send_cq = cq;
        init.recv_cq = cq;
        init.cap = {settings.max_send_wr, settings.max_receive_wr, settings.max_sges, settings.max_sges,
                    settings.max_inline_bytes};
        init.srq = srq;
        init.qp_type = settings.type;
        init.sq_sig_all = settings.sq_sig_all;
        qp = ibv_create_qp(pd, &init);
        CHECK(qp != nullptr);
    }

    // Replace the queue pair by one that uses a new shared receive queue.
    void use_shared_receive_queue(std::uint32_t max_wr) {
        CHECK(ibv_destroy_qp(qp) == 0);
        ibv_srq_init_attr init{};
        init.attr.max_wr = max_wr;
        init.attr.max_sge = 4;
        srq = ibv_create_srq(pd, &init);
        CHECK(srq != nullptr);
        create_queue_pair();
    }

    QueuePairAddress address() {
        QueuePairAddress address{};
        CHECK(ibv_query_gid(context, 1, 1, &address.gid) == 0); // port 1, GID index 1 (RoCE v2)
        address.qp_num = qp->qp_num;
        address.psn = psn;
        return address;
    }

    // The functions modify_to_* and modify_to return 0 or the errno of ibv_modify_qp.
    int modify_to_init() {
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_INIT;
        attr.port_num = 1;
        attr.qp_access_flags = settings.access_flags;
        return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    }
    ibv_qp_attr make_rtr_attr(const QueuePairAddress& peer) const {
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_RTR;
        attr.path_mtu = IBV_MTU_4096;
        attr.dest_qp_num = peer.qp_num;
        attr.rq_psn = peer.psn;
        attr.max_dest_rd_atomic = settings.max_rd_atomic;
        attr.min_rnr_timer = settings.min_rnr_timer;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid = peer.gid;
        attr.ah_attr.grh.sgid_index = 1; // the GID of RoCE v2
        attr.ah_attr.grh.hop_limit = 64;
        return attr;
    }
    static constexpr int rtr_mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    int modify_to_rtr(const QueuePairAddress& peer) {
        ibv_qp_attr attr = make_rtr_attr(peer);
        return ibv_modify_qp(qp, &attr, rtr_mask);
    }
    static constexpr int rts_mask =
        IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    int modify_to_rts() {
        ibv_qp_attr attr{};
        attr.qp_state = IBV_QPS_RTS;
        attr.timeout = settings.timeout;
        attr.retry_cnt = settings.retry_count;
        attr.rnr_retry = settings.rnr_retry;
        attr.sq_psn = psn;
        attr.max_rd_atomic = settings.max_rd_atomic;
        return ibv_modify_qp(qp, &attr, rts_mask);
    }
    int modify_to(ibv_qp_state state) {
        ibv_qp_attr attr{};
        attr.qp_state = state;
        return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
    }
    void connect(const QueuePairAddress& peer) {
        CHECK(modify_to_init() == 0);
        CHECK(modify_to_rtr(peer) == 0);
        CHECK(modify_to_rts() == 0);
    }
    ibv_qp_state query_state() {
        ibv_qp_attr attr{};
        ibv_qp_init_attr init{};
        CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0);
        return attr.qp_state;
    }

    // Wait for the next completion and return it. Fail the test after ten seconds without a completion.
    ibv_wc poll_completion() {
        ibv_wc wc{};
        for (int tries = 0; tries < 100000; ++tries) {
            const int count = ibv_poll_cq(cq, 1, &wc);
            CHECK(count >= 0);
            if (count == 1) {
                return wc;
            }
            usleep(100);
        }
        CHECK(false && "no completion within ten seconds");
        return wc;
    }
    // Wait for the next completion, check its request id and status, and return it.
    ibv_wc expect_completion(std::uint64_t wr_id, ibv_wc_status status) {
        const ibv_wc wc = poll_completion();
        if (wc.wr_id != wr_id || wc.status != status) {
            std::fprintf(stderr, "request %llu completed with status '%s'; expected request %llu with status '%s'\n",
                         static_cast<unsigned long long>(wc.wr_id), ibv_wc_status_str(wc.status),
                         static_cast<unsigned long long>(wr_id), ibv_wc_status_str(status));
        }
        CHECK(wc.wr_id == wr_id && wc.status == status);
        CHECK(wc.qp_num == qp->qp_num);
        return wc;
    }

    // The functions post_receive, post_shared_receive and post (a send request) return 0 or the errno of the call.
    int post_receive(std::uint64_t wr_id, const std::vector<ibv_sge>& sges) {
        std::vector<ibv_sge> sge_list = sges;
        ibv_recv_wr wr{};
        ibv_recv_wr* bad_wr = nullptr;
        wr.wr_id = wr_id;
        wr.sg_list = sge_list.data();
        wr.num_sge = static_cast<int>(sge_list.size());
        const int error = ibv_post_recv(qp, &wr, &bad_wr);
        CHECK((error == 0) == (bad_wr == nullptr));
        return error;
    }
    int post_shared_receive(std::uint64_t wr_id, ibv_sge sge) const {
        ibv_recv_wr wr{};
        ibv_recv_wr* bad_wr = nullptr;
        wr.wr_id = wr_id;
        wr.sg_list = &sge;
        wr.num_sge = 1;
        const int error = ibv_post_srq_recv(srq, &wr, &bad_wr);
        CHECK(bad_wr == (error == 0 ? nullptr : &wr));
        return error;
    }
    int post(ibv_send_wr wr, const std::vector<ibv_sge>& sges) {
        std::vector<ibv_sge> sge_list = sges;
        ibv_send_wr* bad_wr = nullptr;
        wr.sg_list = sge_list.data();
        wr.num_sge = static_cast<int>(sge_list.size());
        const int error = ibv_post_send(qp, &wr, &bad_wr);
        CHECK((error == 0) == (bad_wr == nullptr));
        return error;
    }
};

// Return a send request without its list of buffers. Only RDMA requests use `remote_address` and `rkey`.
inline ibv_send_wr make_request(std::uint64_t wr_id, ibv_wr_opcode opcode, std::uint64_t remote_address = 0,
                                std::uint32_t rkey = 0, unsigned flags = IBV_SEND_SIGNALED) {
    ibv_send_wr wr{};
    wr.wr_id = wr_id;
    wr.opcode = opcode;
    wr.send_flags = flags;
    wr.wr.rdma.remote_addr = remote_address;
    wr.wr.rdma.rkey = rkey;
    return wr;
}

inline std::uint64_t address_of(const void* pointer) {
    return reinterpret_cast<std::uint64_t>(pointer);
}

inline ibv_sge make_sge(const ibv_mr* mr, std::uint64_t address, std::size_t length) {
    return {address, static_cast<std::uint32_t>(length), mr->lkey};
}

// Page-aligned memory with a memory region. A test that deregisters `mr` sets it to nullptr.
struct Buffer {
    explicit Buffer(ibv_pd* pd, std::size_t size_bytes, int access_flags = read_write_atomic_access)
        : size_bytes(size_bytes) {
        bytes = static_cast<std::uint8_t*>(std::aligned_alloc(4096, (size_bytes + 4095) / 4096 * 4096));
        std::memset(bytes, 0, size_bytes);
        mr = ibv_reg_mr(pd, bytes, size_bytes, access_flags);
        CHECK(mr != nullptr);
    }
    ~Buffer() {
        CHECK(mr == nullptr || ibv_dereg_mr(mr) == 0);
        std::free(bytes);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    [[nodiscard]] std::uint64_t address_at(std::size_t offset = 0) const { return address_of(bytes + offset); }
    [[nodiscard]] ibv_sge sge(std::size_t offset, std::size_t length) const {
        return make_sge(mr, address_at(offset), length);
    }

    std::size_t size_bytes;
    std::uint8_t* bytes;
    ibv_mr* mr;
};

inline void connect(Endpoint* first, Endpoint* second) {
    first->connect(second->address());
    second->connect(first->address());
}

inline bool is_readable(int fd, int timeout_ms) {
    pollfd poll_fd{fd, POLLIN, 0};
    return poll(&poll_fd, 1, timeout_ms) == 1;
}

// Get and acknowledge the next asynchronous event. Fail the test after ten seconds without an event.
inline ibv_async_event wait_for_event(ibv_context* context) {
    CHECK(is_readable(context->async_fd, 10000));
    ibv_async_event event{};
    CHECK(ibv_get_async_event(context, &event) == 0);
    ibv_ack_async_event(&event);
    return event;
}

} // namespace gdrkit::twin::tests
