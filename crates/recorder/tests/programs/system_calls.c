/* Uses memory by system calls alone. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

int main(void)
{
   int zeros = open("/dev/zero", O_RDONLY), nothing = open("/dev/null", O_WRONLY);
   char *at = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
   if (read(zeros, at, 64 * 4096) != 64 * 4096 || write(nothing, at, 32 * 4096) != 32 * 4096)
      return 1;
   /* No memory is there. */
   if (read(zeros, (char *)4096, 4096) != -1)
      return 2;
   return madvise(at, 16 * 4096, MADV_DONTNEED) ? 3 : 42;
}
