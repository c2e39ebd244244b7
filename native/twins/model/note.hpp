// The ELF note (owner "GDRKIT", type 1) by which a report can tell that a loaded library is a twin. Use the macro once
// in each library.
#pragma once

#define GDRKIT_TWIN_NOTE(text)                                                                                         \
    namespace {                                                                                                        \
    struct [[gnu::packed]] GdrkitNote {                                                                                \
        unsigned owner_size, text_size, type;                                                                          \
        char owner[8];                                                                                                 \
        char description[(sizeof(text) + 3) / 4 * 4];                                                                  \
    };                                                                                                                 \
    [[gnu::section(".note.gdrkit"), gnu::used, gnu::aligned(4)]] const GdrkitNote gdrkit_note = {7, sizeof(text), 1,   \
                                                                                                 "GDRKIT", text};      \
    }
