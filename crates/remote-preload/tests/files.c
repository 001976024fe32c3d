/* The program can use all descriptor numbers: it opens, closes and replaces them as it likes. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FILES = 1500, LARGE = 24 << 20 };

static char *large;

static int is_right(void)
{
    for (size_t at = 0; at < LARGE; at += 4096)
        if (large[at] != (char)(at >> 12))
            return 0;
    return 1;
}

static int is_open(int file)
{
    return fcntl(file, F_GETFD) >= 0;
}

int main(void)
{
    struct rlimit limit = {2000, 2000};
    int pipes[2], status, numbers = 1, missing = 0, refused = 0;
    char byte;

    setrlimit(RLIMIT_NOFILE, &limit);
    large = malloc(LARGE);
    for (size_t at = 0; at < LARGE; at += 4096)
        large[at] = (char)(at >> 12);
    for (int file = 3; file < FILES; file++)
        numbers &= open("/dev/null", O_RDONLY) == file;
    printf("lowest numbers: %d, right: %d\n", numbers, is_right());
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        for (int file = 3; file < FILES; file++)
            missing += !is_open(file);
        printf("missing in the child: %d, right: %d\n", missing, is_right());
        fflush(stdout);
        closefrom(3);
        printf("after closefrom: %d\n", is_right());
        fflush(stdout);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    for (int file = 3; file < FILES; file++)
        refused += close(file) != 0 || is_open(file);
    printf("not closed: %d, right: %d\n", refused, is_right());
    for (int file = 3; file < 2000; file++)
        refused += dup2(STDIN_FILENO, file) != file;
    printf("not replaced: %d, right: %d\n", refused, is_right());
    refused += close_range(3, ~0u, 0) != 0;
    printf("not closed at once: %d, right: %d\n", refused, is_right());
    /* A reader sees the end of file when the program closes the last writing end, which includes stderr. */
    if (pipe(pipes) != 0)
        return 1;
    dup2(pipes[1], 800);
    close(pipes[1]);
    close(800);
    printf("end of the pipe: %zd\n", read(pipes[0], &byte, 1));
    return 0;
}
