/*
 * Functions to pass the exporter's handle to the importer over a UNIX socket. The importer sends one byte back when it
 * has read the file and unmapped the memory.
 */
#pragma once

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "example.h"

static inline struct sockaddr_un make_socket_address(const char* path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        fail(path, ENAMETOOLONG);
    }
    strcpy(address.sun_path, path);
    return address;
}

/* Sends or receives exactly `length_bytes`. `transfer` is send_some() or recv(), which may transfer fewer bytes. */
static inline void transfer_all(ssize_t (*transfer)(int, void*, size_t, int), int peer_socket, void* buffer,
                                size_t length_bytes) {
    for (size_t transferred_bytes = 0; transferred_bytes < length_bytes;) {
        const ssize_t count =
            transfer(peer_socket, (char*)buffer + transferred_bytes, length_bytes - transferred_bytes, MSG_NOSIGNAL);
        if (count <= 0) {
            fail("the other process", count == 0 ? EPIPE : errno);
        }
        transferred_bytes += (size_t)count;
    }
}

/* Calls send(). Has the signature of recv(), so that transfer_all() can call either. */
static inline ssize_t send_some(int peer_socket, void* buffer, size_t length_bytes, int flags) {
    return send(peer_socket, buffer, length_bytes, flags);
}
