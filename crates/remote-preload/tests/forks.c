/* Forks while most memory is evicted, with streams open and another thread at work. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGE = 32 << 20, STREAMS = 40, TURNS = 4 };

static char *large;
static FILE *streams[STREAMS];
static volatile int stopping;

static void fill(char *at, size_t bytes, int with)
{
    for (size_t i = 0; i < bytes; i += 1024)
        at[i] = (char)(with + i / 4096 % 100);
}

static int is_right(const char *at, size_t bytes, int with)
{
    for (size_t i = 0; i < bytes; i += 1024)
        if (at[i] != (char)(with + i / 4096 % 100))
            return 0;
    return 1;
}

static void *work(void *own)
{
    for (int turn = 1; !stopping; turn++) {
        fill(own, 8 << 20, turn % 100);
        if (!is_right(own, 8 << 20, turn % 100))
            return NULL;
    }
    return own;
}

/* Checks memory and streams: each stream has the bytes of the fork and those that the child added. */
static int child(int turn)
{
    int wrong = !is_right(large, LARGE, turn);
    for (int i = 0; i < STREAMS; i++) {
        char line[64], wanted[64];
        fprintf(streams[i], "stream %d child %d\n", i, turn);
        rewind(streams[i]);
        sprintf(wanted, "stream %d child %d\n", i, turn);
        while (fgets(line, sizeof line, streams[i]))
            ;
        wrong += strcmp(line, wanted) != 0;
    }
    fill(large, LARGE, 77);
    wrong += !is_right(large, LARGE, 77);
    printf("child %d: %d wrong\n", turn, wrong);
    return wrong;
}

int main(void)
{
    pthread_t worker;
    void *result;

    large = malloc(LARGE);
    for (int i = 0; i < STREAMS; i++) {
        /* Keeps the streams apart, so that each is on a page of its own. */
        char *between = malloc(4000);
        streams[i] = tmpfile();
        fprintf(streams[i], "stream %d\n", i);
        between[0] = 1;
    }
    pthread_create(&worker, NULL, work, malloc(8 << 20));
    for (int turn = 0; turn < TURNS; turn++) {
        int status;
        fill(large, LARGE, turn);
        if (!is_right(large, LARGE, turn))
            return 2;
        fflush(NULL);
        pid_t pid = fork();
        if (pid == 0)
            exit(child(turn));
        if (pid < 0) {
            perror("fork");
            return 3;
        }
        fill(large, LARGE, turn + 50);
        if (waitpid(pid, &status, 0) != pid || status != 0)
            printf("child %d ended with %d\n", turn, status);
        printf("parent %d: %d\n", turn, is_right(large, LARGE, turn + 50));
    }
    stopping = 1;
    pthread_join(worker, &result);
    printf("the other thread: %s\n", result ? "right" : "wrong");
    return 0;
}
