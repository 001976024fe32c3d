/* Reads from memory that is on small pages first, and on large ones once it has asked for them. Makes
   its calls by itself, so that its addresses are the same each time. Ends with status 42. */

#include "draw.h"

enum { LARGE = 2 << 20, COUNT = 44 };

static char memory[COUNT][LARGE] __attribute__((aligned(2 << 20)));
static char small[600][4096] __attribute__((aligned(4096)));
char stack[16 * 4096] __attribute__((aligned(4096)));

static long call(long number, word a, word b, word c)
{
   long result;
   __asm__ volatile("syscall"
                    : "=a"(result)
                    : "a"(number), "D"(a), "S"(b), "d"(c)
                    : "rcx", "r11", "memory");
   return result;
}

static void read_all(void)
{
   word i;
   for (i = 0; i < 20000; i++) {
      *(volatile char *)&memory[draw(draw(4) ? 30 : COUNT)][draw(LARGE)] += 1;
      *(volatile char *)&small[draw(draw(4) ? 70 : 600)][draw(4096)] += 1;
   }
}

void run(void)
{
   word i;
   for (i = 0; i < 3000; i++)
      small[draw(600)][draw(4096)] = 1;
   /* madvise with MADV_HUGEPAGE; then MADV_POPULATE_WRITE, so that all is there before it is looked at. */
   if (call(28, (word)memory, sizeof memory, 14) != 0 ||
       call(28, (word)memory, sizeof memory, 23) != 0)
      call(231, 1, 0, 0);
   read_all();
   call(231, 42, 0, 0);
}

__asm__(".text\n.globl _start\n_start: lea stack+65536(%rip), %rsp\ncall run\n");
