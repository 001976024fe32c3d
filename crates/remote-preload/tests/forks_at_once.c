/* Threads that fork at once, while another thread flushes streams whose buffers are evicted. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGE = 24 << 20, FORKS = 60, BUFFER = 512 << 10 };

static char *large;
static volatile int stopping;

static void *fork_often(void *wrong)
{
    for (int turn = 0; turn < FORKS; turn++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            for (size_t at = 0; at < LARGE; at += 64 * 4096)
                if (large[at] != (char)(at >> 12))
                    _exit(1);
            _exit(0);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
            ++*(int *)wrong;
    }
    return NULL;
}

static void *flush(void *of)
{
    FILE *stream = of;
    while (!stopping) {
        for (int line = 0; line < 4000; line++)
            fputs("something for a buffer that is away by the time that it is written\n", stream);
        fflush(NULL);
        rewind(stream);
    }
    return NULL;
}

static void *touch(void *unused)
{
    while (!stopping)
        for (size_t at = 0; at < LARGE; at += 4096)
            if (((volatile char *)large)[at] != (char)(at >> 12))
                abort();
    return unused;
}

int main(void)
{
    pthread_t forking[2], flushing, touching;
    int wrong[2] = {0, 0};
    FILE *stream = tmpfile();

    large = malloc(LARGE);
    for (size_t at = 0; at < LARGE; at += 4096)
        large[at] = (char)(at >> 12);
    setvbuf(stream, malloc(BUFFER), _IOFBF, BUFFER);
    pthread_create(&flushing, NULL, flush, stream);
    pthread_create(&touching, NULL, touch, NULL);
    for (int i = 0; i < 2; i++)
        pthread_create(&forking[i], NULL, fork_often, &wrong[i]);
    for (int i = 0; i < 2; i++)
        pthread_join(forking[i], NULL);
    stopping = 1;
    pthread_join(flushing, NULL);
    pthread_join(touching, NULL);
    printf("%d and %d wrong\n", wrong[0], wrong[1]);
    return 0;
}
