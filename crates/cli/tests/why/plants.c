/* Processes whose memory is on base pages, each for one reason, and controls that have their huge pages; "pieces"
 * breaks up the system's free memory. The first argument names the plant. Prints "up PID" of the process to look at; ends when its input does. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

enum { HUGE = 2 << 20, BYTES = 16 << 20, PAGE = 4096 };
enum { PRIVATE = MAP_PRIVATE | MAP_ANONYMOUS, SHARED = MAP_SHARED | MAP_ANONYMOUS };

static void die(const char *what)
{
	perror(what);
	exit(2);
}

static char *map(size_t bytes, int flags, int fd, off_t offset)
{
	char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, offset);
	if (memory == MAP_FAILED)
		die("mmap");
	return memory;
}

/* Memory that begins at a huge page's border, plus `slack` bytes. */
static char *aligned(size_t bytes, size_t slack)
{
	char *room = map(bytes + 2 * HUGE, PRIVATE, -1, 0);
	char *start = (char *)(((unsigned long)room + HUGE - 1) & -(unsigned long)HUGE) + slack;
	munmap(room, start - room);
	munmap(start + bytes, room + bytes + 2 * HUGE - (start + bytes));
	return start;
}

/* A byte of its own in each page: KSM merges equal pages only. */
static void fill(char *memory, size_t bytes, int byte)
{
	for (size_t at = 0; at < bytes; at += PAGE) {
		memory[at] = (char)byte;
		*(size_t *)(memory + at + 64) = at + 1;
	}
}

static void advise(char *memory, size_t bytes, int advice)
{
	if (madvise(memory, bytes, advice))
		die("madvise");
}

static int up_until_end(void)
{
	char byte;
	printf("up %d\n", getpid());
	fflush(stdout);
	return read(0, &byte, 1) != 0;
}

static int forked(char *memory, size_t bytes, int child_writes)
{
	pid_t child = fork();
	if (child == 0) {
		if (child_writes)
			fill(memory, bytes, 2);
		return child_writes ? up_until_end() : pause();
	}
	if (child_writes)
		return waitpid(child, NULL, 0) != child;
	fill(memory, bytes, 2);
	int code = up_until_end();
	kill(child, 9);
	return code | (waitpid(child, NULL, 0) != child);
}

static int file_of(const char *path)
{
	static char block[1 << 20];
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	if (fd < 0)
		die(path);
	memset(block, 1, sizeof block);
	for (int i = 0; i < (BYTES >> 20) + 4; i++)
		if (write(fd, block, sizeof block) != sizeof block)
			die(path);
	return fd;
}

static int sum(const char *memory)
{
	int sum = 0;
	for (size_t at = 0; at < BYTES; at += PAGE)
		sum += memory[at];
	return sum;
}

static char data[3 * HUGE] = { 1 };

static size_t available(void)
{
	unsigned long kilobytes = 0;
	char line[128];
	FILE *file = fopen("/proc/meminfo", "r");
	while (file && fgets(line, sizeof line, file))
		if (sscanf(line, "MemAvailable: %lu kB", &kilobytes) == 1)
			break;
	fclose(file);
	return kilobytes << 10;
}

/* Leaves much memory free, and no block of it as large as a huge page. */
static void break_up_memory(void)
{
	size_t bytes = available() - (128 << 20);
	char *memory = map(bytes, PRIVATE, -1, 0);
	advise(memory, bytes, MADV_NOHUGEPAGE);
	for (size_t at = 0; at < bytes; at += PAGE)
		memory[at] = 1;
	for (size_t at = 0; at + PAGE < bytes; at += 2 * PAGE)
		advise(memory + at, PAGE, MADV_DONTNEED);
	/* Takes the blocks that are left. */
	bytes = 400 << 20;
	memory = aligned(bytes, 0);
	advise(memory, bytes, MADV_HUGEPAGE);
	for (size_t at = 0; at < bytes; at += HUGE)
		memory[at] = 1;
}

