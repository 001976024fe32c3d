/* Fills a heap, a thread's arena and a deep stack. Prints a line "NAME resident_kb huge_kb" for each. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEAP_CHUNKS = 16000, ARENA_CHUNKS = 8000, CHUNK_BYTES = 5000, FRAMES = 850, FRAME_BYTES = 65536 };

/* Sums Rss and AnonHugePages over the mappings that overlap [low, high). */
static void show(const char *name, uintptr_t low, uintptr_t high)
{
	FILE *maps = fopen("/proc/self/smaps", "r");
	unsigned long start, end, kb, resident = 0, huge = 0;
	int inside = 0;
	char line[512];
	while (maps && fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			inside = start < high && end > low;
		if (inside && sscanf(line, "Rss: %lu", &kb) == 1)
			resident += kb;
		if (inside && sscanf(line, "AnonHugePages: %lu", &kb) == 1)
			huge += kb;
	}
	fclose(maps);
	printf("%s %lu %lu\n", name, resident, huge);
}

static void fill(const char *name, int chunks)
{
	static char *chunk[HEAP_CHUNKS];
	for (int i = 0; i < chunks; i++)
		memset(chunk[i] = malloc(CHUNK_BYTES), 1, CHUNK_BYTES);
	show(name, (uintptr_t)chunk[0], (uintptr_t)chunk[chunks - 1]);
}

static void deepen(int frames, uintptr_t top)
{
	volatile char frame[FRAME_BYTES];
	for (int i = 0; i < FRAME_BYTES; i += 512)
		frame[i] = (char)frames;
	if (frames)
		deepen(frames - 1, top);
	else
		show("stack", (uintptr_t)frame, top);
	frame[0] = 1;
}

static void *work(void *unused)
{
	fill("arena", ARENA_CHUNKS);
	return unused;
}

int main(void)
{
	char top;
	pthread_t thread;
	fill("heap", HEAP_CHUNKS);
	pthread_create(&thread, NULL, work, NULL);
	pthread_join(thread, NULL);
	deepen(FRAMES, (uintptr_t)&top);
	return 0;
}
