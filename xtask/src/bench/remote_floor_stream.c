// The least that reading a region from end to end over TCP can be: a handler on userfaultfd, on the program's CPU,
// that fetches 64 pages at a fault, asks for the next 64 before it takes them, and has a thread on another CPU drop
// what lies a quarter of the region behind. The server, on that CPU, has the pages in an array. No checks of any
// kind, and nothing has changed, so that nothing is put.
// Prints pages a second.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
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

enum { PAGE = 4096, RUN = 64, RUNS = 4096, HERE = RUNS / 4, PASSES = 2 };
enum { RUN_BYTES = RUN * PAGE };

static int uffd, to_server;
static char *memory;
static sem_t came;

static void need(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

static void all(int fd, void *at, size_t bytes, int out) {
    for (char *next = at; bytes > 0;) {
        ssize_t done = out ? write(fd, next, bytes) : read(fd, next, bytes);
        if (done <= 0)
            _exit(0);
        next += done;
        bytes -= done;
    }
}

// Where there is another CPU, this thread runs there.
static void keep_to(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void *map(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    need(at != MAP_FAILED, "mmap");
    madvise(at, bytes, MADV_NOHUGEPAGE);
    return at;
}

static void serve(int listener) {
    keep_to(1);
    char *stored = map((size_t)RUNS * RUN_BYTES);
    memset(stored, 1, (size_t)RUNS * RUN_BYTES);
    int one = 1, fd = accept(listener, NULL, NULL);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    // That the pages are there.
    all(fd, &one, sizeof one, 1);
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

static void open_uffd(void) {
    int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    uffd = device >= 0 ? ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC)
                       : (int)syscall(SYS_userfaultfd, O_CLOEXEC);
    need(uffd >= 0, "userfaultfd");
    struct uffdio_api api = {.api = UFFD_API};
    need(ioctl(uffd, UFFDIO_API, &api) == 0, "UFFDIO_API");
    struct uffdio_register range = {.range = {(uint64_t)memory, (uint64_t)RUNS * RUN_BYTES},
                                    .mode = UFFDIO_REGISTER_MODE_MISSING};
    need(ioctl(uffd, UFFDIO_REGISTER, &range) == 0, "UFFDIO_REGISTER");
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    need(bind(listener, (void *)&address, len) == 0 && listen(listener, 1) == 0, "listen");
    getsockname(listener, (void *)&address, &len);
    pid_t server = fork();
    if (server == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(listener);
    }
    int one = 1;
    to_server = socket(AF_INET, SOCK_STREAM, 0);
    need(connect(to_server, (void *)&address, sizeof address) == 0, "connect");
    setsockopt(to_server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    all(to_server, &one, sizeof one, 0);
    keep_to(0);
    memory = map((size_t)RUNS * RUN_BYTES);
    open_uffd();
    sem_init(&came, 0, 0);
    pthread_t handler, dropper;
    need(pthread_create(&handler, NULL, handle, NULL) == 0, "pthread_create");
    need(pthread_create(&dropper, NULL, drop, NULL) == 0, "pthread_create");
    double begun = seconds();
    uint64_t sum = 0;
    for (int pass = 0; pass < PASSES; pass++)
        for (uint64_t page = 0; page < (uint64_t)RUNS * RUN; page++)
            sum += memory[page * PAGE];
    double took = seconds() - begun;
    need(sum == (uint64_t)PASSES * RUNS * RUN, "the sum of what was read");
    printf("%.0f\n", PASSES * RUNS * RUN / took);
    fflush(stdout);
    kill(server, SIGKILL);
    _exit(0);
}
