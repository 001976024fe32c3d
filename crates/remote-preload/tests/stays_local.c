/* Memory that asks to stay local does, and the rest is paged. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

static char *map(void *at, size_t bytes, int flags, int file)
{
    if (file < 0)
        flags |= MAP_ANONYMOUS;
    return mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | flags, file, 0);
}

static char value(size_t at, int with)
{
    return (char)(with + at / 4096 % 100);
}

static void fill(char *at, size_t bytes, int with)
{
    for (size_t i = 0; i < bytes; i += 512)
        at[i] = value(i, with);
}

static void check(const char *what, const char *at, size_t from, size_t bytes, int with)
{
    for (size_t i = from; i < bytes; i += 512)
        if (at[i] != value(i, with)) {
            printf("%s is wrong at %zu\n", what, i);
            exit(1);
        }
}

int main(void)
{
    char *locked = map(0, 2 * MIB, 0, -1), *large = map(0, 32 * MIB, 0, -1);
    char *fixed = map(0, 2 * MIB, MAP_NORESERVE | MAP_STACK, -1);
    unsigned char there[512];

    fill(locked, 2 * MIB, 1);
    printf("mlock: %d %d\n", mlock(locked, MIB), mlock(locked + MIB, MIB));
    printf("MAP_FIXED: %d\n", map(fixed, MIB, MAP_FIXED, -1) == fixed);
    fill(fixed, 2 * MIB, 2);
    for (int turn = 0; turn < 3; turn++) {
        fill(large, 32 * MIB, 3 + turn);
        check("large", large, 0, 32 * MIB, 3 + turn);
    }
    check("locked", locked, 0, 2 * MIB, 1);
    check("fixed", fixed, 0, 2 * MIB, 2);
    mincore(locked, 2 * MIB, there);
    int missing = 0;
    for (int page = 0; page < 512; page++)
        missing += !(there[page] & 1);
    printf("locked and missing: %d\n", missing);
    /* Maps zeros over paged memory. */
    printf("zeros: %d", map(large + MIB, MIB, MAP_FIXED, -1) == large + MIB);
    printf(" %d %d\n", large[MIB], large[2 * MIB - 1]);
    check("after", large, 2 * MIB, 32 * MIB, 5);
    printf("mlockall: %d\n", mlockall(MCL_CURRENT));
    return 0;
}
