// Tests of the software twin of libibverbs: memory windows, and ibv_rereg_mr, which changes the access, the protection
// domain or the memory of a region.
#include <memory>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

// The access flags of the regions to which the tests bind windows, and of the windows.
constexpr int bindable_access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND;
constexpr unsigned window_access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

// Two connected endpoints. The responder has a region without remote access, to which the tests bind memory windows.
struct EndpointPair {
    Endpoint requester{0};
    Endpoint responder{1};
    Buffer source{requester.pd, 4096};
    Buffer target{responder.pd, 4096, bindable_access};

    EndpointPair() {
        connect(&requester, &responder);
        fill_pattern(source.bytes, 4096);
    }
    ibv_mw* allocate_window(ibv_mw_type type) {
        ibv_mw* const mw = ibv_alloc_mw(responder.pd, type);
        CHECK(mw != nullptr && mw->type == type && mw->pd == responder.pd);
        return mw;
    }
    ibv_mw_bind_info make_bind_info(std::size_t offset, std::size_t length_bytes,
                                    unsigned access_flags = window_access) {
        return {target.mr, target.address_at(offset), length_bytes, access_flags};
    }
    static ibv_send_wr make_bind_request(ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info& bind_info) {
        ibv_send_wr wr = make_request(1, IBV_WR_BIND_MW);
        wr.bind_mw.mw = mw;
        wr.bind_mw.rkey = rkey;
        wr.bind_mw.bind_info = bind_info;
        return wr;
    }
    // Bind a window of type 2 by IBV_WR_BIND_MW, and return its new key.
    std::uint32_t bind_type_2(ibv_mw* mw, const ibv_mw_bind_info& bind_info) {
        const std::uint32_t rkey = ibv_inc_rkey(mw->rkey);
        CHECK(responder.post(make_bind_request(mw, rkey, bind_info), {}) == 0);
        CHECK(responder.expect_completion(1, IBV_WC_SUCCESS).opcode == IBV_WC_BIND_MW);
        mw->rkey = rkey;
        return rkey;
    }
    // Write the beginning of the source, and return the status of the request.
    ibv_wc_status write(std::uint64_t remote_address, std::uint32_t rkey, std::size_t length_bytes) {
        CHECK(requester.post(make_request(2, IBV_WR_RDMA_WRITE, remote_address, rkey), {source.sge(0, length_bytes)}) ==
              0);
        return requester.poll_completion().status;
    }
    void expect_bind_error(ibv_mw* mw, std::uint32_t rkey, const ibv_mw_bind_info& bind_info) {
        CHECK(responder.post(make_bind_request(mw, rkey, bind_info), {}) == 0);
        responder.expect_completion(1, IBV_WC_MW_BIND_ERR);
        CHECK(responder.query_state() == IBV_QPS_ERR);
    }
};

void test_window_of_type_1_is_bound_and_unbound() {
    EndpointPair pair;
    ibv_mw* const mw = pair.allocate_window(IBV_MW_TYPE_1);
    const std::uint32_t first_rkey = mw->rkey;
    ibv_mw_bind bind_request{7, IBV_SEND_SIGNALED, pair.make_bind_info(100, 200)};
    CHECK(ibv_bind_mw(pair.responder.qp, mw, &bind_request) == 0 && mw->rkey != first_rkey);
    CHECK(pair.responder.expect_completion(7, IBV_WC_SUCCESS).opcode == IBV_WC_BIND_MW);
    CHECK(pair.write(pair.target.address_at(100), mw->rkey, 200) == IBV_WC_SUCCESS);
    CHECK(has_pattern(pair.target.bytes + 100, 200) && pair.target.bytes[300] == 0);
    CHECK(ibv_dereg_mr(pair.target.mr) == EINVAL);
    const std::uint32_t bound_rkey = mw->rkey;
    bind_request.bind_info = {nullptr, 0, 0, 0}; // a binding of length 0 unbinds the window
    CHECK(ibv_bind_mw(pair.responder.qp, mw, &bind_request) == 0);
    pair.responder.expect_completion(7, IBV_WC_SUCCESS);
    CHECK(pair.write(pair.target.address_at(100), bound_rkey, 8) == IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_dealloc_pd(pair.responder.pd) == EBUSY && ibv_dealloc_mw(mw) == 0);
}

