//! The programs and test suites that conformance runs. None of them is ours.
//!
//! A suite is a bash script. It prints one line for each of its cases, `NAME VERDICT`, and nothing that
//! changes from run to run: times, process numbers and paths go to files. `TOOL` stands before the program
//! under test, `@` is an empty directory.

/// A program or test suite with its script.
#[derive(Debug)]
pub struct Suite {
    pub name: &'static str,
    /// Files that must exist, each with the Debian package that has it.
    pub needs: &'static [(&'static str, &'static str)],
    pub script: &'static str,
    pub limit_s: u64,
    /// Runs in each locale, not in C alone.
    pub has_locales: bool,
    /// True if the suite runs in the gate.
    pub is_quick: bool,
}

impl Suite {
    const fn of(name: &'static str, needs: &'static [(&str, &str)], script: &'static str) -> Suite {
        let (has_locales, is_quick) = (false, false);
        Suite { name, needs, script, limit_s: 300, has_locales, is_quick }
    }

    const fn limit_s(self, limit_s: u64) -> Suite {
        Suite { limit_s, ..self }
    }

    const fn in_each_locale(self) -> Suite {
        Suite { has_locales: true, ..self }
    }

    const fn quick(self) -> Suite {
        Suite { is_quick: true, ..self }
    }
}

const PYTHON: &[(&str, &str)] =
    &[("/usr/lib/python3.11/test/test_mmap.py", "libpython3.11-testsuite")];
const STRESS: &[(&str, &str)] = &[("/usr/bin/stress-ng", "stress-ng")];
const POSTGRES: &[(&str, &str)] = &[("/usr/lib/postgresql/15/bin/initdb", "postgresql")];
const REDIS: &[(&str, &str)] = &[("/usr/bin/redis-server", "redis-server")];

/// Expands to a suite that runs one module of CPython's tests, with options of its runner.
macro_rules! cpython {
    ($module:literal) => {
        cpython!($module, "")
    };
    ($module:literal, $options:literal) => {
        Suite::of(
            $module,
            PYTHON,
            concat!(
                "cd @; TOOL /usr/bin/python3 -m test ",
                $options,
                " --junit-xml @/cases.xml ",
                $module,
                " > @/log 2>&1 < /dev/null; echo exit $?; cat @/log >&2; /usr/bin/python3 CASES @/cases.xml"
            ),
        )
        .limit_s(900)
    };
}

/// Expands to a suite that runs stressors one after the other, each for two seconds.
macro_rules! stress_ng {
    ($name:literal, $stressors:literal) => {
        Suite::of(
            $name,
            STRESS,
            concat!(
                "cd @; for s in ",
                $stressors,
                // 3 and 4: no resources, or nothing of the kind here.
                "; do timeout -k 5 90 TOOL stress-ng --$s 1 --timeout 2s --verify --temp-path @ -q >&2; \
                 case $? in 0) echo $s passed;; 3|4) echo $s skipped;; *) echo $s failure;; esac; done"
            ),
        )
        .limit_s(3600)
    };
}

