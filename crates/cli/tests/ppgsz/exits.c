/* Exits with the status of its first argument; closes all descriptors first if there is a second, and waits
   if there is a third. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    char *memory = malloc(8 << 20);
    memset(memory, 1, 8 << 20);
    if (argc > 2) {
        for (int fd = 0; fd < 1024; fd++) close(fd);
    }
    if (argc > 3) usleep(300000);
    return memory[1 << 20] ? atoi(argv[1]) : 1;
}
