// Workers that touch the same shared memory. Usage: workers COUNT MIB read|write 4K|2M. Prints the process ids of
// the workers, and the CPU nanoseconds of their first touches less those of their second ones. Then it waits for
// the end of its input.
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };

static int64_t cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t touch(volatile char *at, size_t bytes, int writes) {
    int64_t begun = cpu_ns();
    for (size_t i = 0; i < bytes; i += PAGE) {
        if (writes) at[i] = 1;
        else (void)at[i];
    }
    return cpu_ns() - begun;
}

static char *map(int file, size_t bytes) {
    char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) perror("mmap"), exit(1);
    return at;
}

int main(int argc, char **argv) {
    if (argc != 5) return 2;
    int count = atoi(argv[1]), writes = !strcmp(argv[3], "write"), huge = !strcmp(argv[4], "2M");
    size_t bytes = (size_t)atoi(argv[2]) << 20;
    int file = memfd_create("workers", huge ? MFD_HUGETLB : 0), out[2];
    if (file < 0 || ftruncate(file, bytes) || pipe(out)) return perror("memfd"), 1;
    // The pages are there before: what is left are page tables.
    char *own = map(file, bytes);
    memset(own, 1, bytes);
    munmap(own, bytes);
    pid_t *pids = calloc(count, sizeof *pids);
    int64_t sum = 0;
    for (int i = 0; i < count; i++) {
        if (!(pids[i] = fork())) {
            char *at = map(file, bytes);
            int64_t first = touch(at, bytes, writes), told = first - touch(at, bytes, writes);
            if (write(out[1], &told, sizeof told) != sizeof told) _exit(1);
            for (;;) pause();
        }
        int64_t told;
        if (pids[i] < 0 || read(out[0], &told, sizeof told) != sizeof told) return perror("worker"), 1;
        sum += told;
    }
    for (int i = 0; i < count; i++) printf("%d ", pids[i]);
    printf("\n%lld\n", (long long)sum);
    fflush(stdout);
    while (getchar() != EOF) {}
    for (int i = 0; i < count; i++) kill(pids[i], SIGKILL), waitpid(pids[i], 0, 0);
    return 0;
}