void test_window_limits_range_and_access() {
    enum class Write { ends_after_window, begins_before_window, not_permitted, permitted };
    for (const Write write :
         {Write::ends_after_window, Write::begins_before_window, Write::not_permitted, Write::permitted}) {
        EndpointPair pair;
        ibv_mw* const mw = pair.allocate_window(IBV_MW_TYPE_2);
        const unsigned access_flags = write == Write::not_permitted ? unsigned{IBV_ACCESS_REMOTE_READ} : window_access;
        const std::uint32_t rkey = pair.bind_type_2(mw, pair.make_bind_info(64, 64, access_flags));
        const std::uint64_t window_address = pair.target.address_at(64);
        if (write == Write::ends_after_window) {
            CHECK(pair.write(window_address, rkey, 65) == IBV_WC_REM_ACCESS_ERR);
        } else if (write == Write::begins_before_window) {
            CHECK(pair.write(window_address - 1, rkey, 8) == IBV_WC_REM_ACCESS_ERR);
        } else if (write == Write::not_permitted) {
            CHECK(pair.write(window_address, rkey, 8) == IBV_WC_REM_ACCESS_ERR);
        } else {
            CHECK(pair.write(window_address, rkey, 64) == IBV_WC_SUCCESS);
            // An rkey is a 24-bit index and an 8-bit key. A wrong key is refused, too.
            CHECK(pair.write(window_address, rkey ^ 1, 8) == IBV_WC_REM_ACCESS_ERR);
        }
        CHECK(pair.target.bytes[63] == 0 && pair.target.bytes[128] == 0);
        CHECK(ibv_dealloc_mw(mw) == 0);
    }
}

void test_window_belongs_to_its_queue_pair() {
    EndpointPair pair;
    Endpoint second_requester(0);
    ibv_mw* const mw = pair.allocate_window(IBV_MW_TYPE_2);
    const std::uint32_t rkey = pair.bind_type_2(mw, pair.make_bind_info(0, 64));
    // The window is bound to the first queue pair of the responder. A write that arrives at another queue pair of the
    // same protection domain is refused.
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = pair.responder.cq;
    init.cap = {4, 4, 1, 1, 0};
    init.qp_type = IBV_QPT_RC;
    ibv_qp* const bound_qp = pair.responder.qp;
    pair.responder.qp = ibv_create_qp(pair.responder.pd, &init);
    CHECK(pair.responder.qp != nullptr);
    connect(&second_requester, &pair.responder);
    Buffer source(second_requester.pd, 64);
    CHECK(second_requester.post(make_request(3, IBV_WR_RDMA_WRITE, pair.target.address_at(), rkey),
                                {source.sge(0, 64)}) == 0);
    second_requester.expect_completion(3, IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_destroy_qp(pair.responder.qp) == 0);
    pair.responder.qp = bound_qp;
    CHECK(ibv_dealloc_mw(mw) == 0);
}

void test_zero_based_window_translates_addresses() {
    EndpointPair pair;
    ibv_mw* const mw = pair.allocate_window(IBV_MW_TYPE_2);
    const std::uint32_t rkey =
        pair.bind_type_2(mw, pair.make_bind_info(1000, 100, window_access | IBV_ACCESS_ZERO_BASED));
    CHECK(pair.write(10, rkey, 90) == IBV_WC_SUCCESS);
    CHECK(has_pattern(pair.target.bytes + 1010, 90) && pair.target.bytes[1009] == 0 && pair.target.bytes[1100] == 0);
    CHECK(pair.write(pair.target.address_at(1000), rkey, 8) == IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_dealloc_mw(mw) == 0);
}

void test_invalid_bindings_fail() {
    enum class Mistake { no_bind_access, write_to_read_only, out_of_bounds, empty_range, wrong_index, still_bound };
    for (const Mistake mistake : {Mistake::no_bind_access, Mistake::write_to_read_only, Mistake::out_of_bounds,
                                  Mistake::empty_range, Mistake::wrong_index, Mistake::still_bound}) {
        EndpointPair pair;
        Buffer unbindable_buffer(pair.responder.pd, 4096);
        Buffer read_only_buffer(pair.responder.pd, 4096, IBV_ACCESS_MW_BIND);
        ibv_mw* const mw = pair.allocate_window(IBV_MW_TYPE_2);
        std::uint32_t rkey = ibv_inc_rkey(mw->rkey);
        ibv_mw_bind_info bind_info = pair.make_bind_info(0, 64);
        if (mistake == Mistake::no_bind_access) {
            bind_info = {unbindable_buffer.mr, unbindable_buffer.address_at(), 64, window_access};
        } else if (mistake == Mistake::write_to_read_only) {
            bind_info = {read_only_buffer.mr, read_only_buffer.address_at(), 64, IBV_ACCESS_REMOTE_WRITE};
        } else if (mistake == Mistake::out_of_bounds) {
            bind_info = pair.make_bind_info(4090, 7);
        } else if (mistake == Mistake::empty_range) {
            bind_info.length = 0;
        } else if (mistake == Mistake::wrong_index) { // the 24-bit index of the key belongs to another window
            rkey ^= 1U << 8;
        } else {
            pair.bind_type_2(mw, bind_info); // a bound window of type 2 must be invalidated first
            rkey = ibv_inc_rkey(mw->rkey);
        }
        pair.expect_bind_error(mw, rkey, bind_info);
        CHECK(ibv_dealloc_mw(mw) == 0);
    }
}

