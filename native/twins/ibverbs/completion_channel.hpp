// Completion channels: file descriptors on which a client waits for events of completion queues.
#pragma once

#include <atomic>
#include <memory>

#include "ibverbs/context.hpp"

namespace gdrkit::twin::verbs {

struct CompletionEvent {
    ibv_cq* cq = nullptr;
    std::shared_ptr<EventCounter> counter; // channel_event_counter of the completion queue
};

struct CompletionChannel {
    ibv_comp_channel public_channel{};
    Context* context = nullptr;
    EventQueue<CompletionEvent> events;
    std::atomic<int> user_count{0}; // number of completion queues that use the channel
};

inline CompletionChannel* get_channel(ibv_comp_channel* channel) {
    return reinterpret_cast<CompletionChannel*>(channel);
}

} // namespace gdrkit::twin::verbs
