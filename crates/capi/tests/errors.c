/* Each wrong argument and its errno; the status is the line of the first that differs. */
#include <errno.h>
#include <pagetax.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define FAILS(call, code)                                \
	do {                                             \
		errno = 0;                               \
		if ((call) != -1 || errno != (code))     \
			return __LINE__;                 \
	} while (0)
#define HOLDS(what)                      \
	do {                             \
		if (!(what))             \
			return __LINE__; \
	} while (0)

static int hat(void *address, size_t len, unsigned int what, unsigned int flags, size_t pagesize)
{
	struct memcntl_mha arg = {what, flags, pagesize};
	return memcntl(address, len, MC_HAT_ADVISE, &arg, 0, 0);
}

int main(void)
{
	const size_t base = 4096, large = 2 << 20;
	struct memcntl_mha arg = {MHA_MAPSIZE_VA, 0, 0};
	size_t sizes[40];
	char *memory =
		(char *)mmap(NULL, 8 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *aligned = (char *)(((uintptr_t)memory + large - 1) / large * large);
	uint64_t address = (uintptr_t)aligned, data[3];
	unsigned int requests[3] = {MEMINFO_VPAGESIZE, MEMINFO_VREPLCNT, MEMINFO_VREPL}, validity;

	HOLDS(getpagesizes(NULL, 0) >= 1);
	HOLDS(getpagesizes(sizes, 1) == 1 && sizes[0] == base);
	HOLDS(getpagesizes(sizes, 40) == getpagesizes(NULL, 0));
	HOLDS(getpagesizes(sizes, 0) == 0);
	FAILS(getpagesizes(NULL, 1), EINVAL);
	FAILS(getpagesizes(sizes, -1), EINVAL);

	FAILS(memcntl(aligned, large, MC_HAT_ADVISE, NULL, 0, 0), EINVAL);
	FAILS(memcntl(aligned, large, MC_HAT_ADVISE, &arg, 1, 0), EINVAL);
	FAILS(memcntl(aligned, large, MC_HAT_ADVISE, &arg, 0, 1), EINVAL);
	FAILS(memcntl(aligned, large, 99, &arg, 0, 0), EINVAL);
	FAILS(hat(aligned, large, 8, 0, base), EINVAL);
	FAILS(hat(aligned, large, MHA_MAPSIZE_VA, 1, base), EINVAL);
	FAILS(hat(aligned, large, MHA_MAPSIZE_VA, 0, 3 * base), EINVAL);
	FAILS(hat(aligned, large, MHA_MAPSIZE_VA, 0, (size_t)1 << 40), EINVAL);
	FAILS(hat(aligned + 1, base, MHA_MAPSIZE_VA, 0, base), EINVAL);
	FAILS(hat(aligned, base + 1, MHA_MAPSIZE_VA, 0, base), EINVAL);
	FAILS(hat(aligned, 0, MHA_MAPSIZE_VA, 0, base), EINVAL);
	FAILS(hat(NULL, 0, MHA_MAPSIZE_VA, 0, base), EINVAL);
	FAILS(hat(aligned, large, MHA_MAPSIZE_BSSBRK, 0, base), EINVAL);
	FAILS(hat(aligned, large, MHA_MAPSIZE_STACK, 0, base), EINVAL);

	HOLDS(hat(aligned, large, MHA_MAPSIZE_VA, 0, base) == 0);
	HOLDS(hat(aligned, large, MHA_MAPSIZE_VA, 0, 0) == 0);
	HOLDS(hat(NULL, 0, MHA_MAPSIZE_STACK, 0, 0) == 0);
	HOLDS(hat(NULL, 0, MHA_MAPSIZE_BSSBRK, 0, 0) == 0);

	munmap(aligned + large + base, base);
	FAILS(hat(aligned + large, 4 * base, MHA_MAPSIZE_VA, 0, base), ENOMEM);
	mprotect(aligned + base, base, PROT_READ);
	HOLDS(hat(aligned, 4 * base, MHA_MAPSIZE_VA, 0, base) == 0);
	if (getpagesizes(sizes, 40) > 1 && sizes[getpagesizes(NULL, 0) - 1] == large) {
		FAILS(hat(aligned, large, MHA_MAPSIZE_VA, 0, large), EINVAL);
		mprotect(aligned + base, base, PROT_READ | PROT_WRITE);
		memset(aligned, 1, base);
		HOLDS(hat(aligned, large, MHA_MAPSIZE_VA, 0, large) == 0);
	}

	memset(aligned, 1, base);
	HOLDS(meminfo(&address, 1, requests, 3, data, &validity) == 0);
	HOLDS(validity == (1 | 2 | 4) && data[0] >= base && data[1] == 0);
	address = (uintptr_t)(aligned + large + base);
	HOLDS(meminfo(&address, 1, requests, 3, data, &validity) == 0 && validity == 0);
	FAILS(meminfo(&address, 0, requests, 3, data, &validity), EINVAL);
	FAILS(meminfo(&address, 257, requests, 3, data, &validity), EINVAL);
	FAILS(meminfo(&address, 1, requests, 32, data, &validity), EINVAL);
	FAILS(meminfo(NULL, 1, requests, 3, data, &validity), EFAULT);
	requests[0] = 0x990000;
	FAILS(meminfo(&address, 1, requests, 3, data, &validity), EINVAL);
	return 0;
}
