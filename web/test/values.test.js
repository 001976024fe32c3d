/** The page shows the numbers of the document, in the words of the terminal. */
import assert from "node:assert/strict";
import test, { after } from "node:test";
import { cells, close, count, document, open, terminal, unfold } from "./page.js";

after(close);

/** Returns the terminal's line that begins with this word, after this heading. */
function line(text, heading, word) {
  const section = text.slice(text.indexOf(`\n${heading}`));
  return section.split("\n").find((line) => line.trim().startsWith(`${word} `)) ?? "";
}

/** Fails if a cell is not in the terminal's line of its row. */
async function sameAsTerminal(page, text, caption, heading, skipped = []) {
  const [head, ...rows] = await cells(page, caption);
  assert.ok(rows.length > 0, caption);
  for (const row of rows) {
    const expected = line(text, heading, row[0]);
    const shown = row.filter((cell, nth) => cell !== "" && !skipped.includes(head[nth]));
    for (const cell of shown)
      assert.ok(expected.includes(cell), `${caption}: ${cell} is not in: ${expected}`);
  }
}

for (const name of ["run-mmap3", "run-host"]) {
  test(`${name}: tables are those of the terminal`, async () => {
    const text = terminal(name);
    const { page, close } = await open([document(name)]);
    const plots = ["share of the total\n0 %50 %100 %", "share of the total", "how"];
    await sameAsTerminal(page, text, "CPU time", "CPU time", plots);
    await sameAsTerminal(page, text, "Wall time", "Wall time", plots);
    await sameAsTerminal(page, text, "Counters of the whole run", "Counters");
    await sameAsTerminal(page, text, "Counters of each phase", "Phases");
    await sameAsTerminal(page, text, "Latency by kind", "Latency");
    const sentence = await page.locator(".sentence").first().innerText();
    assert.ok(text.includes(sentence), sentence);
    await close();
  });
}

test("a diagnosis has the verdict, the causes and the lines of the terminal", async () => {
  const text = terminal("diagnose-names");
  const { verdict } = JSON.parse(document("diagnose-names").text);
  const { page, close } = await open([document("diagnose-names")]);
  await sameAsTerminal(page, text, "CPU time", "CPU time", ["share of the total", "how"]);
  const flat = text.replace(/\s+/g, " ");
  const sentences = [
    await page.locator(".sentence").first().innerText(),
    await page.locator(".reason").innerText(),
  ];
  for (const sentence of sentences) assert.ok(flat.includes(sentence.replace("Verdict: ", "")), sentence);
  const lines = await page.locator(".verdict pre").allInnerTexts();
  const expected =
    verdict.apply === null ? [] : [verdict.apply, verdict.systemd.join("\n"), verdict.dockerfile.join("\n")];
  assert.deepEqual(lines, expected);
  await unfold(page);
  const [, ...rows] = await cells(page, "Elapsed time of each trial");
  for (const row of rows) {
    const shown = row.slice(0, 6);
    for (const cell of shown) assert.ok(line(text, "Trials", row[0]).includes(cell), `${cell} of ${row[0]}`);
  }
  await close();
});

test("the table under a chart has every value of the series", async () => {
  const { columns } = JSON.parse(document("run-mmap3").text).series;
  const { page, close } = await open([document("run-mmap3")]);
  await unfold(page);
  const [head, ...rows] = await cells(page, "Faults");
  assert.equal(rows.length, columns.time_ns.length);
  head.slice(1).forEach((name, nth) => {
    assert.deepEqual(
      rows.map((row) => row[nth + 1]),
      columns[name].map(count),
    );
  });
  const [latencyHead, ...latencies] = await cells(page, "Page-in latency");
  latencyHead.slice(1).forEach((name, nth) => {
    latencies.forEach((row, index) => assertNear(row[nth + 1], columns[name][index]));
  });
  await close();
});

const UNITS = { ns: 1, µs: 1e3, ms: 1e6, s: 1e9 };

/** Fails if a time of three digits is not that number of nanoseconds. */
function assertNear(shown, ns) {
  if (ns === null) return assert.equal(shown, "–");
  const [value, unit] = shown.split(" ");
  assert.ok(Math.abs(Number(value) * UNITS[unit] - ns) <= ns * 0.006, `${shown} is not ${ns} ns`);
}

test("the values at the pointer are those of the series", async () => {
  const { columns } = JSON.parse(document("run-mmap3").text).series;
  const { page, close } = await open([document("run-mmap3")]);
  const figure = page.locator("figure").first();
  const box = await figure.locator(".u-over").boundingBox();
  for (const share of [0.1, 0.45, 0.9]) {
    await page.mouse.move(box.x + box.width * share, box.y + 40);
    await page.waitForTimeout(60);
    const shown = await figure.locator(".legend").innerText();
    const time = columns.time_ns[0] + share * (columns.time_ns.at(-1) - columns.time_ns[0]);
    const index = columns.time_ns.findIndex((at) => at >= time - 5e8);
    for (const name of ["major_fault_count", "minor_fault_count"]) {
      const near = columns[name].slice(Math.max(index - 1, 0), index + 2).map(count);
      const value = shown.split(name)[1].trim().split("\n")[0].trim();
      assert.ok(near.includes(value), `${name} at ${share}: ${value} of ${near}`);
    }
  }
  await close();
});

test("the text at a bar is that of its row", async () => {
  const { page, close } = await open([document("run-host")]);
  const row = page.locator("tr", { hasText: "translation" }).first();
  await row.locator(".strip").hover();
  const tip = await page.locator(".tip").innerText();
  for (const nth of [0, 1])
    assert.ok(
      tip.includes(
        (
          await row
            .locator("td")
            .nth(nth === 0 ? 0 : 3)
            .innerText()
        ).trim(),
      ),
      tip,
    );
  await close();
});

