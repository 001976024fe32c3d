// A process that reads random places of its memory, checks each, and writes a byte after 20,000 of them. SIGTERM
// ends it: with 0 if all bytes were right.

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

static volatile sig_atomic_t is_asked_to_end;

static void end(int signal) {
    (void)signal;
    is_asked_to_end = 1;
}

static unsigned char expected(size_t at) {
    return (unsigned char)(at >> 12) ^ (unsigned char)at;
}

// Not static, so that a probe finds it.
__attribute__((noinline)) int gather_step(const unsigned char *memory, size_t mask, unsigned long *seed) {
    int wrong = 0;
    for (int i = 0; i < 20000; i++) {
        *seed = *seed * 6364136223846793005UL + 1442695040888963407UL;
        size_t at = (*seed >> 20) & mask;
        wrong += memory[at] != expected(at);
    }
    return wrong;
}

int main(int argc, char **argv) {
    size_t bytes = (argc > 1 ? strtoul(argv[1], NULL, 10) : 256) << 20;
    // Not through malloc: its memory has another page size under a tool.
    unsigned char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        return 2;
    }
    // "large" as argument 2: huge pages from the start; else none, also where the system has them always.
    int is_large = argc > 2 && !strcmp(argv[2], "large");
    if (is_large) {
        madvise(memory, bytes, MADV_HUGEPAGE);
    } else {
        prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
    }
    for (size_t at = 0; at < bytes; at++) {
        memory[at] = expected(at);
    }
    prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
    signal(SIGTERM, end);
    int sink = open("/dev/null", O_WRONLY);
    puts("up");
    fflush(stdout);
    unsigned long seed = 1;
    while (!is_asked_to_end) {
        if (gather_step(memory, bytes - 1, &seed) || write(sink, "x", 1) != 1) {
            return 1;
        }
    }
    return 0;
}
