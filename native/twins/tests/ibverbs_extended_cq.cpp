// Tests of the software twin of libibverbs: extended completion queues, parent domains, and resizing a completion
// queue.
#include <ctime>

#include "tests/ibverbs_support.hpp"

using namespace gdrkit::twin::tests;

namespace {

constexpr std::uint64_t all_wc_flags = std::uint64_t{IBV_WC_STANDARD_FLAGS} | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP |
                                       IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

ibv_cq_init_attr_ex make_cq_attributes(std::uint32_t entry_count, std::uint64_t wc_flags) {
    ibv_cq_init_attr_ex attr{};
    attr.cqe = entry_count;
    attr.wc_flags = wc_flags;
    return attr;
}

EndpointSettings make_channel_settings() {
    EndpointSettings settings;
    settings.has_channel = true;
    return settings;
}

// Two connected queue pairs. The completions of the receiver go to an extended completion queue, which uses the
// completion channel of the receiver.
struct ExtendedCqPair {
    Endpoint sender{0};
    Endpoint receiver{1, make_channel_settings()};
    Buffer source{sender.pd, 4096};
    Buffer target{receiver.pd, 4096};
    ibv_cq_ex* cq;
    ibv_qp* original_qp; // kept, because the destructor of `receiver` destroys it

    explicit ExtendedCqPair(ibv_cq_init_attr_ex attr) : original_qp(receiver.qp) {
        attr.channel = receiver.channel;
        cq = ibv_create_cq_ex(receiver.context, &attr);
        CHECK(cq != nullptr);
        ibv_qp_init_attr init{};
        init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(cq);
        init.cap = {16, 16, 1, 1, 0};
        init.qp_type = IBV_QPT_RC;
        receiver.qp = ibv_create_qp(receiver.pd, &init);
        CHECK(receiver.qp != nullptr);
        connect(&sender, &receiver);
    }
    ~ExtendedCqPair() {
        CHECK(ibv_destroy_qp(receiver.qp) == 0);
        receiver.qp = original_qp;
        CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0);
    }
    ExtendedCqPair(const ExtendedCqPair&) = delete;
    ExtendedCqPair& operator=(const ExtendedCqPair&) = delete;

    // Post a receive with this wr_id, and send a message for it.
    void send(std::uint64_t wr_id, std::uint32_t length, std::uint32_t immediate_data) {
        CHECK(receiver.post_receive(wr_id, {target.sge(0, 4096)}) == 0);
        ibv_send_wr wr = make_request(1, IBV_WR_SEND_WITH_IMM);
        wr.imm_data = immediate_data;
        CHECK(sender.post(wr, {source.sge(0, length)}) == 0);
        sender.expect_completion(1, IBV_WC_SUCCESS);
    }
    // Call send(), and wait for the receive completion, which may arrive after the send completion.
    void send_and_wait(std::uint64_t wr_id, std::uint32_t immediate_data) {
        CHECK(ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0) == 0);
        send(wr_id, 8, immediate_data);
        ibv_cq* event_cq = nullptr;
        void* cq_context = nullptr;
        CHECK(is_readable(receiver.channel->fd, 10000));
        CHECK(ibv_get_cq_event(receiver.channel, &event_cq, &cq_context) == 0 && event_cq == ibv_cq_ex_to_cq(cq));
        ibv_ack_cq_events(event_cq, 1);
    }
    // Start to poll. Fail the test after ten seconds without a completion.
    void start_poll() {
        ibv_poll_cq_attr attr{};
        int error = ENOENT;
        for (int tries = 0; tries < 100000 && error == ENOENT; ++tries) {
            error = ibv_start_poll(cq, &attr);
            if (error == ENOENT) {
                usleep(100);
            }
        }
        CHECK(error == 0);
    }
};

std::uint64_t read_clock_cycles(ibv_context* context) {
    ibv_values_ex values{};
    values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK;
    CHECK(ibv_query_rt_values_ex(context, &values) == 0);
    CHECK(values.comp_mask == IBV_VALUES_MASK_RAW_CLOCK);
    return static_cast<std::uint64_t>(values.raw_clock.tv_nsec); // cycles, in spite of its name
}

