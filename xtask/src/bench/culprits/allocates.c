// Takes new pages at a rate, for `cargo xtask bench culprits`. Usage: allocates file|anon MIB_PER_SECOND FILE
//
// `file` reads a sparse file into the page cache, `anon` writes to memory of its own. `none` only computes. After
// SIGTERM it prints its process and the MiB that it took, and ends.
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
// Memory that `anon` takes before it gives all back.
#define HELD (96 * MIB)
#define FILE_BYTES (2048 * MIB)

static volatile sig_atomic_t is_over;

static void stop(int signal) {
    (void)signal;
    is_over = 1;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

int main(int count, char **args) {
    if (count < 4) return 2;
    const char *kind = args[1];
    double rate = atof(args[2]), begun = now();
    char *buffer = malloc(MIB);
    char *held = mmap(0, HELD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int file = open(args[3], O_RDWR | O_CREAT, 0600);
    if (!buffer || held == MAP_FAILED || file < 0 || ftruncate(file, FILE_BYTES)) return 1;
    signal(SIGTERM, stop);
    volatile uint64_t sum = 0;
    size_t done = 0;
    for (; !is_over; done += MIB) {
        if (!strcmp(kind, "none")) {
            for (int i = 0; i < 1000000; i++) sum += i;
            done -= MIB;
            continue;
        }
        if (!strcmp(kind, "file")) {
            if (pread(file, buffer, MIB, done % FILE_BYTES) < 0) return 1;
        } else {
            if (done % HELD == 0) madvise(held, HELD, MADV_DONTNEED);
            for (size_t at = 0; at < MIB; at += 4096) held[(done + at) % HELD] = 1;
        }
        double ahead = done / (double)MIB / rate - (now() - begun);
        if (ahead > 0) usleep(ahead * 1e6);
    }
    printf("@@took %d %zu\n", getpid(), done / MIB);
    return 0;
}
