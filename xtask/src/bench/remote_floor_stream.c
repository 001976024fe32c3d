// The least that reading a region from end to end over TCP can be: a handler on userfaultfd, on the program's CPU,
// that fetches 64 pages at a fault, asks for the next 64 before it takes them, and has a thread on another CPU drop
// what lies a quarter of the region behind. The server, on that CPU, has the pages in an array. No checks but
// the keyed checksum of each page, and nothing has changed, so that nothing is put.
// Prints pages a second.
#include "remote_floor.h"
#include <sched.h>
#include <semaphore.h>

enum { RUN = 64, RUNS = 4096, HERE = RUNS / 4, PASSES = 2 };
enum { RUN_BYTES = RUN * PAGE };

static int to_server;
static sem_t came;
// Of each page: all are alike.
static uint64_t sum_of_ones;

// Where there is another CPU, this thread runs there.
static void keep_to(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void serve(int listener) {
    keep_to(1);
    char *stored = map((size_t)RUNS * RUN_BYTES);
    memset(stored, 1, (size_t)RUNS * RUN_BYTES);
    int fd = accept_from(listener);
    // That the pages are there.
    all(fd, &fd, sizeof fd, 1);
    for (;;) {
        uint64_t run;
        all(fd, &run, sizeof run, 0);
        all(fd, stored + (run % RUNS) * RUN_BYTES, RUN_BYTES, 1);
    }
}

static void ask(uint64_t run) {
    all(to_server, &run, sizeof run, 1);
}

static void *handle(void *unused) {
    (void)unused;
    keep_to(0);
    char *buffer = map(RUN_BYTES);
    ask(0);
    for (;;) {
        struct uffd_msg fault;
        need(read(uffd, &fault, sizeof fault) == sizeof fault, "read userfaultfd");
        uint64_t run = (fault.arg.pagefault.address - (uint64_t)memory) / RUN_BYTES;
        ask((run + 1) % RUNS);
        all(to_server, buffer, RUN_BYTES, 0);
        for (int i = 0; i < RUN; i++)
            need(page_sum(buffer + i * PAGE) == sum_of_ones, "the checksum of a page");
        struct uffdio_copy copy = {
            .dst = (uint64_t)memory + run * RUN_BYTES, .src = (uint64_t)buffer, .len = RUN_BYTES};
        need(ioctl(uffd, UFFDIO_COPY, &copy) == 0, "UFFDIO_COPY");
        sem_post(&came);
    }
    return NULL;
}

static void *drop(void *unused) {
    (void)unused;
    keep_to(1);
    for (uint64_t run = 0;; run++) {
        sem_wait(&came);
        madvise(memory + (run + RUNS - HERE) % RUNS * RUN_BYTES, RUN_BYTES, MADV_DONTNEED);
    }
    return NULL;
}

int main(void) {
    start_server(serve);
    int is_there;
    to_server = connect_to_server();
    all(to_server, &is_there, sizeof is_there, 0);
    keep_to(0);
    char page[PAGE];
    memset(page, 1, PAGE);
    sum_of_ones = page_sum(page);
    map_memory((size_t)RUNS * RUN_BYTES);
    sem_init(&came, 0, 0);
    start_thread(handle, NULL);
    start_thread(drop, NULL);
    int64_t begun = now_ns();
    uint64_t sum = 0;
    for (int pass = 0; pass < PASSES; pass++)
        for (uint64_t page = 0; page < (uint64_t)RUNS * RUN; page++)
            sum += memory[page * PAGE];
    int64_t took = now_ns() - begun;
    need(sum == (uint64_t)PASSES * RUNS * RUN, "the sum of what was read");
    printf("%.0f\n", PASSES * RUNS * RUN / (took / 1e9));
    end();
}