void test_completion_is_read_field_by_field() {
    ExtendedCqPair pair(make_cq_attributes(16, all_wc_flags));
    ibv_poll_cq_attr attr{};
    CHECK(ibv_start_poll(pair.cq, &attr) == ENOENT);
    attr.comp_mask = 1;
    CHECK(ibv_start_poll(pair.cq, &attr) == EINVAL);
    const std::uint64_t cycles_before = read_clock_cycles(pair.receiver.context);
    const std::time_t time_before = std::time(nullptr);
    pair.send(77, 100, 0xabcd);
    pair.send(78, 0, 0xef01);
    pair.start_poll();
    CHECK(pair.cq->wr_id == 77 && pair.cq->status == IBV_WC_SUCCESS);
    CHECK(ibv_wc_read_opcode(pair.cq) == IBV_WC_RECV && ibv_wc_read_byte_len(pair.cq) == 100);
    CHECK(ibv_wc_read_wc_flags(pair.cq) == IBV_WC_WITH_IMM && ibv_wc_read_imm_data(pair.cq) == 0xabcd);
    CHECK(ibv_wc_read_qp_num(pair.cq) == pair.receiver.qp->qp_num);
    CHECK(ibv_wc_read_src_qp(pair.cq) == pair.sender.qp->qp_num);
    CHECK(ibv_wc_read_vendor_err(pair.cq) == 0 && ibv_wc_read_slid(pair.cq) == 0 && ibv_wc_read_sl(pair.cq) == 0 &&
          ibv_wc_read_dlid_path_bits(pair.cq) == 0);
    const std::uint64_t first_cycles = ibv_wc_read_completion_ts(pair.cq);
    const std::uint64_t wallclock_ns = ibv_wc_read_completion_wallclock_ns(pair.cq);
    while (ibv_next_poll(pair.cq) == ENOENT) {
        usleep(100);
    }
    CHECK(pair.cq->wr_id == 78 && ibv_wc_read_imm_data(pair.cq) == 0xef01);
    const std::uint64_t second_cycles = ibv_wc_read_completion_ts(pair.cq);
    CHECK(ibv_next_poll(pair.cq) == ENOENT);
    ibv_end_poll(pair.cq);
    CHECK(cycles_before < first_cycles && first_cycles < second_cycles);
    CHECK(second_cycles < read_clock_cycles(pair.receiver.context));
    CHECK(wallclock_ns / 1'000'000'000 + 1 >= static_cast<std::uint64_t>(time_before));
}

void test_both_kinds_of_poll_work_on_an_extended_queue() {
    ExtendedCqPair pair(make_cq_attributes(16, 0));
    // Without wc_flags, the queue has no functions that read optional fields.
    CHECK(pair.cq->read_byte_len == nullptr && pair.cq->read_completion_ts == nullptr);
    pair.send(1, 8, 0);
    pair.send(2, 8, 0);
    pair.start_poll();
    CHECK(pair.cq->wr_id == 1);
    ibv_end_poll(pair.cq);
    ibv_wc wc{};
    while (ibv_poll_cq(ibv_cq_ex_to_cq(pair.cq), 1, &wc) == 0) {
        usleep(100);
    }
    CHECK(wc.wr_id == 2 && wc.byte_len == 8);
}

void test_unsupported_attributes_are_refused() {
    Endpoint endpoint;
    const auto check_fails = [&](const ibv_cq_init_attr_ex& requested_attr, int expected_error) {
        ibv_cq_init_attr_ex attr = requested_attr;
        errno = 0;
        CHECK(ibv_create_cq_ex(endpoint.context, &attr) == nullptr && errno == expected_error);
    };
    check_fails(make_cq_attributes(16, IBV_WC_EX_WITH_CVLAN), EOPNOTSUPP);
    check_fails(make_cq_attributes(16, IBV_WC_EX_WITH_FLOW_TAG), EOPNOTSUPP);
    check_fails(make_cq_attributes(16, IBV_WC_EX_WITH_TM_INFO), EOPNOTSUPP);
    check_fails(make_cq_attributes(0, 0), EINVAL);
    check_fails(make_cq_attributes((1U << 20) + 1, 0), EINVAL); // more than max_cqe
    ibv_cq_init_attr_ex attr = make_cq_attributes(16, 0);
    attr.comp_vector = 1;
    check_fails(attr, EINVAL);
    attr = make_cq_attributes(16, 0);
    attr.comp_mask = 1U << 2; // an undefined bit
    check_fails(attr, EINVAL);
    attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
    attr.flags = 1U << 2; // an undefined bit
    check_fails(attr, EINVAL);
    attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
    attr.parent_domain = endpoint.pd; // not a parent domain
    check_fails(attr, EINVAL);
}

void test_ignored_overrun_keeps_the_last_completions() {
    ibv_cq_init_attr_ex attr = make_cq_attributes(2, IBV_WC_EX_WITH_IMM);
    attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
    attr.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN | IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    ExtendedCqPair pair(attr);
    for (std::uint32_t wr_id = 1; wr_id <= 4; ++wr_id) {
        pair.send_and_wait(wr_id, wr_id);
    }
    pair.start_poll();
    CHECK(pair.cq->wr_id == 3);
    CHECK(ibv_next_poll(pair.cq) == 0 && pair.cq->wr_id == 4);
    CHECK(ibv_next_poll(pair.cq) == ENOENT);
    ibv_end_poll(pair.cq);
}

void test_resize_keeps_waiting_completions() {
    ExtendedCqPair pair(make_cq_attributes(2, 0));
    pair.send_and_wait(1, 0);
    pair.send_and_wait(2, 0);
    ibv_cq* const cq = ibv_cq_ex_to_cq(pair.cq);
    CHECK(ibv_resize_cq(cq, 0) == EINVAL && ibv_resize_cq(cq, (1 << 20) + 1) == EINVAL);
    CHECK(ibv_resize_cq(cq, 3) == 0 && cq->cqe == 3);
    pair.send_and_wait(3, 0);
    CHECK(ibv_resize_cq(cq, 2) == EINVAL && cq->cqe == 3);
    for (std::uint64_t wr_id = 1; wr_id <= 3; ++wr_id) {
        pair.start_poll();
        CHECK(pair.cq->wr_id == wr_id);
        ibv_end_poll(pair.cq);
    }
    CHECK(ibv_resize_cq(cq, 1) == 0);
}

void test_device_reports_its_clock() {
    Endpoint endpoint;
    ibv_device_attr_ex attr{};
    CHECK(ibv_query_device_ex(endpoint.context, nullptr, &attr) == 0);
    CHECK(attr.completion_timestamp_mask != 0 && attr.hca_core_clock != 0);
    const std::uint64_t cycles_before = read_clock_cycles(endpoint.context);
    usleep(20000);
    const std::uint64_t elapsed_us = (read_clock_cycles(endpoint.context) - cycles_before) * 1000 / attr.hca_core_clock;
    CHECK(elapsed_us >= 19000 && elapsed_us < 10'000'000);
    ibv_values_ex values{};
    values.comp_mask = 1U << 1; // an undefined value
    CHECK(ibv_query_rt_values_ex(endpoint.context, &values) == 0 && values.comp_mask == 0);
}

void test_parent_domain_shares_the_objects_of_its_domain() {
    Endpoint endpoint;
    ibv_td_init_attr td_attr{};
    ibv_td* const td = ibv_alloc_td(endpoint.context, &td_attr);
    CHECK(td != nullptr);
    ibv_parent_domain_init_attr attr{};
    attr.pd = endpoint.pd;
    attr.td = td;
    ibv_pd* const parent_domain = ibv_alloc_parent_domain(endpoint.context, &attr);
    CHECK(parent_domain != nullptr && parent_domain != endpoint.pd);
    CHECK(ibv_dealloc_td(td) == EBUSY && ibv_dealloc_pd(endpoint.pd) == EBUSY);
    ibv_cq_init_attr_ex cq_attr = make_cq_attributes(8, 0);
    cq_attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD;
    cq_attr.parent_domain = parent_domain;
    ibv_cq_ex* const cq = ibv_create_cq_ex(endpoint.context, &cq_attr);
    CHECK(cq != nullptr && ibv_dealloc_pd(parent_domain) == EBUSY);
    CHECK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)) == 0);
    {
        // The queue pair belongs to `endpoint.pd`, and the source buffer to the parent domain.
        Endpoint peer(1);
        connect(&endpoint, &peer);
        Buffer source(parent_domain, 4096);
        Buffer target(peer.pd, 4096);
        fill_pattern(source.bytes, 4096);
        CHECK(endpoint.post(make_request(1, IBV_WR_RDMA_WRITE, target.address_at(), target.mr->rkey),
                            {source.sge(0, 4096)}) == 0);
        endpoint.expect_completion(1, IBV_WC_SUCCESS);
        CHECK(has_pattern(target.bytes, 4096));
    }
    CHECK(ibv_dealloc_pd(parent_domain) == 0 && ibv_dealloc_td(td) == 0);
}

