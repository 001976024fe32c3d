/* Memory that cannot have the pages that it is asked to have, for one reason or another: the first
 * argument. 32 MiB each. Prints "up PID" of the process to look at; ends when its input does. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HUGE = 2 << 20, BYTES = 32 << 20, PAGE = 4096 };

static void fill(char *memory, int byte)
{
	for (size_t at = 0; at < BYTES; at += PAGE)
		memory[at] = (char)byte;
}

static int up_until_end(void)
{
	char byte;
	printf("up %d\n", getpid());
	fflush(stdout);
	return read(0, &byte, 1) != 0;
}

int main(int argc, char **argv)
{
	const char *why = argc > 1 ? argv[1] : "none";
	char *room = mmap(NULL, BYTES + HUGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *memory = (char *)(((unsigned long)room + HUGE - 1) & -(unsigned long)HUGE);
	int huge = !strcmp(why, "locked") || !strcmp(why, "forked");
	if (room == MAP_FAILED)
		return 2;
	if (!strcmp(why, "forbidden") && prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		return 2;
	madvise(memory, BYTES, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	fill(memory, 1);
	if (!huge && strcmp(why, "refused"))
		/* Base pages are there; from now on others might be. */
		madvise(memory, BYTES, MADV_HUGEPAGE);
	if (!strcmp(why, "locked") && mlock(memory, BYTES))
		return 3;
	if (!strcmp(why, "forked")) {
		pid_t child = fork();
		if (child == 0) {
			fill(memory, 2);
			return up_until_end();
		}
		return waitpid(child, NULL, 0) != child;
	}
	return up_until_end();
}
