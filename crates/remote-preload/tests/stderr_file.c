/* Opens a file under the number of stderr, and provokes log lines: none must be in the file. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    struct stat stat;
    char *large = malloc(16 << 20);

    if (count > 1) {
        close(STDERR_FILENO);
        if (open(arguments[1], O_CREAT | O_RDWR | O_TRUNC, 0600) != STDERR_FILENO)
            return 1;
    }
    for (int turn = 0; turn < 3; turn++)
        for (size_t at = 0; at < 16 << 20; at += 4096)
            large[at]++;
    printf("%d", mlock(large, 4096));
    printf(" %d\n", mlockall(MCL_CURRENT));
    if (count > 1 && fstat(STDERR_FILENO, &stat) == 0)
        printf("%ld bytes in the file\n", (long)stat.st_size);
    return 0;
}