void test_windows_are_invalidated_locally_and_remotely() {
    EndpointPair pair;
    ibv_mw* const mw = pair.allocate_window(IBV_MW_TYPE_2);
    std::uint32_t rkey = pair.bind_type_2(mw, pair.make_bind_info(0, 64));
    ibv_send_wr wr = make_request(4, IBV_WR_LOCAL_INV);
    wr.invalidate_rkey = rkey;
    CHECK(pair.responder.post(wr, {}) == 0);
    CHECK(pair.responder.expect_completion(4, IBV_WC_SUCCESS).opcode == IBV_WC_LOCAL_INV);
    rkey = pair.bind_type_2(mw, pair.make_bind_info(0, 64));
    CHECK(pair.write(pair.target.address_at(), rkey, 64) == IBV_WC_SUCCESS);
    Buffer receive_buffer(pair.responder.pd, 64);
    CHECK(pair.responder.post_receive(5, {receive_buffer.sge(0, 64)}) == 0);
    wr = make_request(6, IBV_WR_SEND_WITH_INV);
    wr.invalidate_rkey = rkey;
    CHECK(pair.requester.post(wr, {pair.source.sge(0, 64)}) == 0);
    pair.requester.expect_completion(6, IBV_WC_SUCCESS);
    const ibv_wc receive_wc = pair.responder.expect_completion(5, IBV_WC_SUCCESS);
    CHECK(receive_wc.wc_flags == IBV_WC_WITH_INV && receive_wc.invalidated_rkey == rkey && receive_wc.byte_len == 64);
    CHECK(pair.write(pair.target.address_at(), rkey, 8) == IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_dealloc_mw(mw) == 0);
}

void test_invalidation_of_a_region_key_fails() {
    // Requests can invalidate only the keys of windows. The error ends the first pair, so the remote invalidation needs
    // a second one.
    EndpointPair pair;
    ibv_send_wr wr = make_request(4, IBV_WR_LOCAL_INV);
    wr.invalidate_rkey = pair.target.mr->rkey;
    CHECK(pair.responder.post(wr, {}) == 0);
    pair.responder.expect_completion(4, IBV_WC_LOC_QP_OP_ERR);

    EndpointPair second_pair;
    CHECK(second_pair.responder.post_receive(5, {}) == 0);
    wr = make_request(6, IBV_WR_SEND_WITH_INV);
    wr.invalidate_rkey = second_pair.target.mr->rkey;
    CHECK(second_pair.requester.post(wr, {}) == 0);
    second_pair.requester.expect_completion(6, IBV_WC_REM_OP_ERR);
    second_pair.responder.expect_completion(5, IBV_WC_REM_INV_REQ_ERR);
}

void test_rereg_changes_access_and_domain() {
    EndpointPair pair;
    Buffer buffer(pair.responder.pd, 4096, IBV_ACCESS_LOCAL_WRITE);
    ibv_mr* const mr = buffer.mr;
    const std::uint32_t rkey = mr->rkey;
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, nullptr, nullptr, 0, read_write_access) == 0 &&
          mr->rkey == rkey);
    CHECK(pair.write(buffer.address_at(), rkey, 4096) == IBV_WC_SUCCESS && has_pattern(buffer.bytes, 4096));
    ibv_pd* const other_pd = ibv_alloc_pd(pair.responder.context);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, other_pd, nullptr, 0, 0) == 0 && mr->pd == other_pd);
    CHECK(ibv_dealloc_pd(other_pd) == EBUSY);
    CHECK(pair.write(buffer.address_at(), rkey, 8) == IBV_WC_REM_ACCESS_ERR);
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, pair.responder.pd, nullptr, 0, 0) == 0);
    CHECK(ibv_dealloc_pd(other_pd) == 0);
}

void test_rereg_moves_a_region_to_other_memory() {
    EndpointPair pair;
    Buffer buffer(pair.responder.pd, 4096);
    ibv_mr* const mr = buffer.mr;
    const std::uint32_t old_rkey = mr->rkey;
    alignas(4096) static std::uint8_t other_memory[8192];
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, other_memory, sizeof other_memory, 0) == 0);
    CHECK(mr->addr == other_memory && mr->length == sizeof other_memory && mr->rkey != old_rkey);
    CHECK(pair.write(address_of(other_memory + 4096), mr->rkey, 4096) == IBV_WC_SUCCESS &&
          has_pattern(other_memory + 4096, 4096));
    CHECK(pair.write(buffer.address_at(), old_rkey, 8) == IBV_WC_REM_ACCESS_ERR && buffer.bytes[0] == 0);
}

