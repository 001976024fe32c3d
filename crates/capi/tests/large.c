/* Asks for large pages in the way of servers that were written for Solaris, and shows what it got:
 * sizes, then bss, heap, chunk and stack as "NAME pages-of-the-largest-size pages". */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#ifdef MC_HAT_ADVISE
static size_t largest(void)
{
	size_t sizes[32], max = 0;
	int count = getpagesizes(NULL, 0);
	if (count < 1 || count > 32 || getpagesizes(sizes, count) != count)
		return 0;
	for (int i = 0; i < count; i++)
		if (sizes[i] > max)
			max = sizes[i];
	return max;
}

static int advise(unsigned int what, size_t pagesize)
{
	struct memcntl_mha arg = {0, 0, 0};
	arg.mha_cmd = what;
	arg.mha_pagesize = pagesize;
	return memcntl(0, 0, MC_HAT_ADVISE, (caddr_t)&arg, 0, 0);
}

static void show(const char *name, const char *start, size_t bytes, size_t size)
{
	uint64_t addresses[MAX_MEMINFO_CNT], pagesizes[MAX_MEMINFO_CNT];
	unsigned int request = MEMINFO_VPAGESIZE, validity[MAX_MEMINFO_CNT];
	size_t step = bytes / MAX_MEMINFO_CNT;
	int large = 0;
	for (int i = 0; i < MAX_MEMINFO_CNT; i++)
		addresses[i] = (uintptr_t)(start + i * step);
	if (meminfo(addresses, MAX_MEMINFO_CNT, &request, 1, pagesizes, validity))
		exit(3);
	for (int i = 0; i < MAX_MEMINFO_CNT; i++)
		large += (validity[i] & 2) && pagesizes[i] == size;
	printf("%s %d %d\n", name, large, MAX_MEMINFO_CNT);
}

static char bss[16 << 20];

int main(void)
{
	size_t size = largest();
	char *first, *last = NULL, *chunk;
	if (advise(MHA_MAPSIZE_BSSBRK, size) || advise(MHA_MAPSIZE_STACK, size))
		return 1;
	memset(bss, 1, sizeof bss);
	first = malloc(5000);
	for (int i = 0; i < 8000; i++)
		memset(last = malloc(5000), 1, 5000);
	memset(chunk = malloc(64 << 20), 1, 64 << 20);
	printf("size %zu %zu\n", size, size);
	show("bss", bss, sizeof bss, size);
	show("heap", first, (size_t)(last - first), size);
	show("chunk", chunk, 64 << 20, size);
	return 0;
}
#else
#error "no MC_HAT_ADVISE: this would have been compiled without large pages"
#endif
