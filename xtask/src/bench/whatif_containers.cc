// Programs of the C++ standard library's containers, for the predictions of `pagetax whatif`.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <queue>
#include <unordered_map>

static uint64_t state = 1;

static uint64_t next_random() {
   state ^= state << 13, state ^= state >> 7, state ^= state << 17;
   return state;
}

template <typename Map> static uint64_t map(uint64_t count) {
   Map map;
   for (uint64_t nr = 0; nr < count; nr++)
      map[next_random() % (4 * count)] = nr;
   uint64_t sum = 0;
   for (uint64_t nr = 0; nr < 2 * count; nr++) {
      auto found = map.find(next_random() % (4 * count));
      sum += found == map.end() ? 0 : found->second;
   }
   return sum;
}

static uint64_t deque(uint64_t count) {
   std::deque<uint64_t> numbers;
   for (uint64_t nr = 0; nr < count; nr++)
      numbers.push_back(nr);
   uint64_t sum = 0;
   for (uint64_t nr = 0; nr < count / 10; nr++)
      sum += numbers[next_random() % count];
   return sum;
}

static uint64_t priority_queue(uint64_t count) {
   std::priority_queue<uint64_t> queue;
   for (uint64_t nr = 0; nr < count; nr++)
      queue.push(next_random());
   uint64_t sum = 0;
   for (uint64_t nr = 0; nr < count / 4; nr++, queue.pop())
      sum += queue.top();
   return sum;
}

int main(int argc, char **argv) {
   if (argc != 3)
      return fprintf(stderr, "usage: containers NAME COUNT\n"), 2;
   uint64_t count = strtoull(argv[2], nullptr, 10), sum;
   if (!strcmp(argv[1], "map"))
      sum = map<std::map<uint64_t, uint64_t>>(count);
   else if (!strcmp(argv[1], "unordered_map"))
      sum = map<std::unordered_map<uint64_t, uint64_t>>(count);
   else if (!strcmp(argv[1], "deque"))
      sum = deque(count);
   else if (!strcmp(argv[1], "priority_queue"))
      sum = priority_queue(count);
   else
      return fprintf(stderr, "unknown container: %s\n", argv[1]), 2;
   printf("%llu\n", (unsigned long long)sum);
}
