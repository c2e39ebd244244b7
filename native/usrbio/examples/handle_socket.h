/*
 * Passes the exporter's handle to the importer over a socket in the file system. The importer sends one byte back when
 * it has finished.
 */
#pragma once

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "example.h"

static inline struct sockaddr_un address_of(const char* path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        fail(path, ENAMETOOLONG);
    }
    strcpy(address.sun_path, path);
    return address;
}

static inline void transfer_all(ssize_t (*transfer)(int, void*, size_t, int), int peer, void* bytes, size_t length) {
    for (size_t done = 0; done < length;) {
        const ssize_t count = transfer(peer, (char*)bytes + done, length - done, MSG_NOSIGNAL);
        if (count <= 0) {
            fail("the other process", count == 0 ? EPIPE : errno);
        }
        done += (size_t)count;
    }
}

static inline ssize_t send_some(int peer, void* bytes, size_t length, int flags) {
    return send(peer, bytes, length, flags);
}
