/* Calls that change memory or its behaviour: each succeeds or fails. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

static char *map(void *at, size_t bytes, int protection, int flags, int file)
{
    return mmap(at, bytes, protection, MAP_PRIVATE | flags | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
}

/* Memory that was freed while it was locked comes back as zeros. */
static void locked_and_freed(void)
{
    int wrong = 0;
    for (int turn = 0; turn < 8; turn++) {
        char *block = malloc(MIB);
        memset(block, 1, MIB);
        mlock(block, MIB);
        free(block);
        char *next = calloc(1, MIB);
        for (size_t at = 0; at < MIB; at++)
            wrong += next[at] != 0;
        free(next);
        char *mapped = map(0, MIB, PROT_READ | PROT_WRITE, 0, -1);
        memset(mapped, 1, MIB);
        mlock2(mapped, MIB, MLOCK_ONFAULT);
        munmap(mapped, MIB);
        mapped = map(0, MIB, PROT_READ | PROT_WRITE, 0, -1);
        for (size_t at = 0; at < MIB; at++)
            wrong += mapped[at] != 0;
        munmap(mapped, MIB);
    }
    printf("old bytes: %d\n", wrong);
}

/* Blocks of the same length are allocated and freed again and again. */
static void freed_blocks(void)
{
    int wrong = 0;
    for (int turn = 0; turn < 2000; turn++) {
        char *block = malloc(MIB), *zeros = calloc(1, MIB / 2);
        memset(block, turn, MIB);
        for (size_t at = 0; at < MIB / 2; at += 512)
            wrong += zeros[at] != 0;
        memset(zeros, 1, MIB / 2);
        if (turn % 100 == 0)
            mprotect(block, MIB, PROT_READ);
        wrong += block[MIB / 2] != (char)turn;
        free(block);
        free(zeros);
    }
    printf("freed blocks: %d wrong\n", wrong);
}

static int advise(char *at, int advice)
{
    return madvise(at, MIB, advice) == 0 ? 0 : errno;
}

static void advice(void)
{
    char *at = map(0, MIB, PROT_READ | PROT_WRITE, 0, -1);
    char line[256];
    int is_undumped = 0, is_it = 0;

    memset(at, 1, MIB);
    printf("DONTFORK %d WIPEONFORK %d GUARD_INSTALL %d GUARD_REMOVE %d REMOVE %d nonsense %d\n",
           advise(at, MADV_DONTFORK), advise(at, MADV_WIPEONFORK), advise(at, 102), advise(at, 103),
           advise(at, MADV_REMOVE), advise(at, 77));
    printf("DONTNEED_LOCKED %d", advise(at, 24));
    printf(" byte %d\nDONTDUMP %d", at[0], advise(at, MADV_DONTDUMP));
    FILE *maps = fopen("/proc/self/smaps", "r");
    while (fgets(line, sizeof line, maps)) {
        char *start = at, *from, *to;
        if (sscanf(line, "%p-%p ", (void **)&from, (void **)&to) == 2)
            is_it = from <= start && start < to;
        if (is_it && strncmp(line, "VmFlags:", 8) == 0)
            is_undumped = strstr(line, " dd") != NULL;
    }
    fclose(maps);
    printf(" %d DODUMP %d\n", is_undumped, advise(at, MADV_DODUMP));
    printf("DOFORK %d KEEPONFORK %d WILLNEED %d byte %d\n", advise(at, MADV_DOFORK),
           advise(at, 19), advise(at, MADV_WILLNEED), at[0]);
    mlock(at, 4096);
    printf("DONTNEED of locked pages %d", advise(at, MADV_DONTNEED));
    printf(" byte %d", at[0]);
    munlock(at, 4096);
    printf(", unlocked %d", advise(at, MADV_DONTNEED));
    printf(" byte %d\n", at[0]);
    munmap(at, MIB);
}

/* Reserves more addresses than the paged region has, and maps memory there. */
static void reservations(void)
{
    size_t half_terabyte = (size_t)512 << 30;
    char *at = map(0, half_terabyte, PROT_NONE, MAP_NORESERVE, -1);
    char *other = map(0, half_terabyte, PROT_NONE, MAP_NORESERVE, -1);
    printf("reserved: %d %d", at != MAP_FAILED, other != MAP_FAILED);
    char *writable = map(0, 3 * half_terabyte, PROT_READ | PROT_WRITE, MAP_NORESERVE, -1);
    printf(" %d", writable != MAP_FAILED);
    writable[half_terabyte] = 5;
    printf(" %d", mprotect(at + MIB, MIB, PROT_READ | PROT_WRITE));
    memset(at + MIB, 7, MIB);
    int file = open("/proc/self/exe", O_RDONLY);
    printf(" %d", map(at, 4096, PROT_READ, MAP_FIXED, file) == at);
    printf(" %d %.3s %d\n", writable[half_terabyte], at + 1, at[2 * MIB - 1]);
    close(file);
    munmap(at, half_terabyte);
    munmap(other, half_terabyte);
    munmap(writable, 3 * half_terabyte);
}

