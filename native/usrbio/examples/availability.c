/* Prints whether GPU iovs (I/O buffers in GPU memory) are available. The exit status is 0 if they are, else 2. */
#include "example.h"

int main(void) {
    if (!hf3fs_gdr_available()) {
        printf("GDR is not available\n");
        return 2;
    }
    printf("GDR is available with %d GPUs\n", hf3fs_gdr_device_count());
    return 0;
}
