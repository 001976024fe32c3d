/* Goes 48 MiB deep and stays there for a while. */
#include <unistd.h>

enum { FRAMES = 768, FRAME_BYTES = 65536 };

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

int main(void)
{
	deepen(FRAMES);
	return 0;
}
