// Allocates 80M of heap in small chunks, 40M in one chunk, 8M by mmap and 16M in a thread's arena, and prints
// for each whether it is on large pages, 4M from its start and 4M from its end.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MIB = 1 << 20, CHUNK = 4000 };

static int is_large(const char *at) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    unsigned long from, to, kib = 0;
    int is_here = 0;
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) {
            is_here = from <= (uintptr_t)at && (uintptr_t)at < to;
        } else if (is_here && sscanf(line, "AnonHugePages: %lu", &kib) == 1) {
            break;
        }
    }
    fclose(maps);
    return kib > 0;
}

static void show(const char *name, const char *first, const char *last) {
    printf("%s %d %d\n", name, is_large(first), is_large(last));
}

static void small(const char *name, size_t bytes) {
    char *first = NULL, *last = NULL;
    for (size_t done = 0; done < bytes; done += CHUNK) {
        char *chunk = malloc(CHUNK);
        memset(chunk, 1, CHUNK);
        first = done < 4 * MIB ? chunk : first;
        last = done < bytes - 4 * MIB ? chunk : last;
    }
    show(name, first, last);
}

static void *thread(void *unused) {
    small("arena", 16 * MIB);
    return unused;
}

int main(void) {
    small("heap", 80 * MIB);
    char *chunk = malloc(40 * MIB);
    memset(chunk, 1, 40 * MIB);
    show("chunk", chunk + 4 * MIB, chunk + 36 * MIB);
    char *own = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(own, 1, 8 * MIB);
    show("mmap", own + 2 * MIB, own + 7 * MIB);
    pthread_t other;
    pthread_create(&other, NULL, thread, NULL);
    pthread_join(other, NULL);
    return 0;
}
