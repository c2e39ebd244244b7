// The identifier (rdma_cm_id) with its state, and the event channel with its queue.
#pragma once

#include <array>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "ibverbs/event_queue.hpp"
#include "model/sockets.hpp"
#include "rdmacm/devices.hpp"
#include "rdmacm/manager.hpp"
#include "rdmacm/wire.hpp"

namespace gdrkit::twin::rdmacm {

struct Connection;
struct Identifier;

// The states of the kernel's connection manager (enum rdma_cm_state) that the caller's operations depend on.
enum class State { idle, bound, addr_resolved, route_resolved, connecting, disconnected, listening };

// An event as the kernel would report it. rdma_get_cm_event converts it to the event that the program gets, and changes
// the state of the queue pair if the event requires it.
struct QueuedEvent {
    Identifier* id = nullptr;     // the identifier that the event is reported on; for a request, the listener
    Identifier* new_id = nullptr; // for a request, the identifier of the new connection
    rdma_cm_event_type type{};
    int status = 0;
    rdma_conn_param conn{};
    rdma_ud_param ud{};
    bool is_datagram = false;
    std::array<std::uint8_t, 256> private_data{};
    std::uint8_t private_bytes = 0;
    std::shared_ptr<verbs::EventCounter> counter;
    IpAddress group; // the group of a multicast join
};

struct Channel {
    rdma_event_channel public_channel{}; // first, because programs hold pointers to it
    verbs::EventQueue<QueuedEvent> events;
};

// A claim on a port: sockets whose names reserve the port in this domain.
struct PortClaim {
    std::uint16_t port = 0; // host byte order; 0: none
    std::vector<Fd> name_sockets;
};

// A group that the identifier has joined.
struct JoinedGroup {
    IpAddress address;
    ibv_gid gid{};
    void* context = nullptr;
    bool is_attached = false; // the identifier's queue pair receives the messages of the group
};

struct Identifier {
    Identifier() = default;
    Identifier(const Identifier&) = delete;
    Identifier& operator=(const Identifier&) = delete;
    // Free the route here and not in rdma_destroy_id: the program never destroys the identifier of a request that it
    // has not taken.
    ~Identifier() { std::free(public_id.route.path_rec); }

    rdma_cm_id public_id{}; // first, because programs hold pointers to it
    // Points to this identifier, and to null after it was destroyed.
    std::shared_ptr<Identifier*> self = std::make_shared<Identifier*>(this);
    State state = State::idle;
    Channel* channel = nullptr;
    bool is_synchronous = false; // the identifier owns its channel, and each call waits for its event
    // Counts the events that the program took, and the acknowledged events.
    std::shared_ptr<verbs::EventCounter> counter = std::make_shared<verbs::EventCounter>();
    std::optional<LocalPort> local_port;
    CmDevice* pd_device = nullptr; // the device whose default protection domain the identifier uses
    ibv_gid remote_gid{};
    PortClaim claim;
    std::uint32_t psn = 0;
    std::uint8_t tos = 0;
    std::uint8_t ack_timeout = 0; // 0: not set
    bool reuse_address = false;
    bool ipv6_only = false;
    // Used by a listener.
    std::vector<std::pair<Fd, Token>> listening_sockets;
    int free_backlog = 0; // number of requests that the backlog can still hold
    // If this is not 0, the connection manager answers datagram requests (SIDR) with this queue pair number, and
    // reports no event.
    std::uint32_t automatic_qp_num = 0;
    // Used by an identifier with a connection. `responder_resources` and `initiator_depth` describe this side.
    std::shared_ptr<Connection> connection;
    std::uint8_t responder_resources = 0, initiator_depth = 0;
    std::uint8_t retry_count = 7, rnr_retry_count = 7;
    std::uint32_t remote_qp_num = 0, remote_psn = 0;
    std::uint32_t qkey = 0;
    bool is_passive = false;
    bool is_accepted = false; // the program has accepted the request; until then the program gets no event
    bool has_connect_failed = false;
    // rdma_create_ep stores these for rdma_connect and rdma_get_request.
    std::unique_ptr<ibv_qp_init_attr> endpoint_attributes;
    std::string connect_data;
    std::vector<JoinedGroup> joined_groups;
};

// Return the identifier of a public structure, or nullptr if the structure is not an identifier. If the identifier was
// destroyed, end the process and print the stacks of its destruction and of this call.
Identifier* get_identifier(rdma_cm_id* id);
Channel* get_channel(rdma_event_channel* channel);

// Create an identifier. Without a channel, the identifier is synchronous and gets a channel of its own. Return 0 or an
// errno.
int make_identifier(rdma_event_channel* channel, void* context, rdma_port_space ps, ibv_qp_type qp_type,
                    Identifier** id);

// Store the device or the source address in the identifier, as librdmacm does after it has queried the kernel.
void set_local_port(Identifier* id, const LocalPort& local_port);
void set_source_address(Identifier* id, const IpAddress& address, std::uint16_t port);

// Queue an event of the identifier. The caller holds the lock of the manager.
void queue_event(Identifier* id, QueuedEvent event);
void queue_event(Identifier* id, rdma_cm_event_type type, int status = 0);

// Wait for the event of a call on a synchronous identifier, and keep it in `id->event`. Return 0, or the errno or the
// positive status that the event reports. Does nothing for an identifier with a channel of the program.
int wait_if_synchronous(Identifier* id);

bool is_datagram(const Identifier& id);

} // namespace gdrkit::twin::rdmacm
