/* Takes signals by sigwait(3), with all of them blocked in all threads: none must be delivered elsewhere. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 24 << 20, TURNS = 200 };

static volatile int stopping, rounds;

static void *touch(void *memory)
{
    for (; !stopping; rounds++)
        for (size_t at = 0; at < BYTES; at += 4096)
            ((volatile char *)memory)[at]++;
    return NULL;
}

static int take(sigset_t *set)
{
    int taken = 0, signal;
    for (int turn = 0; turn < TURNS; turn++) {
        kill(getpid(), turn % 2 ? SIGUSR1 : SIGTERM);
        taken += sigwait(set, &signal) == 0 && signal == (turn % 2 ? SIGUSR1 : SIGTERM);
    }
    return taken;
}

int main(void)
{
    sigset_t set;
    pthread_t thread;
    void *memory = malloc(BYTES);

    sigfillset(&set);
    sigprocmask(SIG_SETMASK, &set, NULL);
    pthread_create(&thread, NULL, touch, memory);
    /* In the second round, pages are fetched. */
    while (rounds < 2)
        usleep(1000);
    printf("%d signals\n", take(&set));
    stopping = 1;
    pthread_join(thread, NULL);
    fflush(stdout);
    /* With servers, fork fails. */
    free(memory);
    pid_t pid = fork();
    if (pid == 0) {
        printf("%d signals in the child\n", take(&set));
        fflush(stdout);
        _exit(0);
    }
    if (pid > 0)
        waitpid(pid, NULL, 0);
    return 0;
}
