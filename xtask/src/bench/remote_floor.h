// What the floors of remote.rs share: a bare server in a process of its own, connections to it, and memory whose
// faults come to a userfaultfd. Each floor is one program, and none comes back from an error.
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
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };

static int uffd;
static char *memory;
static pid_t server;
static struct sockaddr_in address;

static void need(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

// Writes all of it, or reads it. Where the other side has gone, so does this process.
static void all(int fd, void *at, size_t bytes, int out) {
    for (char *next = at; bytes > 0;) {
        ssize_t done = out ? write(fd, next, bytes) : read(fd, next, bytes);
        if (done <= 0)
            _exit(0);
        next += done;
        bytes -= done;
    }
}

static int without_delay(int fd) {
    int one = 1;
    need(fd >= 0, "socket");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

// Has a child serve what connects to its listener; it ends with this process.
static void start_server(void (*serve)(int listener)) {
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    need(bind(listener, (void *)&address, len) == 0 && listen(listener, 2) == 0, "listen");
    getsockname(listener, (void *)&address, &len);
    server = fork();
    need(server >= 0, "fork");
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(listener);
    }
}

static int accept_from(int listener) {
    return without_delay(accept(listener, NULL, NULL));
}

static int connect_to_server(void) {
    int fd = without_delay(socket(AF_INET, SOCK_STREAM, 0));
    need(connect(fd, (void *)&address, sizeof address) == 0, "connect");
    return fd;
}

// The keyed checksum that the pager keeps of a page and checks when it comes back
// (crates/remote/examples/page_sum.rs).
uint64_t page_sum(const void *page);

static void *map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(at != MAP_FAILED, "mmap");
    madvise(at, bytes, MADV_NOHUGEPAGE);
    return at;
}

// Maps `memory`; its faults come to `uffd`.
static void map_memory(size_t bytes) {
    memory = map(bytes);
    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    uffd = device >= 0 ? ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC)
                       : (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    need(uffd >= 0, "userfaultfd");
    struct uffdio_api api = {.api = UFFD_API};
    need(ioctl(uffd, UFFDIO_API, &api) == 0, "UFFDIO_API");
    struct uffdio_register range = {.range = {(uint64_t)memory, bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    need(ioctl(uffd, UFFDIO_REGISTER, &range) == 0, "UFFDIO_REGISTER");
}

static pthread_t start_thread(void *(*run)(void *), void *argument) {
    pthread_t thread;
    need(pthread_create(&thread, NULL, run, argument) == 0, "pthread_create");
    return thread;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

// Ends the server and this process, whose threads still wait.
static void end(void) {
    fflush(stdout);
    kill(server, SIGKILL);
    _exit(0);
}
