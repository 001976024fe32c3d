/* A random generator with a fixed seed, for programs without a C library. */

typedef unsigned long word;

static word state = 88172645463325252ul;

static word draw(word below)
{
   state ^= state << 13;
   state ^= state >> 7;
   state ^= state << 17;
   return state % below;
}
