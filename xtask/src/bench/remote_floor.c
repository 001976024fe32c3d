// The least that a page-in over TCP can be: one blocking handler thread on userfaultfd, one blocking
// server process that has the pages in an array, a 32-byte request, a 32-byte head and 4 KiB back,
// UFFDIO_COPY. No checks of any kind.
// Prints nanoseconds: median and 99th percentile of the time from an access to its byte.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, HEAD = 32, PAGES = 16384, WARM = 1000 };

static int uffd, sock;
static char *memory;

static void need(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static void all(int fd, char *at, size_t bytes, int out) {
    while (bytes > 0) {
        ssize_t done = out ? write(fd, at, bytes) : read(fd, at, bytes);
        if (done <= 0)
            exit(0);
        at += done;
        bytes -= done;
    }
}

static void serve(int listener) {
    static char pages[PAGES][PAGE];
    char head[HEAD];
    int one = 1, fd = accept(listener, NULL, NULL);
    need(fd >= 0, "accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
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
        struct uffdio_copy copy = {
            .dst = fault.arg.pagefault.address & ~(uint64_t)(PAGE - 1),
            .src = (uint64_t)reply,
            .len = PAGE,
        };
        need(ioctl(uffd, UFFDIO_COPY, &copy) == 0, "UFFDIO_COPY");
    }
    return NULL;
}

static int open_uffd(void) {
    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    int fd = device >= 0 ? ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC)
                         : (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    need(fd >= 0, "userfaultfd");
    struct uffdio_api api = {.api = UFFD_API};
    need(ioctl(fd, UFFDIO_API, &api) == 0, "UFFDIO_API");
    return fd;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    need(bind(listener, (void *)&address, len) == 0 && listen(listener, 1) == 0, "listen");
    getsockname(listener, (void *)&address, &len);
    pid_t server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(listener);
    }
    sock = socket(AF_INET, SOCK_STREAM, 0);
    need(connect(sock, (void *)&address, len) == 0, "connect");
    setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);

    memory = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(memory != MAP_FAILED, "mmap");
    uffd = open_uffd();
    struct uffdio_register range = {
        .range = {(uint64_t)memory, (uint64_t)PAGES * PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    need(ioctl(uffd, UFFDIO_REGISTER, &range) == 0, "UFFDIO_REGISTER");
    pthread_t handler;
    need(pthread_create(&handler, NULL, handle, NULL) == 0, "pthread_create");

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
    fflush(stdout);
    kill(server, SIGKILL);
    _exit(0);
}
