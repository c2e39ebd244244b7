// An open device: the public ibv_context with its tables of operations, and its asynchronous events.
#pragma once

#include <atomic>
#include <memory>

#include "ibverbs/abi.hpp"
#include "ibverbs/device.hpp"
#include "ibverbs/event_queue.hpp"

namespace gdrkit::twin::verbs {

struct AsyncEvent {
    ibv_async_event public_event{};
    // Event counter of the queue pair, shared receive queue or completion queue that the event is about.
    std::shared_ptr<EventCounter> counter;
};

struct Context {
    // The last member of verbs_context is the ibv_context that clients hold. The tables of newer operations precede it.
    verbs_context extended_context{};
    Device* device = nullptr;
    EventQueue<AsyncEvent> events;
    // Number of live objects that were created in the context, for example protection domains and completion queues.
    // If a context is closed while it has live objects, its memory is never freed.
    std::atomic<int> child_count{0};

    ibv_context* public_context() { return &extended_context.context; }
    // Queue an asynchronous event about a queue pair, a shared receive queue or a completion queue, for
    // ibv_get_async_event.
    void raise(ibv_qp* qp, ibv_event_type type, const std::shared_ptr<EventCounter>& counter);
    void raise(ibv_srq* srq, ibv_event_type type, const std::shared_ptr<EventCounter>& counter);
    void raise(ibv_cq* cq, ibv_event_type type, const std::shared_ptr<EventCounter>& counter);
    // Remove the queued events of the object that `counter` belongs to.
    void drop_events(const std::shared_ptr<EventCounter>& counter);
};

// Return the Context to which the public structure belongs, or nullptr for nullptr.
inline Context* get_context(const ibv_context* context) {
    constexpr std::size_t offset_in_extended = offsetof(verbs_context, context);
    auto* const address = reinterpret_cast<char*>(const_cast<ibv_context*>(context));
    return context == nullptr ? nullptr : reinterpret_cast<Context*>(address - offset_in_extended);
}

// Operations that clients call through the tables of function pointers in a context. `length` is the size of the
// client's result structure, which depends on the version of its verbs.h.
int query_port_extended(ibv_context* context, std::uint8_t port_num, ibv_port_attr* port_attr, std::size_t length);
int query_device_extended(ibv_context* context, const ibv_query_device_ex_input* input, ibv_device_attr_ex* attr,
                          std::size_t length);
ibv_dm* alloc_device_memory(ibv_context* context, ibv_alloc_dm_attr* attr);
int free_device_memory(ibv_dm* dm);
ibv_mr* register_device_memory(ibv_pd* pd, ibv_dm* dm, std::uint64_t offset, std::size_t length, unsigned int access);
int query_real_time_values(ibv_context* context, ibv_values_ex* values);
ibv_cq_ex* create_extended_cq(ibv_context* context, ibv_cq_init_attr_ex* attr);
ibv_td* alloc_thread_domain(ibv_context* context, ibv_td_init_attr* init_attr);
int dealloc_thread_domain(ibv_td* td);
ibv_pd* alloc_parent_domain(ibv_context* context, ibv_parent_domain_init_attr* attr);
int poll_completions(ibv_cq* cq, int num_entries, ibv_wc* wc);
int request_notification(ibv_cq* cq, int solicited_only);
int post_send(ibv_qp* qp, ibv_send_wr* wr, ibv_send_wr** bad_wr);
int post_receive(ibv_qp* qp, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);
ibv_qp* create_queue_pair_extended(ibv_context* context, ibv_qp_init_attr_ex* init_attr);
ibv_qp* open_queue_pair(ibv_context* context, ibv_qp_open_attr* open_attr);
ibv_srq* create_srq_extended(ibv_context* context, ibv_srq_init_attr_ex* init_attr);
int get_srq_number(ibv_srq* srq, std::uint32_t* number);
int post_srq_receive(ibv_srq* srq, ibv_recv_wr* wr, ibv_recv_wr** bad_wr);

// Fill both tables of operations with functions that fail with EOPNOTSUPP. The caller then sets the implemented
// entries.
void fill_unsupported(verbs_context* context);

} // namespace gdrkit::twin::verbs
