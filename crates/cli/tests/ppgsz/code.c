/* Loads the library that it is given and reads all of its code, then stays for a while. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	unsigned long start, end, sum = 0;
	char line[512], access[8];
	if (argc != 2 || !dlopen(argv[1], RTLD_NOW))
		return fprintf(stderr, "%s\n", dlerror()), 1;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (fgets(line, sizeof line, maps))
		if (strstr(line, argv[1]) && sscanf(line, "%lx-%lx %7s", &start, &end, access) == 3 &&
		    access[2] == 'x')
			for (unsigned long page = start; page < end; page += 4096)
				sum += *(volatile unsigned char *)page;
	printf("%lu\n", sum);
	fflush(stdout);
	sleep(3);
	return 0;
}
