/* A process ends when its last thread does: by exit(0), after that thread's own destructors. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

enum { LARGE = 24 << 20, MANY = 20 };

static char *large;
static pthread_key_t key;
static sem_t never;

static void say(const char *what)
{
    printf("%s\n", what);
}

static void at_exit(void) { say("exit"); }

/* Runs again in the next round, as long as it has a value. */
static void at_end_of_thread(void *rounds)
{
    printf("round %ld\n", (long)rounds);
    if ((long)rounds < 3)
        pthread_setspecific(key, (char *)rounds + 1);
}

static void nap(void)
{
    struct timespec time = {.tv_nsec = 100000000};
    nanosleep(&time, NULL);
}

static void *later(void *value)
{
    nap();
    memset(large, 1, LARGE);
    pthread_setspecific(key, value);
    say("later");
    return NULL;
}

static int later_c11(void *value)
{
    later(value);
    return 3;
}

static void *at_once(void *unused) { return unused; }

static void *waits(void *unused)
{
    sem_wait(&never);
    return unused;
}

static pthread_t start(void *(*run)(void *), void *argument)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, argument))
        exit(9);
    return thread;
}

static void main_ends_first(void)
{
    start(later, (void *)1);
    pthread_exit(NULL);
}

static void main_ends_last(void)
{
    pthread_t thread = start(later, NULL);
    pthread_join(thread, NULL);
    pthread_setspecific(key, (void *)1);
    pthread_exit(NULL);
}

static void c11_thread_ends_last(void)
{
    thrd_t thread;
    if (thrd_create(&thread, later_c11, (void *)1) != thrd_success)
        exit(9);
    thrd_exit(0);
}

static void many_end_at_once(void)
{
    for (int i = 0; i < MANY; i++)
        pthread_detach(start(at_once, NULL));
    pthread_exit(NULL);
}

static void last_is_cancelled(void)
{
    pthread_cancel(start(waits, NULL));
    pthread_exit(NULL);
}

static void main_returns_beside_threads(void)
{
    start(waits, NULL);
}

static void *forks(void *unused)
{
    if (fork() == 0)
        return unused; /* The last thread of the child. */
    int status;
    wait(&status);
    printf("child of a thread: %d\n", status);
    exit(4);
}

static void child_of_a_thread_returns(void)
{
    start(forks, NULL);
    pause();
}

static void no_room_for_a_thread(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, (size_t)1 << 46);
    printf("refused: %d\n", pthread_create(&thread, &attributes, at_once, NULL) == EAGAIN);
    pthread_exit(NULL);
}

#define CASE(name) {#name, name}

static const struct {
    const char *name;
    void (*run)(void);
} CASES[] = {
    CASE(main_ends_first),           CASE(main_ends_last),    CASE(c11_thread_ends_last),
    CASE(many_end_at_once),          CASE(last_is_cancelled), CASE(main_returns_beside_threads),
    CASE(child_of_a_thread_returns), CASE(no_room_for_a_thread),
};

int main(void)
{
    large = malloc(LARGE);
    memset(large, 2, LARGE);
    sem_init(&never, 0, 0);
    pthread_key_create(&key, at_end_of_thread);
    atexit(at_exit);
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        printf("%s\n", CASES[i].name);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            alarm(20); /* Ends a process that hangs. */
            CASES[i].run();
            return 5;
        }
        int status;
        waitpid(child, &status, 0);
        printf("status %d, signal %d\n", WEXITSTATUS(status), WTERMSIG(status));
    }
    for (size_t at = 0; at < LARGE; at++)
        if (large[at] != 2)
            return 1;
    return 0;
}
