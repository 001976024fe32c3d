/* Maps memory, touches a little of each 2M of it, and unmaps it, again and again. On large pages, each round
   zeroes all of it. The pattern is that of https://github.com/microsoft/mimalloc/issues/1373. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int argc, char **argv) {
    long rounds = argc > 1 ? atol(argv[1]) : 1, sum = 0;
    size_t length = 64L << 20, step = 1L << 18;
    for (long round = 0; round < rounds; round++) {
        char *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            return 1;
        /* As an allocator does that wants large pages. */
        madvise(memory, length, MADV_HUGEPAGE);
        for (size_t at = 0; at < length; at += step)
            sum += ++memory[at];
        munmap(memory, length);
    }
    printf("%ld\n", sum);
    return 0;
}
