/* Each way to create a child with a copy of the memory: the child has all of it, or the call fails with a line.
 * Usage: ways_to_fork MIB */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STACK = 64 << 10 };

static char *large;
static size_t large_bytes;
static int report;

static int is_right(void)
{
    for (size_t at = 0; at < large_bytes; at += 4096)
        if (large[at] != (char)(at >> 12))
            return 0;
    return 1;
}

/* The child checks the memory, changes it, and checks it again. */
static int child(void *unused)
{
    int before = is_right();
    memset(large, 3, large_bytes);
    for (size_t at = 0; at < large_bytes; at += 4096)
        before &= large[at] == 3;
    return before ? 7 : 8;
}

static void ended(const char *how, pid_t pid)
{
    int status = 0;
    if (pid < 0)
        printf("%s: %s", how, strerror(errno));
    else if (waitpid(pid, &status, 0) != pid)
        printf("%s: no child", how);
    else
        printf("%s: %d signal %d", how, WEXITSTATUS(status), WTERMSIG(status));
    printf("%s\n", is_right() ? "" : ", and the parent's memory is wrong");
    fflush(stdout);
}

static pid_t by_fork(void) { return fork(); }
static pid_t by_Fork(void)
{
    pid_t (*call)(void) = (pid_t (*)(void))dlsym(RTLD_DEFAULT, "_Fork");
    return call ? call() : fork();
}
/* Forks as the C library itself does, past all preloaded functions. */
static pid_t by_own_fork(void)
{
    void *c_library = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
    pid_t (*call)(void) = (pid_t (*)(void))dlsym(c_library, "fork");
    return call();
}
static pid_t by_syscall(void) { return syscall(SYS_fork); }
static pid_t by_clone_call(void) { return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }
static pid_t by_clone3(void)
{
    struct clone_args arguments = {.exit_signal = SIGCHLD};
    return syscall(SYS_clone3, &arguments, sizeof arguments);
}
static pid_t by_forkpty(void)
{
    int master;
    return forkpty(&master, NULL, NULL, NULL);
}

/* daemon(3) leaves its caller's child to init: it reports through a pipe. */
static void by_daemon(void)
{
    int pipes[2], answer = 0;
    if (pipe(pipes) != 0)
        return;
    report = pipes[1];
    pid_t pid = vfork() == 0 ? (_exit(0), 0) : fork();
    if (pid == 0) {
        close(pipes[0]);
        answer = daemon(1, 1) == 0 ? child(NULL) : 1000 + errno;
        _exit(write(report, &answer, sizeof answer) != sizeof answer);
    }
    close(pipes[1]);
    if (pid < 0)
        printf("daemon: %s\n", strerror(errno));
    else {
        int got = read(pipes[0], &answer, sizeof answer) == sizeof answer;
        printf("daemon: %d\n", got ? answer : -1);
        waitpid(pid, NULL, 0);
    }
    fflush(stdout);
    close(pipes[0]);
}

int main(int count, char **words)
{
    if (count != 2)
        return 2;
    large_bytes = (size_t)atol(words[1]) << 20;
    static const struct { const char *name; pid_t (*call)(void); } ways[] = {
        {"fork", by_fork}, {"_Fork", by_Fork}, {"SYS_fork", by_syscall},
        {"SYS_clone", by_clone_call}, {"SYS_clone3", by_clone3}, {"forkpty", by_forkpty},
        {"the C library's fork", by_own_fork},
    };
    large = malloc(large_bytes);
    for (size_t at = 0; at < large_bytes; at += 4096)
        large[at] = (char)(at >> 12);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        pid_t pid = ways[i].call();
        if (pid == 0)
            _exit(child(NULL));
        ended(ways[i].name, pid);
    }
    char *stack = malloc(STACK);
    ended("clone", clone(child, stack + STACK, SIGCHLD, NULL));
    ended("clone again", clone(child, stack + STACK, SIGCHLD, NULL));
    by_daemon();
    return 0;
}
