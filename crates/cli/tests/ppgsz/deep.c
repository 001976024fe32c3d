/* Goes as many MiB deep as its argument says, and stays there for a while. */
#include <stdlib.h>
#include <unistd.h>

enum { FRAME_BYTES = 65536, FRAMES_PER_MIB = 16 };

static void deepen(int frames)
{
	volatile char frame[FRAME_BYTES];
	for (int i = 0; i < FRAME_BYTES; i += 512)
		frame[i] = (char)frames;
	if (frames)
		deepen(frames - 1);
	else
		sleep(3);
	frame[0] = 1;
}

int main(int argc, char **argv)
{
	deepen(FRAMES_PER_MIB * (argc > 1 ? atoi(argv[1]) : 1));
	return 0;
}
