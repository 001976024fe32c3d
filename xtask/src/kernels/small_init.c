// The first process of a small guest: mounts, loads the modules that the root has, and becomes the script.
// Debian's cloud kernels have most drivers as modules, and a small root has no insmod.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int place(const char *what, const char *where, const char *kind) {
    mkdir(where, 0755);
    return mount(what, where, kind, 0, "");
}

// Loads a module, if the root has it.
static int load(const char *module) {
    int file = open(module, O_RDONLY);
    if (file >= 0 && syscall(SYS_finit_module, file, "", 0)) perror(module);
    return file >= 0;
}

int main(void) {
    place("proc", "/proc", "proc");
    place("sys", "/sys", "sysfs");
    place("dev", "/dev", "devtmpfs");
    int has_disk = load("/virtio_blk.ko");
    for (int tries = 0; has_disk && place("/dev/vda", "/files", "ext4") && tries < 100; tries++) usleep(100000);
    load("/veth.ko");
    load("/sch_netem.ko");
    int results = open("/dev/ttyS1", O_WRONLY);
    dup2(results, 1);
    dup2(results, 2);
    execl("/bin/sh", "sh", "/guest.sh", (char *)0);
    return 1;
}
