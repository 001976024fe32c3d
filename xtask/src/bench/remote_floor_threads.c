// The least that random rewrites by several threads over TCP can be: what they wait for at a time is fetched
// together by one handler thread on userfaultfd, and pages leave, 64 at a time, by a thread with a connection
// of its own: sent to the server, acknowledged, dropped. The server has the pages in an array. No checks but
// the keyed checksum of each page, no second chance, a plain queue of what is here.
// Argument: the threads. Prints faults a second.
#include "remote_floor.h"
#include <sys/uio.h>

enum { HEAD = 32, PAGES = 65536, HERE = PAGES / 4, WRITES = 240000 };
// Most faults of one read, and pages that leave together.
enum { FAULTS = 32, LEAVING = 64 };
// What a request wants of the page that it names.
enum { GET, PUT, PUT_AND_ACKNOWLEDGE };

struct head {
    uint64_t page, wanted, unused[2];
};
struct message {
    struct head head;
    char bytes[PAGE];
};

static int get_socket, put_socket;
static int per_thread;
// Pages that are here, oldest first.
static uint32_t queue[PAGES];
static unsigned came, left;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static char stored[PAGES][PAGE];
// Of each page, as it left last.
static uint64_t sums[PAGES];

static void *serve(void *argument) {
    int fd = (int)(intptr_t)argument;
    char *in = malloc(LEAVING * sizeof(struct message));
    size_t have = 0;
    for (;;) {
        ssize_t more = read(fd, in + have, LEAVING * sizeof(struct message) - have);
        if (more <= 0)
            return NULL;
        have += more;
        struct head heads[FAULTS];
        struct iovec reply[2 * FAULTS];
        int pieces = 0;
        size_t at = 0;
        while (have - at >= HEAD) {
            struct message *message = (struct message *)(in + at);
            char *page = stored[message->head.page % PAGES];
            if (message->head.wanted == GET) {
                heads[pieces / 2] = message->head;
                reply[pieces] = (struct iovec){&heads[pieces / 2], HEAD};
                reply[pieces + 1] = (struct iovec){page, PAGE};
                pieces += 2;
                at += HEAD;
            } else if (have - at >= sizeof *message) {
                memcpy(page, message->bytes, PAGE);
                if (message->head.wanted == PUT_AND_ACKNOWLEDGE)
                    all(fd, &message->head, HEAD, 1);
                at += sizeof *message;
            } else {
                break;
            }
        }
        have -= at;
        memmove(in, in + at, have);
        if (pieces > 0)
            need(writev(fd, reply, pieces) == (ssize_t)(pieces / 2 * sizeof(struct message)), "writev");
    }
}

static void *handle(void *unused) {
    (void)unused;
    static struct message replies[FAULTS];
    struct head requests[FAULTS] = {0};
    struct uffd_msg faults[FAULTS];
    for (;;) {
        ssize_t bytes = read(uffd, faults, sizeof faults);
        need(bytes > 0, "read userfaultfd");
        int count = bytes / sizeof faults[0];
        for (int i = 0; i < count; i++)
            requests[i].page = (faults[i].arg.pagefault.address - (uint64_t)memory) / PAGE;
        all(get_socket, requests, count * sizeof requests[0], 1);
        all(get_socket, replies, count * sizeof replies[0], 0);
        uint64_t first = UINT64_MAX, last = 0;
        for (int i = 0; i < count; i++) {
            uint64_t at = (uint64_t)memory + requests[i].page * PAGE;
            need(page_sum(replies[i].bytes) == sums[requests[i].page], "the checksum of a page");
            struct uffdio_copy copy = {.dst = at,
                                       .src = (uint64_t)replies[i].bytes,
                                       .len = PAGE,
                                       .mode = UFFDIO_COPY_MODE_DONTWAKE};
            // Two threads may have waited for it.
            ioctl(uffd, UFFDIO_COPY, &copy);
            first = at < first ? at : first;
            last = at > last ? at : last;
        }
        struct uffdio_range range = {first, last + PAGE - first};
        need(ioctl(uffd, UFFDIO_WAKE, &range) == 0, "UFFDIO_WAKE");
        pthread_mutex_lock(&lock);
        while (came - left > HERE - FAULTS)
            pthread_cond_wait(&changed, &lock);
        for (int i = 0; i < count; i++)
            queue[came++ % PAGES] = requests[i].page;
        if (came - left > HERE / 2)
            pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void *evict(void *unused) {
    (void)unused;
    // `PIDFD_SELF` of linux/pidfd.h.
    const int self = -10000;
    static struct message out[LEAVING];
    struct iovec pages[LEAVING];
    for (;;) {
        pthread_mutex_lock(&lock);
        while (came - left <= HERE / 2)
            pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
        for (int i = 0; i < LEAVING; i++) {
            uint32_t page = queue[(left + i) % PAGES];
            pages[i] = (struct iovec){memory + (size_t)page * PAGE, PAGE};
            out[i].head.page = page;
            out[i].head.wanted = i == LEAVING - 1 ? PUT_AND_ACKNOWLEDGE : PUT;
            memcpy(out[i].bytes, pages[i].iov_base, PAGE);
            sums[page] = page_sum(out[i].bytes);
        }
        all(put_socket, out, sizeof out, 1);
        all(put_socket, &out[0].head, HEAD, 0);
        need(syscall(SYS_process_madvise, self, pages, LEAVING, MADV_DONTNEED, 0) > 0, "madvise");
        pthread_mutex_lock(&lock);
        left += LEAVING;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void *rewrite(void *argument) {
    uint32_t random = (uint32_t)(uintptr_t)argument * 7919 + 1;
    for (int i = 0; i < per_thread; i++) {
        random = random * 1664525u + 1013904223u;
        memory[(size_t)((random >> 8) % PAGES) * PAGE]++;
    }
    return NULL;
}

static void serve_both(int listener) {
    for (int i = 0; i < 2; i++)
        start_thread(serve, (void *)(intptr_t)accept_from(listener));
    for (;;)
        pause();
}

int main(int count, char **arguments) {
    int threads = count > 1 ? atoi(arguments[1]) : 1;
    need(threads > 0 && threads <= FAULTS, "threads");
    per_thread = WRITES / threads;
    start_server(serve_both);
    get_socket = connect_to_server();
    put_socket = connect_to_server();
    map_memory((size_t)PAGES * PAGE);
    for (int i = 0; i < PAGES; i++)
        sums[i] = page_sum(stored[i]);
    start_thread(handle, NULL);
    start_thread(evict, NULL);
    pthread_t all_threads[FAULTS];
    int64_t begun = now_ns();
    for (intptr_t i = 0; i < threads; i++)
        all_threads[i] = start_thread(rewrite, (void *)i);
    for (int i = 0; i < threads; i++)
        pthread_join(all_threads[i], NULL);
    printf("%.0f\n", came / ((now_ns() - begun) / 1e9));
    end();
}