void test_invalid_reregistrations_fail() {
    EndpointPair pair;
    ibv_mr* const mr = pair.target.mr;
    const auto check_fails = [&](int flags, void* address, std::size_t length, int access_flags, int expected_result) {
        errno = 0;
        CHECK(ibv_rereg_mr(mr, flags, pair.responder.pd, address, length, access_flags) == expected_result &&
              errno == EINVAL);
    };
    check_fails(1 << 3, nullptr, 0, 0, IBV_REREG_MR_ERR_INPUT);                                    // unknown flag
    check_fails(IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, 4096, 0, IBV_REREG_MR_ERR_INPUT);        // no address
    check_fails(IBV_REREG_MR_CHANGE_TRANSLATION, pair.target.bytes, 0, 0, IBV_REREG_MR_ERR_INPUT); // no length
    check_fails(IBV_REREG_MR_CHANGE_PD, nullptr, 0, read_write_access, IBV_REREG_MR_ERR_INPUT);    // no CHANGE_ACCESS
    check_fails(0, nullptr, 0, 0, IBV_REREG_MR_ERR_CMD);                                           // no change
    // Remote write access requires local write access.
    check_fails(IBV_REREG_MR_CHANGE_ACCESS, nullptr, 0, IBV_ACCESS_REMOTE_WRITE, IBV_REREG_MR_ERR_CMD);
    ibv_mw* const mw = pair.allocate_window(IBV_MW_TYPE_2);
    const std::uint32_t rkey = pair.bind_type_2(mw, pair.make_bind_info(0, 64));
    // A region with a bound window cannot change, and the window stays usable.
    check_fails(IBV_REREG_MR_CHANGE_ACCESS, nullptr, 0, IBV_ACCESS_LOCAL_WRITE, IBV_REREG_MR_ERR_CMD);
    CHECK(pair.write(pair.target.address_at(), rkey, 64) == IBV_WC_SUCCESS);
    CHECK(ibv_dealloc_mw(mw) == 0);
    // The process has no memory at the address 4096.
    errno = 0;
    CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, nullptr, reinterpret_cast<void*>(4096), 4096, 0) ==
              IBV_REREG_MR_ERR_CMD &&
          errno == EFAULT);
}

// The twin executes a posted bind request while the program calls ibv_rereg_mr for the same region. Exactly one of the
// two must succeed; otherwise the window could give access to the old memory of the region. The even rounds replace the
// memory. The pages of the new memory are not populated yet, so ibv_rereg_mr takes so long that the twin begins to
// execute the bind request meanwhile.
void test_bind_and_rereg_exclude_each_other() {
    constexpr std::size_t size_bytes = 4 << 20;
    for (int round = 0; round < 20; ++round) {
        const bool changes_memory = round % 2 == 0;
        EndpointPair pair;
        const std::unique_ptr<void, void (*)(void*)> untouched_memory(std::aligned_alloc(4096, size_bytes), std::free);
        Buffer memory(pair.responder.pd, size_bytes, bindable_access);
        ibv_mw* const mw = pair.allocate_window(IBV_MW_TYPE_2);
        const std::uint32_t rkey = ibv_inc_rkey(mw->rkey);
        const std::uint64_t region_address = memory.address_at();
        const int flags = changes_memory ? IBV_REREG_MR_CHANGE_TRANSLATION : IBV_REREG_MR_CHANGE_ACCESS;
        const int access_flags = changes_memory ? 0 : bindable_access;
        CHECK(pair.responder.post(
                  EndpointPair::make_bind_request(mw, rkey, {memory.mr, region_address, 64, window_access}), {}) == 0);
        errno = 0;
        const int rereg_result =
            ibv_rereg_mr(memory.mr, flags, nullptr, untouched_memory.get(), size_bytes, access_flags);
        CHECK(rereg_result == 0 || (rereg_result == IBV_REREG_MR_ERR_CMD && errno == EINVAL));
        const ibv_wc_status status = pair.responder.poll_completion().status;
        CHECK(status == (rereg_result == 0 ? IBV_WC_MW_BIND_ERR : IBV_WC_SUCCESS));
        CHECK(rereg_result == 0 || pair.write(region_address, rkey, 64) == IBV_WC_SUCCESS);
        CHECK(ibv_dealloc_mw(mw) == 0);
    }
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_window_of_type_1_is_bound_and_unbound();
    test_window_limits_range_and_access();
    test_window_belongs_to_its_queue_pair();
    test_zero_based_window_translates_addresses();
    test_invalid_bindings_fail();
    test_windows_are_invalidated_locally_and_remotely();
    test_invalidation_of_a_region_key_fails();
    test_rereg_changes_access_and_domain();
    test_rereg_moves_a_region_to_other_memory();
    test_invalid_reregistrations_fail();
    test_bind_and_rereg_exclude_each_other();
    return 0;
}
