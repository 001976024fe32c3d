// The two ends of a link with a delay, for `cargo xtask bench link`:
//   link relay ADDRESS PORT TARGET DELAY_NS   passes connections on to 127.0.0.1:TARGET, each request late
//   link echo PORT                            answers 32 bytes with 32 bytes and a page
//   link sink ADDRESS PORT                    takes bytes to their end, then answers with one
//   link flood ADDRESS PORT                   prints the pages per second that a sink takes
//   link ping ADDRESS PORT                    prints the median and 99th percentile of a round trip, in ns
// The delay is spun: a sleep of 30 us takes twice as long.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { HEAD = 32, PAGE = 4096, PINGS = 16384, WARM = 1000, RUN_PAGES = 64, RUNS = 128 };

static int target;
static int64_t delay_ns;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void need(int is_true, const char *what) {
    if (!is_true) {
        perror(what);
        exit(1);
    }
}

static struct sockaddr_in place(const char *address, int port) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    need(inet_pton(AF_INET, address, &at.sin_addr) == 1, "address");
    return at;
}

static void no_delay(int fd) {
    int one = 1;
    need(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0, "TCP_NODELAY");
}

static int listen_at(const char *address, int port) {
    struct sockaddr_in at = place(address, port);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    need(bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 64) == 0, "listen");
    printf("up\n");
    fflush(stdout);
    return fd;
}

static int connect_to(const char *address, int port) {
    struct sockaddr_in at = place(address, port);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    need(connect(fd, (struct sockaddr *)&at, sizeof at) == 0, "connect");
    no_delay(fd);
    return fd;
}

static int all(int fd, char *bytes, size_t len, int out) {
    for (size_t done = 0; done < len;) {
        ssize_t n = out ? write(fd, bytes + done, len - done) : read(fd, bytes + done, len - done);
        if (n <= 0)
            return 0;
        done += n;
    }
    return 1;
}

struct pipe_ends {
    int from, to;
    int64_t delay_ns;
};

static void *pass_on(void *given) {
    struct pipe_ends ends = *(struct pipe_ends *)given;
    free(given);
    static __thread char bytes[1 << 18];
    ssize_t n;
    while ((n = read(ends.from, bytes, sizeof bytes)) > 0) {
        int64_t until = now_ns() + ends.delay_ns;
        while (ends.delay_ns && now_ns() < until)
            ;
        if (!all(ends.to, bytes, n, 1))
            break;
    }
    shutdown(ends.from, SHUT_RDWR);
    shutdown(ends.to, SHUT_RDWR);
    return NULL;
}

static void start(int from, int to, int64_t late_ns) {
    struct pipe_ends *ends = malloc(sizeof *ends);
    pthread_t thread;
    *ends = (struct pipe_ends){from, to, late_ns};
    need(pthread_create(&thread, NULL, pass_on, ends) == 0, "thread");
    pthread_detach(thread);
}

static void relay(int listener) {
    for (;;) {
        int near = accept(listener, NULL, NULL);
        need(near >= 0, "accept");
        no_delay(near);
        int far = connect_to("127.0.0.1", target);
        start(near, far, delay_ns);
        start(far, near, 0);
    }
}

static void echo(int listener) {
    static char reply[HEAD + PAGE];
    char head[HEAD];
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        need(fd >= 0, "accept");
        no_delay(fd);
        while (all(fd, head, HEAD, 0) && all(fd, reply, sizeof reply, 1))
            ;
        close(fd);
    }
}

static int compare(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void ping(int fd) {
    static int64_t took[PINGS];
    static char reply[HEAD + PAGE];
    char head[HEAD] = {0};
    for (int i = 0; i < PINGS; i++) {
        int64_t begun = now_ns();
        need(all(fd, head, HEAD, 1) && all(fd, reply, sizeof reply, 0), "ping");
        took[i] = now_ns() - begun;
    }
    int64_t *sorted = took + WARM;
    qsort(sorted, PINGS - WARM, sizeof took[0], compare);
    printf("%lld %lld\n", (long long)sorted[(PINGS - WARM) / 2], (long long)sorted[(PINGS - WARM) / 100 * 99]);
}

static void sink(int listener) {
    static char run[RUN_PAGES * PAGE];
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        need(fd >= 0, "accept");
        while (read(fd, run, sizeof run) > 0)
            ;
        all(fd, run, 1, 1);
        close(fd);
    }
}

static void flood(int fd) {
    static char run[RUN_PAGES * PAGE];
    int64_t begun = now_ns();
    for (int i = 0; i < RUNS; i++)
        need(all(fd, run, sizeof run, 1), "flood");
    need(shutdown(fd, SHUT_WR) == 0 && all(fd, run, 1, 0), "flood");
    printf("%.0f\n", RUNS * RUN_PAGES * 1e9 / (now_ns() - begun));
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    if (count == 6 && !strcmp(what, "relay")) {
        target = atoi(words[4]);
        delay_ns = atoll(words[5]);
        relay(listen_at(words[2], atoi(words[3])));
    } else if (count == 3 && !strcmp(what, "echo")) {
        echo(listen_at("127.0.0.1", atoi(words[2])));
    } else if (count == 4 && !strcmp(what, "sink")) {
        sink(listen_at(words[2], atoi(words[3])));
    } else if (count == 4 && !strcmp(what, "flood")) {
        flood(connect_to(words[2], atoi(words[3])));
    } else if (count == 4 && !strcmp(what, "ping")) {
        ping(connect_to(words[2], atoi(words[3])));
    } else {
        fprintf(stderr, "link relay ADDRESS PORT TARGET DELAY_NS | echo PORT | sink, flood or ping ADDRESS PORT\n");
        return 2;
    }
}
