/*
 * Threads that share one heap make it grow and shrink at the same time. Exits with 0 if each block kept its contents,
 * and malloc and the kernel agree on the end of the heap.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { THREADS = 4, ROUNDS = 400, BLOCKS = 8, PAGE_BYTES = 4096 };

static void agree(const char *when)
{
	void *of_malloc = sbrk(0), *of_kernel = (void *)syscall(SYS_brk, 0);
	if (of_malloc != of_kernel) {
		printf("%s: malloc's heap ends at %p, the kernel's at %p\n", when, of_malloc, of_kernel);
		exit(1);
	}
}

static void *work(void *number)
{
	unsigned seed = (unsigned)(uintptr_t)number;
	for (int round = 0; round < ROUNDS; round++) {
		char *block[BLOCKS];
		size_t bytes[BLOCKS];
		for (int i = 0; i < BLOCKS; i++) {
			bytes[i] = (1 << 16) + rand_r(&seed) % (24 << 20);
			block[i] = malloc(bytes[i]);
			for (size_t at = 0; at < bytes[i]; at += 64 * PAGE_BYTES)
				block[i][at] = (char)(round + i);
		}
		for (int i = 0; i < BLOCKS; i++) {
			for (size_t at = 0; at < bytes[i]; at += 64 * PAGE_BYTES)
				if (block[i][at] != (char)(round + i))
					abort();
			free(block[i]);
		}
	}
	return NULL;
}

int main(void)
{
	pthread_t thread[THREADS];
	for (int i = 1; i <= 40; i++) {
		/* Never freed, so that the heap grows by steps of odd sizes. */
		memset(malloc(10 * 1000 * 1000 + i), 1, 100);
		agree("grown");
	}
	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&thread[i], NULL, work, (void *)(i + 1));
	for (int i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	agree("at the end");
	return 0;
}
