/* What a job of anonymous write faults does, with nothing around it; with the word `pair`, also the
 * least that two perf samples a fault can cost: nothing but a time in each, one ring that the kernel
 * writes over, no reader, no children. */
#define _GNU_SOURCE
#include <linux/perf_event.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

static int sample(unsigned long long software_event)
{
	struct perf_event_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.size = sizeof(attr);
	attr.type = PERF_TYPE_SOFTWARE;
	attr.config = software_event;
	attr.sample_period = 1;
	attr.sample_type = PERF_SAMPLE_TIME;
	attr.exclude_kernel = 1;
	attr.exclude_hv = 1;
	attr.write_backward = 1;
	return syscall(SYS_perf_event_open, &attr, 0, -1, -1, PERF_FLAG_FD_CLOEXEC);
}

static int pair(void)
{
	int begin = sample(PERF_COUNT_SW_PAGE_FAULTS);
	int end = sample(PERF_COUNT_SW_PAGE_FAULTS_MIN);

	if (begin < 0 || end < 0)
		return -1;
	if (mmap(NULL, 17 * 4096, PROT_READ, MAP_SHARED, begin, 0) == MAP_FAILED)
		return -1;
	return ioctl(end, PERF_EVENT_IOC_SET_OUTPUT, begin);
}

static long long cpu_ns(void)
{
	struct rusage used;

	getrusage(RUSAGE_SELF, &used);
	return (used.ru_utime.tv_sec + used.ru_stime.tv_sec) * 1000000000LL +
	       (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1000LL;
}

/* Usage: anon_fault BYTES REPEATS [pair]. Prints nanoseconds of CPU time. */
int main(int argc, char **argv)
{
	size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
	int repeats = argc > 2 ? atoi(argv[2]) : 0;
	long long before;

	if (argc > 3 && pair()) {
		perror("perf events");
		return 1;
	}
	before = cpu_ns();
	for (int i = 0; i < repeats; i++) {
		char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (memory == MAP_FAILED || madvise(memory, bytes, MADV_NOHUGEPAGE))
			return 1;
		for (size_t offset = 0; offset < bytes; offset += 4096)
			*(volatile unsigned long *)(memory + offset) = offset;
		munmap(memory, bytes);
	}
	printf("%lld\n", cpu_ns() - before);
	return 0;
}
