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

test("a drag zooms, a double click shows all, and scrolling and resizing do no harm", async () => {
  const { page, faults, close } = await open([document("run-mmap3")]);
  const figure = page.locator("figure").first();
  const pixels = () => figure.locator("canvas").evaluate((canvas) => canvas.toDataURL());
  await page.mouse.wheel(0, 200);
  await page.waitForTimeout(100);
  const box = await figure.locator(".u-over").boundingBox();
  const move = (share) => page.mouse.move(box.x + box.width * share, box.y + 60);
  const all = await pixels();
  await move(0.3);
  await page.mouse.down();
  await move(0.45);
  await move(0.6);
  await page.mouse.up();
  await page.waitForTimeout(60);
  assert.notEqual(await pixels(), all);
  await page.mouse.dblclick(box.x + 60, box.y + 60);
  await page.waitForTimeout(60);
  assert.equal(await pixels(), all);
  await page.setViewportSize({ width: 800, height: 700 });
  await page.waitForTimeout(100);
  assert.deepEqual(faults, []);
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

/** Fails if tables of ratios are not those of the terminal, in its order. */
async function sameComparisons(page, text) {
  const parts = text.trim().split(/\n\n(?=\S+ ÷ )/);
  const tables = page.locator("table:visible", { hasText: "Ratio of each value" });
  assert.equal(await tables.count(), parts.length);
  for (const [nth, part] of parts.entries()) {
    const rows = await tables
      .nth(nth)
      .evaluate((table) =>
        [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.innerText.trim())),
      );
    assert.equal(rows.length, part.split("\n").filter((line) => /^ {2}\S+ .*\d, \d/.test(line)).length);
    for (const row of rows) {
      const expected = line(`\n${part}`, "", row[0]);
      for (const cell of [...row.slice(1, 5), row[6]])
        assert.ok(expected.includes(cell), `${cell} is not in: ${expected}`);
    }
  }
  const verdicts = text.split("\n").filter((line) => line.startsWith("Verdict: "));
  assert.deepEqual(await page.locator(".reason:visible").allInnerTexts(), verdicts);
  const settings = text.split("\n").filter((line) => line.startsWith("setting differs: "));
  assert.deepEqual(await page.locator(".notes:visible li").allInnerTexts(), settings);
}

for (const [first, second, name] of [
  ["several-a", "several-b", "several"],
  ["several-a", "run-host", "single"],
  ["size-4M", "size-64M", "compare-size"],
]) {
  test(`${first} and ${second} are compared on the page as in the terminal`, async () => {
    const text = terminal(name);
    const { page, close } = await open([document(first), document(second)]);
    await page.getByRole("tab", { name: "Compare" }).click();
    await sameComparisons(page, text);
    const [title, parameter] = text.split("\n");
    const heading = parameter.startsWith("  size: ") ? parameter.trim() : title;
    assert.equal(await page.locator("h1:visible").innerText(), heading);
    await close();
  });
}

test("a comparison has the rows, the verdict and the ratio of the terminal", async () => {
  const { parameters, rows } = JSON.parse(document("compare-size").text);
  const { page, close } = await open([document("compare-size")]);
  await sameComparisons(page, terminal("compare-size"));
  assert.equal(await page.locator("h1").innerText(), parameters.join(", "));
  const { value, low, high } = rows.find(({ id }) => id === "wall_ns").ratio;
  const [shown, meaning] = await Promise.all([
    page.locator(".figure strong").innerText(),
    page.locator(".figure span").first().innerText(),
  ]);
  assert.equal(shown, `${value.toFixed(1)}×`);
  assert.equal(meaning, `the elapsed time (${low.toFixed(1)}–${high.toFixed(1)})`);
  await close();
});

test("comparisons begin with the elapsed times, and have each comparison of the terminal", async () => {
  const text = terminal("compare-sizes");
  const { comparisons } = JSON.parse(document("compare-sizes").text);
  const { page, close } = await open([document("compare-sizes")]);
  await sameComparisons(page, text);
  const [, ...rows] = await cells(page, "Elapsed time of each report ÷ size-4M.json, 47.2 ms");
  assert.deepEqual(
    rows.map(([name]) => name),
    comparisons.map(({ names }) => names[1]),
  );
  rows.forEach(([name, parameters, elapsed, ratio], nth) => {
    assert.equal(parameters, comparisons[nth].parameters.join(", "));
    const part = text.slice(text.indexOf(`${name} ÷ `));
    for (const cell of [elapsed, ratio]) assert.ok(line(`\n${part}`, "", "wall_ns").includes(cell), cell);
  });
  await close();
});

test("a comparison of an older pagetax, without names, is shown", async () => {
  const { names, parameters, verdict, ...older } = JSON.parse(document("compare-size").text);
  const { page, close } = await open([{ name: "older.json", text: JSON.stringify(older) }]);
  await page.getByRole("heading", { name: "second ÷ first" }).waitFor();
  assert.equal(await page.locator(".refusal").count(), 0);
  await close();
});

/** Fails if the readings and findings of bills are not those of the terminal. */
async function sameBill(page, text, isBesideBaseline) {
  const { commands } = JSON.parse(document("bill-after").text);
  for (const { name, readings } of commands) {
    const [head, ...rows] = await cells(page, `Readings of ${name};`);
    assert.equal(rows.length, Object.keys(readings).length);
    const part = text.slice(text.indexOf(`${name}: `));
    const at = (wanted) => head.indexOf(wanted);
    const columns = [
      0,
      at("now"),
      at("finding"),
      at("change"),
      isBesideBaseline ? at("bill-before.json") : -1,
    ];
    for (const row of rows) {
      const expected = part.split("\n").find((line) => line.startsWith(`  ${row[0]} `));
      const shown = columns.filter((column) => column >= 0).map((column) => row[column]);
      for (const cell of shown) assert.ok(expected.includes(cell), `${cell} is not in: ${expected}`);
      if (isBesideBaseline)
        assert.equal(expected.split(/ {2,}/).length - 1, shown.filter(Boolean).length, expected);
    }
  }
  const flat = text.replace(/\s+/g, " ");
  for (const item of await page.locator(".warnings:visible li").allInnerTexts()) {
    const finding = item.replace(/\s+/g, " ").replace(/^\w+: (?=FAILED)/, "");
    assert.ok(flat.includes(finding), finding);
  }
  const last = text.trim().split("\n").at(-1);
  assert.ok((await page.locator(".title:visible").innerText()).includes(last), last);
}

test("a bill has the readings, findings and causes of the terminal", async () => {
  const { commands } = JSON.parse(document("bill-after").text);
  const { page, close } = await open([document("bill-after")]);
  await sameBill(page, terminal("bill-after"), false);
  const failed = commands.flatMap(({ findings }) => findings.filter(({ outcome }) => outcome === "failed"));
  const first = page.locator(".verdict li");
  assert.equal(await first.count(), failed.length);
  for (const [nth, { text, cause }] of failed.entries()) {
    const shown = await first.nth(nth).innerText();
    assert.ok(shown.includes(text) && shown.includes(`cause: ${cause}`), shown);
  }
  const findings = commands.flatMap(({ findings }) => findings);
  assert.equal(await page.locator(".warnings li").count(), failed.length + findings.length);
  const [, ...rows] = await cells(page, "Readings of python");
  const row = rows.find(([id]) => id === "access_count");
  const { low, high } = commands[1].readings.access_count;
  assert.ok(row.includes(`${count(low)} – ${count(high)}`), row.join(" | "));
  await close();
});

test("a bill beside its baseline has the changes of the terminal", async () => {
  const { page, close } = await open([document("bill-before"), document("bill-after")]);
  await page.getByRole("tab", { name: "Compare" }).click();
  await sameBill(page, terminal("bill-after"), true);
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
  const starts = Array.from({ length: 40 }, (_, nth) => 0x7f0000000000 + nth * 2 ** 22);
  const ends = starts.map((start) => start + 2 ** 21);
  curves.heatmap = {
    column_access_count: 4096,
    row_starts: starts,
    row_ends: ends,
    page_change_counts: counts,
  };
  const { page, faults, close } = await open([{ name: "heatmap.json", text: JSON.stringify(curves) }]);
  await page.locator("canvas.heatmap").scrollIntoViewIfNeeded();
  const box = await page.locator("canvas.heatmap").boundingBox();
  await page.mouse.move(box.x + box.width * 0.505, box.y + box.height * (1 - 10.5 / 40));
  assert.equal(
    await page.locator(".tip").innerText(),
    `from access 204 800, 0x7f0002800000: ${counts[10][50]}`,
  );
  await unfold(page);
  const [, ...rows] = await cells(page, "Page changes");
  assert.equal(rows.length, counts.flat().filter((value) => value > 0).length);
  assert.deepEqual(rows[0], ["0x7f0000400000", "2M", "4 096", "7"]);
  assert.deepEqual(faults, []);
  await close();
});

test("histograms have each bucket of the document", async () => {
  const { latency } = JSON.parse(document("run-mmap3").text);
  const { page, close } = await open([document("run-mmap3")]);
  await unfold(page);
  const [, ...rows] = await cells(page, "Faults by latency");
  const buckets = Object.entries(latency).flatMap(([kind, { buckets }]) =>
    buckets.map((bucket) => ({ kind, ...bucket })),
  );
  assert.deepEqual(
    rows.map(([kind, , faults]) => [kind, faults]),
    buckets.map((bucket) => [bucket.kind, count(bucket.count)]),
  );
  rows.forEach(([, upTo], nth) => assertNear(upTo, buckets[nth].up_to_ns));
  const columns = page.locator(".histogram .column");
  assert.equal(await columns.count(), buckets.length);
  await columns.first().hover({ force: true });
  assert.ok((await page.locator(".tip").innerText()).startsWith(`${buckets[0].kind}: `));
  await close();
});

test("the TLBs of known CPUs are those of the document", async () => {
  const { known_tlbs: known } = JSON.parse(document("misscurve-sort").text);
  const { page, close } = await open([document("misscurve-sort")]);
  const [, ...rows] = await cells(page, "Misses if they were fully associative");
  assert.ok(rows.length > 0);
  assert.deepEqual(
    rows.map(([cpu, , entries, , misses]) => [cpu, entries, misses]),
    known.map(({ cpu, entries, tlb_miss_count }) => [cpu, count(entries), count(tlb_miss_count)]),
  );
  await close();
});

test("source lines are in the order of their misses", async () => {
  const { profiles } = JSON.parse(document("trapstat-gather").text);
  const lines = profiles[0].functions.flatMap(({ lines = [] }) => lines);
  lines.sort((one, other) => other.misses - one.misses);
  const { page, close } = await open([document("trapstat-gather")]);
  const [, ...rows] = await cells(page, "Misses by source line");
  assert.deepEqual(
    rows.map(([line, misses]) => [line, misses]),
    lines.map(({ file, line, misses }) => [`${file}:${line}`, count(misses)]),
  );
  assert.match(rows[0][0], /gather\.c:\d+$/);
  await close();
});

test("runs with a series stand side by side", async () => {
  const { runs } = JSON.parse(document("runs-beside").text);
  const { page, close } = await open([document("runs-beside")]);
  const titles = await page.locator(".beside figcaption").allInnerTexts();
  for (const chart of ["Faults", "Paging", "Page-in latency"]) {
    for (const { machine } of runs.filter(
      ({ machine }) => chart !== "Page-in latency" || machine.kind === "host",
    ))
      assert.ok(
        titles.some((title) => title.startsWith(`${chart}, ${machine.name}: `)),
        `${chart} of ${machine.name} is not in ${titles}`,
      );
  }
  const [left, right] = await Promise.all(
    [0, 1].map((nth) => page.locator(".beside").first().locator("figure").nth(nth).boundingBox()),
  );
  assert.equal(left.y, right.y);
  await close();
});
