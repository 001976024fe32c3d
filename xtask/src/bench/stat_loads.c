// Loads whose cost has a measure of its own. Usage: stat_loads LOAD SECONDS [FILE [MIB]]. Says "up", waits for a
// line, works, prints the CPU seconds of the cost where it can time them itself (else 0), and waits for the end
// of its input.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double cpu(void) { return now(CLOCK_THREAD_CPUTIME_ID); }

static char *pages(size_t bytes) {
    char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) exit(1);
    madvise(at, bytes, MADV_NOHUGEPAGE);
    return at;
}

static double touch(char *at, size_t bytes, size_t step) {
    double begun = cpu();
    for (size_t i = 0; i < bytes; i += step) at[i]++;
    return cpu() - begun;
}

static void compute(void) {
    volatile double sum = 0;
    for (int i = 0; i < 20000000; i++) sum += i;
}

// First touches, less second ones.
static double faults(void) {
    size_t bytes = 128 << 20;
    char *at = pages(bytes);
    double cold = touch(at, bytes, 4096), warm = touch(at, bytes, 4096);
    munmap(at, bytes);
    compute();
    return cold - warm;
}

// Touches of twice as much memory as there is, less those of as many resident pages.
static double swap(char *at, size_t bytes) {
    double all = touch(at, bytes, 4096), warm = 0;
    touch(at, 1 << 20, 4096);
    for (size_t i = 0; i < bytes >> 20; i++) warm += touch(at, 1 << 20, 4096);
    compute();
    return all - warm;
}

// Reclaim unmaps each page before it frees it.
static void read_file(const char *at, size_t bytes) {
    volatile char sum = 0;
    for (size_t i = 0; i < bytes; i += 4096) sum += at[i];
}

// Memory in pieces, then put together by order of the writer.
static void compaction(void) {
    size_t bytes = 512 << 20;
    char *at = pages(bytes);
    touch(at, bytes, 4096);
    for (size_t i = 0; i < bytes; i += 8192) madvise(at + i, 4096, MADV_DONTNEED);
    int file = open("/proc/sys/vm/compact_memory", O_WRONLY);
    if (write(file, "1", 1) != 1) exit(1);
    close(file);
    munmap(at, bytes);
}

int main(int count, char **args) {
    const char *load = args[1];
    double own = 0;
    char *swapped = strcmp(load, "swap") ? 0 : pages(128 << 20);
    size_t bytes = (count > 4 ? atol(args[4]) : 256) << 20;
    char *file = count > 3 ? mmap(0, bytes, PROT_READ, MAP_SHARED, open(args[3], O_RDONLY), 0) : 0;
    if (file == MAP_FAILED) exit(1);
    puts("up");
    fflush(stdout);
    getchar();
    for (double end = now(CLOCK_MONOTONIC) + atof(args[2]); now(CLOCK_MONOTONIC) < end;) {
        if (!strcmp(load, "faults")) own += faults();
        else if (swapped) own += swap(swapped, 128 << 20);
        else if (file) read_file(file, bytes);
        else compaction();
    }
    printf("%.6f\n", own);
    fflush(stdout);
    while (getchar() != EOF) {}
    return 0;
}
