/* Takes 80 MiB by brk itself, in small steps, and checks them at the end. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { STEPS = 1280, STEP_BYTES = 65536 };

int main(void)
{
	char *step[STEPS];
	for (int i = 0; i < STEPS; i++) {
		step[i] = sbrk(STEP_BYTES);
		memset(step[i], i & 0x7f, STEP_BYTES);
		usleep(300);
	}
	sleep(3);
	for (int i = 0; i < STEPS; i++)
		for (int j = 0; j < STEP_BYTES; j += 61)
			if (step[i][j] != (i & 0x7f))
				return puts("broken"), 1;
	return puts("ok"), 0;
}
