// A macro that adds an ELF note (owner "GDRKIT", type 1) to a library. A report recognizes a loaded twin by this note.
// Use the macro once in each twin.
#pragma once

#define GDRKIT_TWIN_NOTE(text)                                                                                         \
    namespace {                                                                                                        \
    struct [[gnu::packed]] GdrkitNote {                                                                                \
        unsigned owner_size, text_size, type;                                                                          \
        char owner[8];                                                                                                 \
        char description[(sizeof(text) + 3) / 4 * 4];                                                                  \
    };                                                                                                                 \
    [[gnu::section(".note.gdrkit"), gnu::used, gnu::aligned(4)]] const GdrkitNote gdrkit_note = {                      \
        sizeof "GDRKIT", sizeof(text), 1, "GDRKIT", text};                                                             \
    }
