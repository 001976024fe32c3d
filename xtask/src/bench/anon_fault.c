/* What a job of anonymous write faults does, with nothing around it. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>

/* Usage: anon_fault BYTES REPEATS. Prints nanoseconds of CPU time. */
int main(int argc, char **argv)
{
	size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
	int repeats = argc > 2 ? atoi(argv[2]) : 0;
	struct rusage used;

	for (int i = 0; i < repeats; i++) {
		char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED || madvise(memory, bytes, MADV_NOHUGEPAGE))
			return 1;
		for (size_t offset = 0; offset < bytes; offset += 4096)
			*(volatile unsigned long *)(memory + offset) = offset;
		munmap(memory, bytes);
	}
	getrusage(RUSAGE_SELF, &used);
	printf("%lld\n", (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000000LL +
			     (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1000LL);
	return 0;
}
