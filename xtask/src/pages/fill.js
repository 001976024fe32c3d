// Fills a heap by small and large objects, says "up" and stays for a while.
const small = [];
for (let i = 0; i < 1000000; i++) small.push({ name: "object " + i });
const large = Buffer.alloc(64 << 20, 1);
console.log("up");
setTimeout(() => console.log(small.length + large.length), 4000);
