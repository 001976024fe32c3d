/* Fills a heap by small and large chunks, a thread's arena, bss, data, a deep stack; reads its own
 * padded code. Says "up" and stays for a while, deep in its stack. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MIB = 1 << 20, SMALL = 5000, FRAMES = 96, FRAME_BYTES = 65536 };

static char zeros[32 * MIB];
static char data[16 * MIB] = { 1 };
extern const char padding[], padding_end[];
__asm__(".text\n.globl padding, padding_end\npadding: .fill 16777216, 1, 0x90\npadding_end: ret\n");

static void *arena(void *unused)
{
	for (int i = 0; i < 32 * MIB / SMALL; i++)
		memset(malloc(SMALL), 1, SMALL);
	return unused;
}

static void deepen(int frames)
{
	volatile char frame[FRAME_BYTES];
	for (int i = 0; i < FRAME_BYTES; i += 512)
		frame[i] = (char)frames;
	if (frames) {
		deepen(frames - 1);
	} else {
		puts("up");
		fflush(stdout);
		sleep(4);
	}
	frame[0] = 1;
}

int main(void)
{
	pthread_t thread;
	unsigned long sum = 0;
	for (int i = 0; i < 96 * MIB / SMALL; i++)
		memset(malloc(SMALL), 1, SMALL);
	memset(malloc(64 * MIB), 1, 64 * MIB);
	memset(zeros, 1, sizeof zeros);
	memset(data, 2, sizeof data);
	pthread_create(&thread, NULL, arena, NULL);
	pthread_join(thread, NULL);
	for (const char *at = padding; at < padding_end; at += 4096)
		sum += *(const volatile unsigned char *)at;
	deepen(FRAMES);
	return sum == 0;
}
