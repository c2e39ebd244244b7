// Opens and closes XRC domains, and keeps their shared receive queues and receive queue pairs.

#include "ibverbs/xrc_domain.hpp"

#include <fcntl.h>
#include <sys/stat.h>

#include <tuple>

#include "ibverbs/handle.hpp"
#include "ibverbs/queue_pair.hpp"
#include "ibverbs/session.hpp"

namespace gdrkit::twin::verbs {
namespace {

using FileKey = std::tuple<const Device*, dev_t, ino_t>;

// The open XRC domains of files. An entry whose domain is closed has an expired pointer.
struct SharedDomains {
    std::mutex mutex;
    std::map<FileKey, std::weak_ptr<XrcDomain>> domains;
};

SharedDomains& shared_domains() {
    static auto* const instance = new SharedDomains;
    return *instance;
}

// Find or create the domain of a file. Return 0 or an errno, as the kernel's ib_uverbs_open_xrcd does.
int open_file_domain(const Device* device, int fd, int oflags, std::shared_ptr<XrcDomain>* domain) {
    struct stat status {};
    if (fstat(fd, &status) != 0) {
        return EBADF;
    }
    SharedDomains& shared_domain_table = shared_domains();
    std::lock_guard lock(shared_domain_table.mutex);
    std::weak_ptr<XrcDomain>& entry = shared_domain_table.domains[{device, status.st_dev, status.st_ino}];
    *domain = entry.lock();
    if (*domain != nullptr) {
        return (oflags & O_EXCL) != 0 ? EINVAL : 0;
    }
    if ((oflags & O_CREAT) == 0) {
        return EAGAIN;
    }
    *domain = std::make_shared<XrcDomain>();
    entry = *domain;
    return 0;
}

} // namespace

void XrcDomain::add_queue(const std::shared_ptr<SharedReceiveQueue>& srq) {
    std::lock_guard lock(mutex_);
    queues_[srq->number()] = srq;
}

void XrcDomain::remove_queue(const SharedReceiveQueue& srq) {
    std::lock_guard lock(mutex_);
    queues_.erase(srq.number());
}

std::shared_ptr<SharedReceiveQueue> XrcDomain::find_queue(std::uint32_t number) {
    std::lock_guard lock(mutex_);
    const auto queue = queues_.find(number);
    return queue == queues_.end() ? nullptr : queue->second;
}

void XrcDomain::drop_completions(std::uint32_t qp_num) {
    std::lock_guard lock(mutex_);
    for (const auto& [number, queue] : queues_) {
        queue->completion_queue()->drop_completions_of(qp_num);
    }
}

void XrcDomain::add_receive_qp(const std::shared_ptr<QueuePair>& queue_pair, ibv_qp* public_qp) {
    std::lock_guard lock(mutex_);
    receive_qps_[queue_pair->qp_num()] = {queue_pair, {public_qp}};
}

std::shared_ptr<QueuePair> XrcDomain::open_receive_qp(std::uint32_t qp_num, ibv_qp* public_qp) {
    std::lock_guard lock(mutex_);
    const auto receive_qp = receive_qps_.find(qp_num);
    if (receive_qp == receive_qps_.end()) {
        return nullptr;
    }
    receive_qp->second.public_qps.push_back(public_qp);
    return receive_qp->second.impl;
}

bool XrcDomain::remove_public_qp(const ibv_qp* public_qp) {
    std::lock_guard lock(mutex_);
    const auto receive_qp = receive_qps_.find(public_qp->qp_num);
    if (receive_qp == receive_qps_.end()) {
        return true;
    }
    std::erase(receive_qp->second.public_qps, public_qp);
    if (!receive_qp->second.public_qps.empty()) {
        return false;
    }
    receive_qps_.erase(receive_qp);
    return true;
}

void XrcDomain::raise(std::uint32_t qp_num, ibv_event_type type) {
    std::lock_guard lock(mutex_);
    const auto receive_qp = receive_qps_.find(qp_num);
    if (receive_qp != receive_qps_.end()) {
        for (ibv_qp* const public_qp : receive_qp->second.public_qps) {
            get_context(public_qp->context)->raise(public_qp, type, get_qp_handle(public_qp)->async_event_counter);
        }
    }
}

ibv_xrcd* open_xrc_domain(ibv_context* context, ibv_xrcd_init_attr* init_attr) {
    if (const auto fault = find_injected_fault("ibv_open_xrcd")) {
        return fail_null(*fault);
    }
    constexpr std::uint32_t required_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
    if (init_attr->comp_mask >= IBV_XRCD_INIT_ATTR_RESERVED) {
        return fail_null(EOPNOTSUPP);
    }
    if (!is_alive("ibv_context", get_context(context)) || (init_attr->comp_mask & required_mask) != required_mask) {
        return fail_null(EINVAL);
    }
    auto handle = std::make_unique<XrcDomainHandle>();
    handle->public_xrcd.context = context;
    // A domain without a file belongs to this ibv_xrcd only.
    if (init_attr->fd == -1) {
        handle->impl = std::make_shared<XrcDomain>();
    } else if (const int error =
                   open_file_domain(get_context(context)->device, init_attr->fd, init_attr->oflags, &handle->impl);
               error != 0) {
        return fail_null(error);
    }
    ++get_context(context)->child_count;
    track("ibv_xrcd", handle.get());
    return &handle.release()->public_xrcd;
}

int close_xrc_domain(ibv_xrcd* xrcd) {
    if (const auto fault = find_injected_fault("ibv_close_xrcd")) {
        return *fault;
    }
    XrcDomainHandle* const handle = get_xrcd_handle(xrcd);
    if (!is_alive("ibv_xrcd", handle)) {
        return EINVAL;
    }
    if (handle->user_count != 0) {
        return EBUSY;
    }
    const std::shared_ptr<XrcDomain> domain = handle->impl;
    if (!retire("ibv_xrcd", handle)) {
        return EINVAL;
    }
    handle->impl.reset();
    --get_context(xrcd->context)->child_count;
    return 0;
}

} // namespace gdrkit::twin::verbs
