/**
 * The time in which large documents open: a line of JSON for each. A benchmark and no test, as a busy machine takes
 * longer.
 */
import { close, document, open } from "../test/page.js";

const OPEN_MS_MAX = 1000;
const ROUNDS = 5;

/** Returns one hour of a job on network memory, a point a second, six phases. */
function hour() {
  const run = JSON.parse(document("run-mmap3").text);
  const seconds = Array.from({ length: 3600 }, (_, second) => second);
  for (const [name, values] of Object.entries(run.series.columns)) {
    run.series.columns[name] = seconds.map((second) =>
      name === "time_ns" ? (second + 1) * 1e9 : values[(second * 7) % values.length],
    );
  }
  run.phases = Array.from({ length: 6 }, (_, nth) => ({
    ...run.phases[nth % 3],
    name: `phase ${nth}`,
    start_ns: nth * 600e9,
    end_ns: (nth + 1) * 600e9,
  }));
  return JSON.stringify(run);
}

/** Returns a diagnosis of 100 trials of 1,000 runs. */
function trials() {
  const diagnosis = JSON.parse(document("diagnose-names").text);
  const runs = (ns) =>
    Array.from({ length: 1000 }, (_, run) => Math.round(ns * (1 + ((run * 37) % 101) / 1000)));
  diagnosis.trials = Array.from({ length: 100 }, (_, nth) => {
    const trial = diagnosis.trials[nth % diagnosis.trials.length];
    return {
      ...trial,
      name: `${trial.name} ${nth}`,
      runs_ns: runs(9e8 + nth * 1e6),
      user_ns: runs(7e8),
      kernel_ns: runs(1e8),
      fault_counts: runs(13e4),
    };
  });
  return JSON.stringify(diagnosis);
}

/** Returns miss curves with the largest heatmap that pagetax makes, of 10 million samples. */
function heatmap() {
  const curves = JSON.parse(document("misscurve-sort").text);
  const [rows, columns, samples] = [64, 256, 10_000_000];
  const starts = Array.from({ length: rows }, (_, row) => 2 ** 40 + row * 2 ** 21);
  const least = Math.floor(samples / rows / columns);
  curves.heatmap = {
    column_access_count: 1 << 20,
    row_starts: starts,
    row_ends: starts.map((start) => start + 2 ** 21),
    page_change_counts: starts.map((_, row) =>
      Array.from({ length: columns }, (_, column) => least + (((row * 31 + column * 17) % 99) - 49)),
    ),
  };
  return JSON.stringify(curves);
}

/** Returns the milliseconds from the start of the navigation to the frame that shows the view and its charts. */
async function timeToOpen(text) {
  const { page, close } = await open([{ name: "large.json", text }]);
  const milliseconds = await page.evaluate(
    () =>
      new Promise((resolve) => {
        const isReady = () =>
          document.querySelector("article") &&
          [...document.querySelectorAll(".chart")].every((chart) => chart.childElementCount > 0);
        const wait = () =>
          isReady() ? requestAnimationFrame(() => resolve(performance.now())) : setTimeout(wait, 5);
        wait();
      }),
  );
  await close();
  return milliseconds;
}

for (const [what, make] of [
  ["a one-hour series of 6 phases, a point a second", hour],
  ["a heatmap of 10 million samples", heatmap],
  ["100 trials of 1,000 runs", trials],
]) {
  const text = make();
  const times = [];
  for (let nth = 0; nth < ROUNDS; nth++) times.push(await timeToOpen(text));
  times.sort((one, other) => one - other);
  const line = {
    case: what,
    json_bytes: text.length,
    milliseconds_median: times[ROUNDS >> 1],
    limit_ms: OPEN_MS_MAX,
  };
  console.log(JSON.stringify(line));
}
await close();