test("missing rows are named with their reason, and are not 0", async () => {
  const { page, close } = await open([document("diagnosis")]);
  const row = page.locator("tr", { hasText: "no trial put most of the memory on large pages" }).last();
  const [time, share, plot, , provenance] = await row.locator("td").allInnerTexts();
  assert.deepEqual([time, share, plot, provenance.trim()], ["–", "–", "missing", "missing"]);
  await close();
});

test("several runs are compared with the intervals of the terminal", async () => {
  const { page, close } = await open([document("several-a"), document("several-b")]);
  await page.getByRole("tab", { name: "Compare" }).click();
  const [, ...rows] = await cells(page, "Ratio of each value");
  for (const row of rows) {
    const expected = line(`\n${terminal("several")}`, "", row[0]);
    for (const cell of [...row.slice(1, 5), row[6]])
      assert.ok(expected.includes(cell), `${cell} is not in: ${expected}`);
  }
  assert.ok(
    rows.some((row) => /\(.*–.*\)/.test(row[4])),
    "some have an interval",
  );
  await close();
});

test("a miss curve has the percentages of the terminal", async () => {
  const text = terminal("misscurve-sort");
  const { page, close } = await open([document("misscurve-sort")]);
  await unfold(page);
  const [, ...rows] = await cells(page, "Misses, % of accesses");
  for (const row of rows) {
    const expected = line(text, "misses", row[0]);
    for (const cell of row) assert.ok(expected.includes(cell), `${cell} is not in: ${expected}`);
  }
  await close();
});

test("a listing of trapstat has the numbers of the terminal", async () => {
  const { title } = JSON.parse(document("trapstat-sort").text).listings[0];
  const text = terminal("trapstat-sort");
  const { page, close } = await open([document("trapstat-sort")]);
  const [, ...rows] = await cells(page, `${title} (modeled)`);
  const lines = text
    .slice(text.indexOf(title))
    .split("\n")
    .filter((line) => /^ +(\d+ [uk]|ttl)/.test(line));
  rows.forEach((row, nth) => {
    const numbers = lines[nth].match(/n\/a|[\d.]+(?= |\||$)/g).slice(-9);
    assert.deepEqual(row.slice(3), numbers, lines[nth]);
  });
  assert.equal(rows.at(-1)[0], "ttl");
  await close();
});

test("a prediction has the numbers of the terminal", async () => {
  const text = terminal("whatif-sort");
  const { page, close } = await open([document("whatif-sort")]);
  for (const caption of ["Time (derived", "What is saved;", "Page walks and faults"]) {
    const [, ...rows] = await cells(page, caption);
    for (const cell of rows.flat().filter((cell) => !/^0\n|^$/.test(cell)))
      assert.ok(text.includes(cell), cell);
  }
  await close();
});

test("a reproduction has the figures of the terminal", async () => {
  const text = terminal("reproduce-sun-4");
  const { page, close } = await open([document("reproduce-sun-4")]);
  await unfold(page);
  for (const caption of ["Simulated ÷ published", "Figures of the curves"]) {
    const [head, ...rows] = await cells(page, caption);
    assert.ok(rows.length > 20);
    const plot = head.findIndex((heading) => heading.startsWith("ratio and tolerance"));
    for (const row of rows) {
      const lines = text.split("\n").filter((line) => line.trim().startsWith(row[0]));
      const shown = row.filter((_, nth) => nth !== plot);
      assert.ok(
        lines.some((line) => shown.every((cell) => line.includes(cell))),
        row.join(" | "),
      );
    }
  }
  await close();
});

test("integers that a double cannot hold keep their digits", async () => {
  const { page, close } = await open([document("server")]);
  const [, ...rows] = await cells(page, "Values");
  assert.equal(rows.find(([name]) => name === "epoch")[1].replaceAll(" ", ""), "7479245819844821538");
  await close();
  const run = document("run-host").text.replace('"seed":1', '"seed":18446744073709551615');
  const seeded = await open([{ name: "seed.json", text: run }]);
  await seeded.page.getByText("seed=18446744073709551615").waitFor();
  await seeded.close();
});

test("a heatmap shows the counts of its document", async () => {
  const curves = JSON.parse(document("misscurve-sort").text);
  const counts = Array.from({ length: 40 }, (_, row) =>
    Array.from({ length: 100 }, (_, column) => (row * column * 7) % 1001),
  );
  const edges = (bins, size, from = 0) => Array.from({ length: bins + 1 }, (_, nth) => from + nth * size);
  curves.heatmap = { time_ns: edges(100, 1e7), address: edges(40, 2 ** 21, 0x7f0000000000), counts };
  const { page, faults, close } = await open([{ name: "heatmap.json", text: JSON.stringify(curves) }]);
  await page.locator("canvas.heatmap").scrollIntoViewIfNeeded();
  const box = await page.locator("canvas.heatmap").boundingBox();
  await page.mouse.move(box.x + box.width * 0.505, box.y + box.height * (1 - 10.5 / 40));
  assert.equal(await page.locator(".tip").innerText(), `500 ms, 0x7f0001400000: ${counts[10][50]}`);
  await unfold(page);
  const [, ...rows] = await cells(page, "Accesses");
  assert.equal(rows.length, counts.flat().filter((value) => value > 0).length);
  assert.deepEqual(rows[0], ["0x7f0000200000", "2M", "10.0 ms", "7"]);
  assert.deepEqual(faults, []);
  await close();
});
