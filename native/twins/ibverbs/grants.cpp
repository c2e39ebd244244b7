// Gives and revokes grants. A grant lets the process of the requester copy directly to and from a region of this
// process, the responder.

#include "ibverbs/grants.hpp"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "ibverbs/link.hpp"
#include "ibverbs/region.hpp"

namespace gdrkit::twin::verbs {
namespace {

// A responder that revokes a grant waits until a running copy of the requester has ended, but at most this time. A copy
// takes less than a millisecond, so a requester that exceeds this time is considered stopped. The responder notices at
// once if the requester's process dies.
constexpr std::chrono::seconds requester_timeout{5};

// The issuers of this process that are not closed.
struct Issuers {
    std::mutex mutex; // a thread that also locks an issuer locks this mutex first
    std::vector<GrantIssuer*> open_issuers;
};

Issuers& issuers() {
    static auto* const instance = new Issuers;
    return *instance;
}

// Return by how much the counter has grown since the last call, which stored its value in `previous_count`.
std::uint64_t take_growth(const std::atomic<std::uint64_t>& counter, std::uint64_t* previous_count) {
    const std::uint64_t count = counter.load(std::memory_order_relaxed);
    return count - std::exchange(*previous_count, count);
}

} // namespace

std::shared_ptr<GrantIssuer> GrantIssuer::make(GrantTable* table, int requester_process_id, Device* device) {
    // The kernel reports process 0 if the peer is in a PID namespace that this process cannot see.
    Fd pidfd(requester_process_id > 0 ? static_cast<int>(syscall(SYS_pidfd_open, requester_process_id, 0)) : -1);
    if (!pidfd) {
        return nullptr;
    }
    // The security module Yama permits only ancestors to access the memory of a process. This call permits it to all
    // processes of the user. Without Yama the call fails, and is not needed.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    auto issuer = std::shared_ptr<GrantIssuer>(new GrantIssuer(table, std::move(pidfd), device));
    std::lock_guard lock(issuers().mutex);
    issuers().open_issuers.push_back(issuer.get());
    return issuer;
}

GrantIssuer::~GrantIssuer() {
    close();
}

bool GrantIssuer::has_granted(std::uint32_t rkey) {
    std::lock_guard lock(mutex_);
    return std::ranges::find(granted_rkeys_, rkey) != granted_rkeys_.end();
}

void GrantIssuer::grant(Region* region, unsigned access) {
    std::lock_guard lock(mutex_);
    const std::byte* const mapped_address = table_ == nullptr ? nullptr : region->add_issuer(weak_from_this());
    if (mapped_address == nullptr) {
        return;
    }
    const std::uint32_t slot = grant_count_++ % GrantTable::slot_count;
    revoke_slot(slot);
    granted_rkeys_[slot] = region->rkey;
    Grant& grant = table_->grants[slot];
    grant.rkey = region->rkey;
    grant.begin = region->iova;
    grant.length_bytes = region->length_bytes;
    grant.mapped_address = reinterpret_cast<std::uint64_t>(mapped_address);
    grant.access = access;
    grant.is_valid = 1;
}

void GrantIssuer::revoke(std::uint32_t rkey) {
    std::lock_guard lock(mutex_);
    const auto entry = std::ranges::find(granted_rkeys_, rkey);
    if (entry != granted_rkeys_.end()) {
        revoke_slot(static_cast<std::uint32_t>(entry - granted_rkeys_.begin()));
    }
}

void GrantIssuer::revoke_all() {
    std::lock_guard lock(mutex_);
    for (std::uint32_t slot = 0; slot < GrantTable::slot_count; ++slot) {
        revoke_slot(slot);
    }
}

void GrantIssuer::revoke_slot(std::uint32_t slot) {
    if (granted_rkeys_[slot] != 0) {
        granted_rkeys_[slot] = 0;
        table_->grants[slot].is_valid = 0;
        wait_until_unused(slot);
    }
}

void GrantIssuer::wait_until_unused(std::uint32_t slot) {
    const auto is_unused = [&] { return table_->used_slot != slot + 1; };
    if (is_requester_gone_ || spin_until(is_unused)) {
        return;
    }
    const auto deadline = std::chrono::steady_clock::now() + requester_timeout;
    // A pidfd is readable when the process has ended.
    pollfd pidfd_poll{requester_pidfd_.get(), POLLIN, 0};
    while (!is_unused() && !is_requester_gone_) {
        is_requester_gone_ = poll(&pidfd_poll, 1, 1) > 0 || std::chrono::steady_clock::now() >= deadline;
    }
}

void GrantIssuer::close() {
    {
        std::lock_guard lock(issuers().mutex);
        std::erase(issuers().open_issuers, this);
    }
    revoke_all();
    collect_traffic();
    std::lock_guard lock(mutex_);
    table_ = nullptr;
}

void GrantIssuer::collect_traffic() {
    std::lock_guard lock(mutex_);
    if (table_ == nullptr) {
        return;
    }
    Traffic::Direction& served_traffic = device_->traffic.served;
    served_traffic.requests += take_growth(table_->request_count, &collected_requests_);
    // The requester has already added these bytes to the counters of the port.
    served_traffic.write_bytes.add_without_port(take_growth(table_->write_bytes, &collected_write_bytes_));
    served_traffic.read_bytes.add_without_port(take_growth(table_->read_bytes, &collected_read_bytes_));
}

void collect_granted_traffic() {
    std::lock_guard lock(issuers().mutex);
    for (GrantIssuer* const issuer : issuers().open_issuers) {
        issuer->collect_traffic();
    }
}

} // namespace gdrkit::twin::verbs
