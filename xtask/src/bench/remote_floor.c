// The least that a page-in over TCP can be: one blocking handler thread on userfaultfd, one blocking
// server process that has the pages in an array, a 32-byte request, a 32-byte head and 4 KiB back,
// the keyed checksum of the page,
// UFFDIO_COPY. No other checks.
// Prints nanoseconds: median and 99th percentile of the time from an access to its byte.
#include "remote_floor.h"
#include <sys/uio.h>

enum { HEAD = 32, PAGES = 16384, WARM = 1000 };

static int sock;
// Of each page, as its owner would have kept it.
static uint64_t sums[PAGES];

static void serve(int listener) {
    static char pages[PAGES][PAGE];
    char head[HEAD];
    int fd = accept_from(listener);
    for (int i = 0; i < PAGES; i++)
        memset(pages[i], i, PAGE);
    for (;;) {
        uint64_t page;
        all(fd, head, HEAD, 0);
        memcpy(&page, head, sizeof page);
        struct iovec reply[2] = {{head, HEAD}, {pages[page % PAGES], PAGE}};
        need(writev(fd, reply, 2) == HEAD + PAGE, "writev");
    }
}

static void *handle(void *unused) {
    (void)unused;
    static char reply[HEAD + PAGE] __attribute__((aligned(PAGE)));
    char request[HEAD] = {0};
    for (;;) {
        struct uffd_msg fault;
        need(read(uffd, &fault, sizeof fault) == sizeof fault, "read userfaultfd");
        uint64_t page = (fault.arg.pagefault.address - (uint64_t)memory) / PAGE;
        memcpy(request, &page, sizeof page);
        all(sock, request, HEAD, 1);
        all(sock, reply, sizeof reply, 0);
        need(page_sum(reply + HEAD) == sums[page], "the checksum of a page");
        struct uffdio_copy copy = {
            .dst = fault.arg.pagefault.address & ~(uint64_t)(PAGE - 1),
            .src = (uint64_t)reply,
            .len = PAGE,
        };
        need(ioctl(uffd, UFFDIO_COPY, &copy) == 0, "UFFDIO_COPY");
    }
    return NULL;
}

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int main(void) {
    start_server(serve);
    sock = connect_to_server();
    map_memory((size_t)PAGES * PAGE);
    for (int i = 0; i < PAGES; i++) {
        char bytes[PAGE];
        memset(bytes, i, PAGE);
        sums[i] = page_sum(bytes);
    }
    start_thread(handle, NULL);

    static int64_t took[PAGES];
    // A full cycle of all pages that no stride describes.
    uint32_t page = 1;
    volatile char sink;
    for (int i = 0; i < PAGES; i++) {
        page = (page * 1664525u + 1013904223u) % PAGES;
        int64_t begun = now_ns();
        sink = memory[(size_t)page * PAGE];
        took[i] = now_ns() - begun;
    }
    (void)sink;
    qsort(took + WARM, PAGES - WARM, sizeof took[0], compare);
    int64_t *sorted = took + WARM;
    printf("%lld %lld\n", (long long)sorted[(PAGES - WARM) / 2],
           (long long)sorted[(PAGES - WARM) / 100 * 99]);
    end();
}
