/* Memory that is read-only or inaccessible is evicted and fetched like any other. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MIB = 1 << 20, LARGE = 96 * MIB };

static long resident_mib(void)
{
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (fscanf(file, "%*d %ld", &pages) != 1)
        exit(1);
    fclose(file);
    return pages / 256;
}

static char value(size_t at)
{
    return (char)(at * 2654435761u >> 20);
}

static int wrong(const char *memory)
{
    int wrong = 0;
    for (size_t at = 0; at < LARGE; at += 512)
        wrong += memory[at] != value(at);
    return wrong;
}

int main(int count, char **arguments)
{
    long limit = count > 1 ? atol(arguments[1]) : 1 << 20;
    char *memory = mmap(0, LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *other = malloc(LARGE);

    for (size_t at = 0; at < LARGE; at += 512)
        memory[at] = value(at);
    printf("read-only: %d", mprotect(memory, LARGE, PROT_READ));
    printf(" %d wrong", wrong(memory) + wrong(memory));
    printf(" %s\n", resident_mib() < limit ? "within the limit" : "over the limit");
    printf("none: %d", mprotect(memory, LARGE, PROT_NONE));
    for (int turn = 0; turn < 2; turn++)
        for (size_t at = 0; at < LARGE; at += 512)
            other[at] = value(at);
    printf(" %d wrong", wrong(other));
    printf(" %s\n", resident_mib() < limit ? "within the limit" : "over the limit");
    printf("writable: %d", mprotect(memory, LARGE, PROT_READ | PROT_WRITE));
    printf(" %d wrong", wrong(memory));
    for (size_t at = 0; at < LARGE; at += 512)
        memory[at]++;
    int changed = 0;
    for (size_t at = 0; at < LARGE; at += 512)
        changed += memory[at] == (char)(value(at) + 1);
    printf(" %d changed of %d\n", changed, LARGE / 512);
    return 0;
}
