/* Prints whether GPU iovs are available. Exit status 0: yes, 2: no. */
#include "example.h"

int main(void) {
    if (!hf3fs_gdr_available()) {
        printf("GDR is not available\n");
        return 2;
    }
    printf("GDR is available with %d GPUs\n", hf3fs_gdr_device_count());
    return 0;
}
