// The programs that `cargo xtask bench ranking` mixes. Usage: ranking_loads KIND MIB base|huge [PERCENT]
//
// Each works in rounds, for so many percent of a CPU. After SIGUSR1 it prints its rounds and their CPU time in
// nanoseconds, and ends.
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

// The CPU time between two rests.
#define WORK_NS 3000000

static volatile sig_atomic_t is_over;
static uint64_t rounds;

static void stop(int signal) {
    (void)signal;
    is_over = 1;
}

static int64_t cpu_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static char *map(size_t bytes, int is_huge) {
    // A block more leaves room to align the start.
    size_t block = 2 << 20;
    char *start = mmap(NULL, bytes + block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
        exit(2);
    }
    start = (char *)(((uintptr_t)start + block - 1) & ~(block - 1));
    madvise(start, bytes, is_huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return start;
}

// Loads whose addresses are known beforehand.
static uint64_t gather(const char *memory, size_t bytes, uint64_t *state) {
    uint64_t sum = 0;
    for (int i = 0; i < 4096; i++) {
        sum += *(const uint64_t *)(memory + (next(state) % (bytes / 64)) * 64);
    }
    return sum;
}

// Each address is the result of the previous load.
static uint64_t chase(const char *memory, size_t bytes, uint64_t *state) {
    uint64_t at = *state;
    for (int i = 0; i < 4096; i++) {
        at = at * 6364136223846793005u + 1442695040888963407u;
        at += *(const uint64_t *)(memory + ((at >> 20) % (bytes / 64)) * 64);
    }
    return *state = at;
}

static uint64_t sequential(const char *memory, size_t bytes, size_t *at) {
    uint64_t sum = 0;
    for (int i = 0; i < 4096; i++, *at = (*at + 64) % bytes) {
        sum += *(const uint64_t *)(memory + *at);
    }
    return sum;
}

static uint64_t compute(uint64_t *state) {
    uint64_t sum = 0;
    for (int i = 0; i < 65536; i++) {
        sum += next(state) >> 3;
    }
    return sum;
}

// First writes of new memory, a page each.
static uint64_t fault(char *memory, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 4096) {
        memory[at] = 1;
    }
    madvise(memory, bytes, MADV_DONTNEED);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 4) {
        return 2;
    }
    const char *kind = argv[1];
    size_t bytes = (size_t)atoi(argv[2]) << 20;
    int percent = argc > 4 ? atoi(argv[4]) : 100;
    char *memory = map(bytes, strcmp(argv[3], "huge") == 0);
    uint64_t state = 88172645463325252u, sum = 0;
    size_t at = 0;
    signal(SIGUSR1, stop);
    if (strcmp(kind, "fault") != 0) {
        memset(memory, 0, bytes);
    }
    int64_t begin = cpu_ns(), worked = begin;
    puts("up");
    fflush(stdout);
    while (!is_over) {
        switch (kind[0]) {
        case 'g': sum += gather(memory, bytes, &state); break;
        case 'c': sum += kind[1] == 'h' ? chase(memory, bytes, &state) : compute(&state); break;
        case 's': sum += kind[1] == 'e' ? sequential(memory, bytes, &at) : (uint64_t)usleep(100000); break;
        case 'f': sum += fault(memory, bytes); break;
        default: return 2;
        }
        rounds++;
        int64_t work = cpu_ns() - worked;
        if (percent < 100 && work > WORK_NS) {
            usleep(work / 1000 * (100 - percent) / percent);
            worked = cpu_ns();
        }
    }
    printf("%llu %lld %llu\n", (unsigned long long)rounds, (long long)(cpu_ns() - begin), (unsigned long long)sum);
    return 0;
}
