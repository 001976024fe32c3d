/* Leaves pages of zeros and others behind. */
#include <string.h>
#include <sys/mman.h>

#define PAGES 1024

int main(void)
{
   volatile char *at = mmap(0, 2 * PAGES * 4096L, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
   /* Others before they leave, or zeros; then only others. */
   for (int page = 0; page < PAGES; page++) {
      at[page * 4096] = 1;
      at[page * 4096 + 4095] = page % 2;
      at[page * 4096] = 0;
   }
   memset((char *)at + PAGES * 4096L, 1, PAGES * 4096L);
   return 42;
}
