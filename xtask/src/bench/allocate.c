/* Prints the nanoseconds that a pair of malloc and free of a small chunk takes. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { PAIRS = 10000000, KEPT = 256 };

int main(void)
{
	static void *kept[KEPT];
	struct timespec start, end;
	clock_gettime(CLOCK_MONOTONIC, &start);
	for (int i = 0; i < PAIRS; i++) {
		free(kept[i % KEPT]);
		kept[i % KEPT] = malloc(16 + i % 7 * 40);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%.3f\n", ((end.tv_sec - start.tv_sec) * 1e9 + (end.tv_nsec - start.tv_nsec)) / PAIRS);
	return 0;
}