int main(int argc, char **argv)
{
	const char *plant = argc > 1 ? argv[1] : "";
	char *memory = NULL;
#define IS(name) (!strcmp(plant, name))
	if (IS("malloc")) {
		memory = malloc(4 * BYTES);
		fill(memory, 4 * BYTES, 1);
	} else if (IS("small-mappings")) {
		/* Pages without access keep them apart. */
		for (int i = 0; i < 2 * (BYTES >> 20); i++) {
			memory = map(1 << 20, PRIVATE, -1, 0);
			fill(memory, (1 << 20) - PAGE, 1);
			mprotect(memory + (1 << 20) - PAGE, PAGE, PROT_NONE);
		}
	} else if (IS("unaligned")) {
		/* Each is as long as a huge page and a half, and holds none. */
		for (int i = 0; i < 8; i++) {
			memory = aligned(HUGE + HUGE / 2, HUGE / 4);
			fill(memory, HUGE + HUGE / 2, 1);
		}
	} else if (IS("file-unaligned")) {
		char path[] = "/tmp/pagetax-plant-XXXXXX";
		int fd = mkstemp(path);
		close(fd);
		fd = file_of(path);
		unlink(path);
		char *room = aligned(BYTES + HUGE, 0);
		memory = mmap(room, BYTES, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 64 << 10);
		return sum(memory) < 0 ? 2 : up_until_end();
	} else if (IS("memfd")) {
		int fd = memfd_create("plant", 0);
		if (ftruncate(fd, BYTES + HUGE))
			die("ftruncate");
		memory = map(BYTES + HUGE, MAP_SHARED, fd, 0);
		fill(memory, BYTES + HUGE, 1);
	} else if (IS("shared")) {
		memory = map(BYTES + HUGE, SHARED, -1, 0);
		fill(memory, BYTES + HUGE, 1);
	} else if (IS("tmpfs")) {
		char path[] = "/dev/shm/pagetax-plant-XXXXXX";
		int fd = mkstemp(path);
		if (fd < 0 || ftruncate(fd, BYTES + HUGE))
			die(path);
		memory = map(BYTES + HUGE, MAP_SHARED, fd, 0);
		unlink(path);
		fill(memory, BYTES + HUGE, 1);
	} else if (IS("pieces")) {
		break_up_memory();
	} else if (IS("data")) {
		fill(data, sizeof data, 1);
	} else {
		int is_control = !strncmp(plant, "huge", 4);
		int is_cow = IS("forked-child") || IS("forked-parent");
		/* khugepaged may take 16 MiB at once. */
		size_t bytes = IS("late") || IS("advised") || is_cow ? 4 * BYTES : BYTES;
		memory = aligned(bytes, 0);
		if (IS("prctl") && prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
			die("prctl");
		if (IS("refused"))
			advise(memory, bytes, MADV_NOHUGEPAGE);
		if (IS("merged"))
			advise(memory, bytes, MADV_MERGEABLE);
		if (IS("late") || IS("crowded") || IS("huge-collapsed"))
			advise(memory, bytes, MADV_NOHUGEPAGE);
		else if (is_control || is_cow || IS("prctl") || IS("advised"))
			advise(memory, bytes, MADV_HUGEPAGE);
		if (IS("merged"))
			memset(memory, 7, bytes);
		else
			fill(memory, IS("huge-sparse") ? bytes / 2 : bytes, 1);
		if (IS("huge-sparse"))
			for (size_t at = BYTES / 2; at < BYTES; at += HUGE)
				memory[at] = 1;
		if (IS("late") || IS("crowded") || IS("huge-collapsed"))
			advise(memory, bytes, MADV_HUGEPAGE);
		if (IS("huge-collapsed") && madvise(memory, bytes, MADV_COLLAPSE))
			die("collapse");
		if (IS("huge-protected") && mprotect(memory, HUGE, PROT_READ))
			die("mprotect");
		if (IS("huge-forked")) {
			/* The child only reads, and has gone. */
			pid_t child = fork();
			if (child == 0)
				_exit(sum(memory) < 0);
			waitpid(child, NULL, 0);
		}
		if (is_cow)
			return forked(memory, bytes, IS("forked-child"));
	}
	return up_until_end();
}