/* Maps a file over pages, and unmaps it. */
static void files_over_pages(void)
{
    char *at = map(0, 4 * MIB, PROT_READ | PROT_WRITE, 0, -1);
    int file = open("/proc/self/exe", O_RDONLY);
    memset(at, 9, 4 * MIB);
    printf("file: %d", map(at + MIB, 8192, PROT_READ | PROT_WRITE, MAP_FIXED, file) == at + MIB);
    printf(" %.3s", at + MIB + 1);
    at[MIB + 1] = 'e';
    printf(" %.3s", at + MIB + 1);
    printf(" %d", madvise(at + MIB, 8192, MADV_DONTNEED));
    printf(" %.3s %d %d\n", at + MIB + 1, at[MIB - 1], at[MIB + 8192]);
    /* Maps zeros over the file, and unmaps everything. */
    printf("zeros: %d", map(at + MIB, 8192, PROT_READ | PROT_WRITE, MAP_FIXED, -1) == at + MIB);
    printf(" %d", at[MIB + 1]);
    printf(" %d\n", munmap(at, 4 * MIB));
    close(file);
    for (int turn = 0; turn < 8; turn++) {
        char *next = map(0, 4 * MIB, PROT_READ | PROT_WRITE, 0, -1);
        next[MIB] = 1;
        munmap(next, 4 * MIB);
    }
}

static int is_filled(const char *at, char value)
{
    for (size_t i = 0; i < MIB; i++)
        if (at[i] != value)
            return 0;
    return 1;
}

/* Moves memory to fixed places: inside the region, into holes of it, and outside. */
static void moves(void)
{
    enum { READ_WRITE = PROT_READ | PROT_WRITE };
    char *at = map(0, 4 * MIB, READ_WRITE, 0, -1);
    char *beyond = map(0, MIB, READ_WRITE, MAP_STACK, -1);
    for (int i = 0; i < 4; i++)
        memset(at + i * MIB, i + 1, MIB);
    /* The first range replaces the third; then the fourth fills the hole of the first. */
    printf("over: %d", mremap(at, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, at + 2 * MIB) == at + 2 * MIB);
    printf(" %d\n", is_filled(at + 2 * MIB, 1));
    printf("into a hole: %d", mremap(at + 3 * MIB, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, at) == at);
    printf(" %d", is_filled(at, 4));
    for (int i = 0; i < 64; i++)
        memset(malloc(512 << 10), 9, 512 << 10);
    for (int i = 0; i < 64; i++)
        memset(map(0, 256 << 10, READ_WRITE, 0, -1), 9, 256 << 10);
    printf(" %d\n", is_filled(at, 4));
    printf("beyond: %d", mremap(at, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, beyond) == beyond);
    printf(" %d", is_filled(beyond, 4));
    printf(", and back: %d", mremap(beyond, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, at) == at);
    printf(" %d\n", is_filled(at, 4));
    char *copy = mremap(at + MIB, MIB, MIB, MREMAP_MAYMOVE | 4 /* DONTUNMAP */, 0);
    printf("zeros left: %d %d\n", is_filled(copy, 2), is_filled(at + MIB, 0));
    printf("overlapping: %d", mremap(at, MIB, MIB, MREMAP_MAYMOVE | MREMAP_FIXED, at + 4096) == MAP_FAILED);
    printf(" %d\n", errno);
    printf("hole mapped again: %d", munmap(at, MIB));
    printf(" %d", map(at, MIB, READ_WRITE, MAP_FIXED, -1) == at);
    memset(at, 7, MIB);
    for (int i = 0; i < 64; i++)
        memset(map(0, 256 << 10, READ_WRITE, 0, -1), 9, 256 << 10);
    printf(" %d\n", is_filled(at, 7));
}

/* Needs more mappings than the kernel allows inside one region: the rest is allocated elsewhere. */
static void many_mappings(void)
{
    enum { BLOCKS = 40000 };
    static char *blocks[BLOCKS];
    int wrong = 0;
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(256 << 10);
        if (blocks[i])
            blocks[i][0] = (char)i;
        else
            wrong++;
    }
    printf("8 GiB beside them: %d\n", malloc((size_t)8 << 30) != NULL);
    for (int i = 0; i < BLOCKS; i += 2)
        free(blocks[i]);
    for (int i = 1; i < BLOCKS; i += 4)
        mprotect(blocks[i], 4096, PROT_READ);
    for (int i = 0; i < BLOCKS; i += 2) {
        char *block = i % 4 ? malloc(400 << 10) : calloc(1, 300 << 10);
        if (!block || malloc_usable_size(block) < 300 << 10)
            wrong++;
        else
            block[0] = (char)i;
        blocks[i] = i % 8 ? block : realloc(block, 500 << 10);
    }
    for (int i = 0; i < BLOCKS; i++)
        wrong += !blocks[i] || blocks[i][0] != (char)i;
    for (int i = 0; i < BLOCKS; i++)
        free(blocks[i]);
    printf("many mappings: %d wrong\n", wrong);
}

int main(int count, char **arguments)
{
    const char *what = count > 1 ? arguments[1] : "";
    if (strcmp(what, "locked") == 0)
        locked_and_freed();
    if (strcmp(what, "freed") == 0)
        freed_blocks();
    if (strcmp(what, "advice") == 0)
        advice();
    if (strcmp(what, "reservations") == 0)
        reservations();
    if (strcmp(what, "files") == 0)
        files_over_pages();
    if (strcmp(what, "moves") == 0)
        moves();
    if (strcmp(what, "many") == 0)
        many_mappings();
    return 0;
}
