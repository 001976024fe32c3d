/* Prints whether its heap and its stack are advised for huge pages. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int advised(uintptr_t address)
{
	FILE *maps = fopen("/proc/self/smaps", "r");
	unsigned long start, end;
	int inside = 0, found = 0;
	char line[512];
	while (maps && fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx ", &start, &end) == 2)
			inside = start <= address && address < end;
		if (inside && strncmp(line, "VmFlags:", 8) == 0)
			found = strstr(line, " hg") != NULL;
	}
	fclose(maps);
	return found;
}

int main(void)
{
	char local;
	void *volatile block = malloc(100);
	int heap = advised((uintptr_t)block);
	printf("heap=%d stack=%d\n", heap, advised((uintptr_t)&local));
	return 0;
}