void test_invalid_parent_domains_are_refused() {
    Endpoint endpoint;
    ibv_parent_domain_init_attr attr{};
    const auto check_fails = [&] {
        errno = 0;
        CHECK(ibv_alloc_parent_domain(endpoint.context, &attr) == nullptr && errno == EINVAL);
    };
    check_fails(); // no protection domain
    attr.pd = endpoint.pd;
    attr.comp_mask = 1U << 2; // an undefined bit
    check_fails();
    attr.comp_mask = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS; // without the functions `alloc` and `free`
    check_fails();
    attr.comp_mask = 0;
    ibv_pd* const parent_domain = ibv_alloc_parent_domain(endpoint.context, &attr);
    CHECK(parent_domain != nullptr);
    attr.pd = parent_domain; // a parent domain cannot belong to another parent domain
    check_fails();
    CHECK(ibv_dealloc_pd(parent_domain) == 0);
    ibv_td_init_attr td_attr{1}; // an undefined bit in comp_mask
    errno = 0;
    CHECK(ibv_alloc_td(endpoint.context, &td_attr) == nullptr && errno == EINVAL);
}

} // namespace

int main() {
    isolate_from_other_processes();
    test_completion_is_read_field_by_field();
    test_both_kinds_of_poll_work_on_an_extended_queue();
    test_unsupported_attributes_are_refused();
    test_ignored_overrun_keeps_the_last_completions();
    test_resize_keeps_waiting_completions();
    test_device_reports_its_clock();
    test_parent_domain_shares_the_objects_of_its_domain();
    test_invalid_parent_domains_are_refused();
    return 0;
}
