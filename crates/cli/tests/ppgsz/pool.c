/* Fills as many MiB from malloc as its argument says, 1 MiB at a time, and stays for a while. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	for (int mib = argc > 1 ? atoi(argv[1]) : 1; mib > 0; mib--)
		memset(malloc(1 << 20), mib, 1 << 20);
	sleep(2);
	return 0;
}