/// All suites, as the table lists them.
pub const SUITES: &[Suite] = &[
    cpython!("test_mmap").in_each_locale().quick(),
    cpython!("test_gc").in_each_locale().quick(),
    cpython!("test_ctypes").in_each_locale().quick(),
    cpython!("test_signal").in_each_locale(),
    cpython!("test_threading").in_each_locale(),
    cpython!("test_subprocess").in_each_locale(),
    // Of sockets to a hypervisor: without a peer there, they wait for ever, natively too.
    cpython!("test_socket", "--ignore '*VSOCK*'").in_each_locale(),
    cpython!("test_asyncio").limit_s(1800),
    cpython!("test_multiprocessing_fork").in_each_locale().limit_s(1800),
    cpython!("test_multiprocessing_spawn").limit_s(1800),
    cpython!("test_multiprocessing_forkserver").limit_s(1800),
    stress_ng!(
        "stress-ng vm",
        "bad-altstack bigheap brk dev-shm env madvise malloc mlock mlockmany mmap mmapaddr mmapfixed mmapfork \
         mmaphuge mmapmany mprotect mremap msync msyncmany munmap pagemove shm shm-sysv stack stackmmap tmpfs \
         userfaultfd vm vm-addr vm-rw vm-segv vm-splice"
    ),
    stress_ng!(
        "stress-ng memory",
        "atomic bsearch context full heapsort hsearch judy list lsearch matrix matrix-3d mcontend membarrier \
         memcpy memfd memrate memthrash mergesort mincore misaligned null pipe pipeherd prefetch qsort radixsort \
         randlist remap resources rmap shellsort skiplist sparsematrix str stream tlb-shootdown tree tsearch wcs \
         zero zlib"
    ),
    stress_ng!(
        "stress-ng signal",
        "alarm itimer kill sigabrt sigchld sigfd sigfpe sigio signal signest sigpending sigpipe sigq sigrt \
         sigsegv sigsuspend sigtrap timer timerfd"
    ),
    stress_ng!(
        "stress-ng fork",
        "clone daemon exec fork forkheavy pthread session spawn vfork vforkmany wait zombie"
    ),
    stress_ng!("stress-ng sample", "brk fork malloc mmap mprotect sigfd stack vm vm-splice").quick(),
    Suite::of(
        "redis-server",
        REDIS,
        "TOOL redis-server --port 0 --unixsocket @/s --save '' --enable-debug-command local > @/log & \
         until redis-cli -s @/s ping 2> @/err | grep -q PONG; do sleep 0.1; done; \
         redis-cli -s @/s debug populate 150000 key 256; \
         redis-benchmark -s @/s -n 20000 -r 100000 -q -t set,get,incr,lpush,lrange_100,zadd >&2; \
         echo benchmark $?; redis-cli -s @/s get key:77; redis-cli -s @/s eval 'local n = 0 for i = 0, 149999 do \
         n = n + redis.call(\"strlen\", \"key:\" .. i) end return n' 0; redis-cli -s @/s flushall; \
         redis-cli -s @/s debug populate 50000 key 64; redis-cli -s @/s debug digest; \
         redis-cli -s @/s shutdown nosave; wait; echo exit $?",
    )
    .in_each_locale()
    .quick(),
    Suite::of(
        "redis-server BGSAVE",
        REDIS,
        "TOOL redis-server --port 0 --unixsocket @/s --dir @ --save '' --enable-debug-command local > @/log & \
         until redis-cli -s @/s ping 2> @/err | grep -q PONG; do sleep 0.1; done; \
         redis-cli -s @/s debug populate 300000 key 256; redis-cli -s @/s bgsave; \
         until redis-cli -s @/s info persistence | grep -q bgsave_in_progress:0; do sleep 0.1; done; \
         redis-cli -s @/s info persistence | grep -o 'last_bgsave_status:[a-z]*'; \
         redis-check-rdb @/dump.rdb | grep -E 'keys read|looks OK' | sed 's/.*keys/keys/;s/.*RDB/RDB/'; \
         redis-cli -s @/s shutdown nosave; wait; echo exit $?",
    ),
    Suite::of(
        "PostgreSQL",
        POSTGRES,
        "chown postgres @; as='runuser -u postgres --'; bin=/usr/lib/postgresql/15/bin; cd @; \
         $as TOOL $bin/initdb -D @/data -E UTF8 > @/initdb.log 2>&1; echo initdb $?; cat @/initdb.log >&2; \
         $as TOOL $bin/postgres -D @/data -k @ -c listen_addresses= > @/server.log 2>&1 & \
         for i in $(seq 300); do $as $bin/pg_isready -q -h @ && break; sleep 0.2; done; \
         $as $bin/pgbench -h @ -i -q -s 2 postgres >&2; echo fill $?; \
         $as TOOL $bin/pgbench -h @ -c 4 -j 2 -t 250 -n postgres > @/bench.log 2>&1; echo bench $?; \
         grep -o 'processed: .*' @/bench.log; cat @/bench.log @/server.log >&2; \
         $as psql -h @ -Atc 'SELECT count(*) FROM pgbench_accounts' -c 'SELECT (SELECT sum(abalance) FROM \
         pgbench_accounts) = (SELECT sum(delta) FROM pgbench_history), (SELECT sum(bbalance) FROM \
         pgbench_branches) = (SELECT sum(tbalance) FROM pgbench_tellers)' postgres; \
         $as $bin/pg_ctl -D @/data -m fast -s stop; echo stop $?; wait; echo exit $?",
    )
    .in_each_locale(),
    Suite::of(
        "sqlite3",
        &[("/usr/bin/sqlite3", "sqlite3")],
        "TOOL sqlite3 @/db 'PRAGMA journal_mode=wal; PRAGMA cache_size=-100000; CREATE TABLE t(a, b); WITH \
         RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c LIMIT 200000) INSERT INTO t SELECT \
         n*7919%1000003, printf(\"%0200d\", n) FROM c; CREATE INDEX i ON t(a); SELECT count(*), sum(length(b)), \
         max(a) FROM t; SELECT b FROM t WHERE a = 77; PRAGMA integrity_check; SELECT count(*) FROM t x JOIN t y \
         ON x.a = y.a;'; echo exit $?",
    )
    .in_each_locale()
    .quick(),
    Suite::of(
        "sort",
        &[("/usr/bin/sort", "coreutils")],
        "seq 1000000 | awk '{print ($1 * 7919) % 3000017, $1}' > @/in; TOOL sort --parallel=4 -S 200M @/in | md5sum; \
         TOOL sort -n -S 20M -T @ @/in | md5sum; echo exit $?",
    )
    .in_each_locale()
    .quick(),
    Suite::of(
        "perl",
        &[("/usr/bin/perl", "perl-base")],
        "TOOL perl -e 'use strict; my %h; $h{$_ * 7919 % 1000003} = \"v$_\" for 1 .. 120000; my $n = 0; \
         for (sort { $a <=> $b } keys %h) { $n = ($n * 31 + length($h{$_})) % 65521 } print \"sum $n\\n\"; \
         my $t = join(\" \", values %h); my $c = () = $t =~ /v\\d*77\\b/g; print \"matches $c\\n\"; \
         my $p = fork(); if (!$p) { exit(scalar(keys %h) == 120000 ? 7 : 1) } waitpid($p, 0); \
         print \"child \", $? >> 8, \"\\n\"; print \"out \", length(qx(seq 1000)), \"\\n\"'; echo exit $?",
    )
    .in_each_locale()
    .quick(),
    Suite::of(
        "node",
        &[("/usr/bin/node", "nodejs")],
        "TOOL node -e 'const { Worker } = require(\"worker_threads\"); const m = new Map(); for (let i = 0; i < \
         150000; i++) m.set(\"k\" + (i * 7919 % 1000003), { i, s: \"x\".repeat(i % 50) }); let n = 0; for (const \
         [k, v] of m) n = (n * 31 + k.length + v.s.length) % 65521; console.log(\"sum\", n); const t = \
         JSON.stringify([...m.values()]); console.log(\"json\", t.length, require(\"crypto\").createHash(\"md5\")\
         .update(t).digest(\"hex\")); const w = new Worker(\"const { parentPort } = require(\\\"worker_threads\\\"); \
         const a = new Float64Array(4e6).fill(1.5); parentPort.postMessage(a.reduce((x, y) => x + y))\", { eval: \
         true }); w.on(\"message\", (r) => console.log(\"worker\", r)); console.log(\"child\", \
         require(\"child_process\").execSync(\"seq 100\").length)'; echo exit $?",
    )
    .in_each_locale()
    .quick(),
    Suite::of(
        "java",
        &[("/usr/bin/java", "default-jdk-headless")],
        "cat > @/Fill.java <<'END'\n\
         import java.util.*;\n\
         import java.util.stream.*;\n\
         public class Fill {\n\
           public static void main(String[] a) throws Exception {\n\
             Map<Integer, String> m = new HashMap<>();\n\
             for (int i = 0; i < 400000; i++) m.put(i * 7919 % 1000003, \"value\" + i);\n\
             System.out.println(\"sum \" + m.values().stream().mapToInt(String::length).sum());\n\
             System.out.println(\"parallel \" + IntStream.range(0, 5000000).parallel().mapToLong(x -> x % 7).sum());\n\
             Process p = new ProcessBuilder(\"seq\", \"100\").start();\n\
             System.out.println(\"child \" + p.getInputStream().readAllBytes().length + \" \" + p.waitFor());\n\
           }\n\
         }\n\
         END\n\
         cd @; javac Fill.java; TOOL java -Xmx256m -cp @ Fill; echo exit $?",
    )
    .in_each_locale(),
    Suite::of(
        "Go with cgo",
        &[("/usr/local/go/bin/go", "golang-go")],
        "mkdir @/g; cat > @/g/main.go <<'END'\n\
         package main\n\
         // #include <stdlib.h>\n\
         // #include <string.h>\n\
         // static int fill(int n) { char *p = malloc(n); memset(p, 3, n); int s = 0; for (int i = 0; i < n; i += 64) s += p[i]; free(p); return s; }\n\
         import \"C\"\n\
         import (\"fmt\"; \"os/exec\"; \"sync\")\n\
         func main() {\n\
           fmt.Println(\"c\", C.fill(64 << 20))\n\
           m := map[int]string{}\n\
           for i := 0; i < 400000; i++ { m[i*7919%1000003] = fmt.Sprint(i) }\n\
           n := 0; for _, v := range m { n += len(v) }\n\
           var g sync.WaitGroup; t := make([]int, 8)\n\
           for w := range t { g.Add(1); go func() { defer g.Done(); for i := 0; i < 2000000; i++ { t[w] += i % 7 } }() }\n\
           g.Wait(); fmt.Println(\"go\", n, t)\n\
           o, e := exec.Command(\"seq\", \"100\").Output(); fmt.Println(\"child\", len(o), e)\n\
         }\n\
         END\n\
         cd @/g; export PATH=$PATH:/usr/local/go/bin HOME=@; go mod init g > @/log 2>&1; CGO_ENABLED=1 go build -o g . \
         >> @/log 2>&1; echo build $?; cat @/log >&2; TOOL ./g; echo exit $?",
    ),
    Suite::of(
        "gcc",
        &[("/usr/bin/g++", "g++")],
        "cd @; printf '#include <bits/stdc++.h>\\n#include <regex>\\nint main(int n, char **v) { std::map<std::string, \
         std::vector<int>> m; std::regex r(\"a+b\"); for (int i = 0; i < 1000; i++) m[std::to_string(i %% 37)].push_back(i); \
         std::cout << m.size() << std::regex_match(\"aab\", r) << std::endl; }\\n' > a.cc; \
         TOOL g++ -O2 -std=c++20 -c -o a.o a.cc; echo exit $?; cksum < a.o; TOOL g++ -o a a.o; echo link $?; ./a",
    )
    .in_each_locale()
    .quick(),
    Suite::of(
        "git",
        &[("/usr/bin/git", "git")],
        "cd @; export HOME=@ GIT_AUTHOR_DATE='2020-01-01T00:00:00Z' GIT_COMMITTER_DATE='2020-01-01T00:00:00Z'; \
         git config --global user.email a@b; git config --global user.name a; git init -q -b main r; cd r; \
         cp -r /usr/include/linux .; TOOL git add .; echo add $?; TOOL git commit -q -m one; echo commit $?; \
         find . -name '*.h' -newermt 2000-01-01 | sort | head -200 | xargs sed -i 's/define/DEFINE/'; \
         TOOL git commit -q -a -m two; git rev-parse HEAD; TOOL git log --stat -p | md5sum; TOOL git gc -q; \
         echo gc $?; TOOL git fsck --full --no-progress; echo fsck $?; TOOL git clone -q . ../c; echo clone $?; \
         git -C ../c rev-parse HEAD; TOOL git blame linux/fs.h | md5sum",
    )
    .in_each_locale()
    .quick(),
];
