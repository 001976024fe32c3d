/* Programs whose translation is of a known kind: corpus KIND MEGABYTES MILLION_ACCESSES; and one that
   keeps memory: corpus hold MEGABYTES 0. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static uint64_t state = 88172645463325252ull;

static uint64_t draw(void)
{
   state ^= state << 13;
   state ^= state >> 7;
   state ^= state << 17;
   return state;
}

static uint64_t sequential(uint64_t *words, uint64_t count, uint64_t accesses)
{
   uint64_t sum = 0;
   for (uint64_t n = 0; n < accesses; n++)
      sum += words[n % count];
   return sum;
}

/* A line on every page, again and again. */
static uint64_t strided(uint64_t *words, uint64_t count, uint64_t accesses)
{
   uint64_t sum = 0, at = 0;
   for (uint64_t n = 0; n < accesses; n++) {
      sum += words[at];
      at += 520;
      if (at >= count)
         at -= count;
   }
   return sum;
}

static uint64_t uniform(uint64_t *words, uint64_t count, uint64_t accesses)
{
   uint64_t sum = 0;
   for (uint64_t n = 0; n < accesses; n++)
      sum += words[draw() % count];
   return sum;
}

/* Few words often: the product of uniform draws is small more often than not. */
static uint64_t zipf(uint64_t *words, uint64_t count, uint64_t accesses)
{
   uint64_t sum = 0;
   for (uint64_t n = 0; n < accesses; n++) {
      uint64_t r = draw();
      double a = (uint32_t)r / 4294967296.0, b = (r >> 32) / 4294967296.0;
      sum += words[(uint64_t)(a * a * b * b * count)];
   }
   return sum;
}

/* One random cycle through all lines. */
static uint64_t list(uint64_t *words, uint64_t count, uint64_t accesses)
{
   uint64_t lines = count / 8, at = 0;
   for (uint64_t n = 0; n < lines; n++)
      words[n * 8] = n;
   for (uint64_t last = lines - 1; last > 0; last--) {
      uint64_t other = draw() % last, kept = words[last * 8];
      words[last * 8] = words[other * 8];
      words[other * 8] = kept;
   }
   for (uint64_t n = 0; n < accesses; n++)
      at = words[at * 8];
   return at;
}

/* Builds a table of keys with open addressing, then looks keys up. */
static uint64_t hash_join(uint64_t *words, uint64_t count, uint64_t accesses)
{
   uint64_t found = 0, built = count / 3;
   for (uint64_t key = 1; key <= built; key++) {
      uint64_t at = key * 0x9e3779b97f4a7c15ull % count;
      while (words[at])
         at = at + 1 == count ? 0 : at + 1;
      words[at] = key;
   }
   for (uint64_t n = 0; n < accesses; n++) {
      uint64_t key = draw() % (2 * built) + 1, at = key * 0x9e3779b97f4a7c15ull % count;
      while (words[at] && words[at] != key)
         at = at + 1 == count ? 0 : at + 1;
      found += words[at] == key;
   }
   return found;
}

/* Keeps base pages until standard input ends. */
static int hold(uint64_t bytes)
{
   char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
   if (memory == MAP_FAILED)
      return 1;
   madvise(memory, bytes, MADV_NOHUGEPAGE);
   for (uint64_t at = 0; at < bytes; at += 4096)
      memory[at] = 1;
   puts("held");
   fflush(stdout);
   while (getchar() != EOF)
      ;
   return 0;
}

int main(int argc, char **argv)
{
   static const struct {
      const char *name;
      uint64_t (*run)(uint64_t *, uint64_t, uint64_t);
   } kinds[] = {{"sequential", sequential}, {"strided", strided}, {"uniform", uniform},
                {"zipf", zipf},             {"list", list},       {"hash-join", hash_join}};
   if (argc != 4)
      return 2;
   uint64_t bytes = strtoull(argv[2], NULL, 10) << 20;
   if (strcmp(argv[1], "hold") == 0)
      return hold(bytes);
   uint64_t *words = malloc(bytes);
   /* Or else the compiler makes both a calloc, and what is only read is one page of zeros. */
   __asm__ volatile("" : "+r"(words));
   memset(words, 0, bytes);
   for (unsigned kind = 0; kind < sizeof kinds / sizeof *kinds; kind++)
      if (strcmp(kinds[kind].name, argv[1]) == 0) {
         uint64_t accesses = strtoull(argv[3], NULL, 10) * 1000000;
         printf("%llu\n", (unsigned long long)kinds[kind].run(words, bytes / 8, accesses));
         return 0;
      }
   return 2;
}
