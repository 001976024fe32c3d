// The loads of `cargo xtask kernels --only kswapd`. Each prints a line when its memory is as it shall be, and works
// until it is ended.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)

static void ready(void) {
    puts("ready");
    fflush(stdout);
}

static void need(int is_good, const char *what) {
    if (!is_good) {
        perror(what);
        exit(1);
    }
}

static void touch(char *memory, size_t bytes) {
    for (size_t at = 0; at < bytes; at += PAGE) memory[at] = (char)(at / PAGE) | 1;
}

static char *reserve(size_t bytes) {
    char *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    need(memory != MAP_FAILED, "mmap");
    return memory;
}

static char *hold(size_t bytes) {
    char *memory = reserve(bytes);
    touch(memory, bytes);
    return memory;
}

// Makes a file whose pages are on the disk and not in memory.
static int make_file(size_t bytes) {
    static char block[MIB];
    int file = open("/files/data", O_RDWR | O_CREAT, 0600);
    need(file >= 0, "open");
    for (size_t done = 0; done < bytes; done += MIB) {
        need(write(file, block, MIB) == MIB, "write");
        if (done % (64 * MIB) == 0) fsync(file);
    }
    fsync(file);
    posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
    return file;
}

// Makes a file whose pages need no disk.
static int make_hole(size_t bytes) {
    int file = open("/files/hole", O_RDWR | O_CREAT, 0600);
    need(file >= 0 && !ftruncate(file, bytes), "hole");
    return file;
}

static void read_part(int file, size_t from, size_t bytes) {
    static char block[MIB];
    for (size_t at = from; at < from + bytes; at += MIB) need(pread(file, block, MIB, at) == MIB, "read");
}

static void read_forever(int file, size_t bytes) {
    ready();
    for (;;) read_part(file, 0, bytes);
}

static void touch_forever(size_t bytes) {
    char *memory = hold(bytes);
    ready();
    for (;;) touch(memory, bytes);
}

// Holds memory of the kernel that cannot move: pipes, filled page by page in turn.
static void fill_pipes(int (*pipes)[2], int count) {
    static char page[PAGE];
    for (int n = 0; n < count; n++) need(!pipe(pipes[n]), "pipe");
    for (int round = 0; round < 16; round++)
        for (int n = 0; n < count; n++) need(write(pipes[n][1], page, PAGE) == PAGE, "pipe");
}

static void close_pipes(int (*pipes)[2], int from, int count, int step) {
    for (int n = from; n < count; n += step) close(pipes[n][0]), close(pipes[n][1]);
}

// Every other page of half the memory is free, and the pages between cannot move. Then huge pages are asked for.
static void high_order(void) {
    static int pipes[8000][2];
    fill_pipes(pipes, 8000);
    int file = make_file(400 * MIB);
    char *rest = reserve(900 * MIB);
    size_t held = 0;
    for (; held < 900 * MIB && sysconf(_SC_AVPHYS_PAGES) > 16000; held += MIB) touch(rest + held, MIB);
    close_pipes(pipes, 0, 8000, 2);
    if (!fork()) read_forever(file, 400 * MIB);
    for (;;) {
        char *huge = reserve(64 * MIB);
        madvise(huge, 64 * MIB, MADV_HUGEPAGE);
        touch(huge, 32 * MIB);
        munmap(huge, 64 * MIB);
    }
}

// Pages of a file that is read once lie between pages that stay, so reclaim frees memory in pieces. Memory of the
// kernel comes and goes: free memory changes its kind, piece by piece.
static void boosted(void) {
    static int pipes[1000][2];
    static char page[PAGE];
    int file = make_hole(2800 * MIB);
    posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
    char *stays = reserve(380 * MIB);
    for (size_t at = 0; at < 380 * MIB; at += PAGE) {
        stays[at] = 1;
        need(pread(file, page, PAGE, at) == PAGE, "read");
    }
    posix_fadvise(file, 0, 0, POSIX_FADV_NORMAL);
    for (size_t at = 380 * MIB, rounds = 0;; rounds++) {
        if (rounds == 10) ready();
        for (int is_full = 0; is_full < 2; is_full++) {
            if (is_full) fill_pipes(pipes, 1000);
            read_part(file, at, 60 * MIB);
            at = at > 2600 * MIB ? 0 : at + 60 * MIB;
        }
        close_pipes(pipes, 0, 1000, 1);
    }
}

// The pages of one file wait for the disk. Those of a hole need no disk, and take the memory.
static void dirty(void) {
    static char block[MIB];
    int hole = make_hole(3000 * MIB);
    if (!fork())
        for (;; usleep(100000))
            for (size_t at = 0; at < 3000 * MIB; at += 20 * MIB) read_part(hole, at, 20 * MIB), usleep(50000);
    int file = open("/files/data", O_RDWR | O_CREAT, 0600);
    need(file >= 0, "open");
    for (size_t at = 0;; at += MIB) {
        if (at == 300 * MIB) ready();
        need(pwrite(file, block, MIB, at % (2000 * MIB)) == MIB, "write");
    }
}

int main(int count, char **words) {
    struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY}, files = {40000, 40000};
    setrlimit(RLIMIT_MEMLOCK, &all);
    setrlimit(RLIMIT_NOFILE, &files);
    const char *plant = count > 1 ? words[1] : "";
    if (!strcmp(plant, "working_set")) touch_forever(1200 * MIB);
    if (!strcmp(plant, "locked")) {
        need(!mlock(hold(600 * MIB), 600 * MIB), "mlock");
        read_forever(make_file(500 * MIB), 500 * MIB);
    }
    if (!strcmp(plant, "high_order")) high_order();
    if (!strcmp(plant, "boosted_watermarks")) boosted();
    if (!strcmp(plant, "cgroup_limit")) read_forever(make_file(300 * MIB), 300 * MIB);
    if (!strcmp(plant, "unbalanced")) {
        // MPOL_BIND to node 0.
        unsigned long nodes = 1;
        need(!syscall(SYS_set_mempolicy, 2, &nodes, 64), "set_mempolicy");
        touch_forever(600 * MIB);
    }
    if (!strcmp(plant, "dirty")) dirty();
    if (!strcmp(plant, "swap_full")) {
        hold(820 * MIB);
        read_forever(make_file(300 * MIB), 300 * MIB);
    }
    fprintf(stderr, "no such load: %s\n", plant);
    return 1;
}
