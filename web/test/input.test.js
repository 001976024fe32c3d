/** Files that are cut, foreign, hostile or too large, and files that are compared. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test, { after } from "node:test";
import { makePage } from "../make-page.js";
import { checkAccess, close, document, open } from "./page.js";

after(close);

const asset = () => readFileSync(new URL("../../crates/cli/assets/report.html", import.meta.url), "utf8");
const file = ({ name, text }) => ({ name, mimeType: "application/json", buffer: Buffer.from(text) });
const add = (page, ...documents) => page.locator("input[type=file]").setInputFiles(documents.map(file));

test("a page without documents asks for one, and shows it", async () => {
  const { page, faults, close } = await open([], { html: asset() });
  await page.getByText("Drop a report here").waitFor();
  await checkAccess(page, "empty");
  await add(page, document("diagnose-names"));
  await page.getByText("python3 names.py").first().waitFor();
  assert.equal(await page.getByText("Drop a report here").count(), 0);
  assert.deepEqual(faults, []);
  await close();
});

test("a file that is dropped is shown", async () => {
  const { page, faults, close } = await open([], { html: asset() });
  await page.evaluate(({ name, text }) => {
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([text], name));
    document
      .querySelector(".drop")
      .dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
  }, document("run-host"));
  await page.getByText("tlb-gather on host").waitFor();
  assert.deepEqual(faults, []);
  await close();
});

const CASES = [
  ["cut JSON", document("run").text.slice(0, 900), /is not complete JSON. Write it again with --json=FILE/],
  ["no text", "", /is not complete JSON/],
  [
    "another schema",
    '{"schema": 2, "kind": "run"}',
    /has schema 2; this page reads schema 1. Make the page with the pagetax that wrote/,
  ],
  ["JSON of somebody else", '{"a": [1, 2]}', /is no document of pagetax. Write one with pagetax run/],
  ["a page without documents", "<!doctype html><p>hello", /is a page without documents/],
];

for (const [what, text, sentence] of CASES) {
  test(`${what}: a sentence says what to do`, async () => {
    const { page, faults, close } = await open([], { html: asset() });
    await add(page, { name: "x.json", text });
    await page.getByText(sentence).waitFor();
    assert.deepEqual(faults, []);
    await close();
    if (text.startsWith("<") || text === "") return;
    const embedded = await open([{ name: "x.json", text }]);
    await embedded.page.getByText(sentence).waitFor();
    await embedded.close();
  });
}

test("packed bytes that are no gzip are refused", async () => {
  const html = makePage([document("run")]).replace(/(data-name="run.json">.{40}).*(<\/script>)/, "$1$2");
  const { page, close } = await open([], { html });
  await page.getByText(/run.json is not complete JSON/).waitFor();
  await close();
});

test("more than 50 MB are refused, also when they are packed", async () => {
  const text = document("run").text.replace(/\}\s*$/, `, "filler": "${"x".repeat(51 * 2 ** 20)}"}`);
  const { page, close } = await open([{ name: "large.json", text }]);
  await page.getByText(/large.json has .*; a page reads at most 50M. Write fewer points/).waitFor();
  await close();
});

test("one sample and an empty series are shown", async () => {
  const run = JSON.parse(document("run-host").text);
  for (const length of [0, 1]) {
    const columns = Object.fromEntries(
      Object.entries(run.series.columns).map(([name, values]) => [name, values.slice(0, length)]),
    );
    const text = JSON.stringify({ ...run, series: { ...run.series, columns } });
    const { page, faults, close } = await open([{ name: "short.json", text }]);
    await page.locator("h1").waitFor();
    assert.equal(await page.locator(".refusal").count(), 0);
    assert.deepEqual(faults, []);
    await close();
  }
});

test("a document that breaks its schema is shown as tables, with a sentence", async () => {
  const { page, faults, close } = await open([
    { name: "odd.json", text: '{"schema":1,"kind":"run","job":7,"wall_ns":5}' },
  ]);
  await page.getByText(/odd.json does not follow the schema of run/).waitFor();
  assert.ok(await page.getByRole("cell", { name: "5 ns" }).count());
  assert.deepEqual(faults, []);
  await close();
});

test("a kind that the page does not know is shown as tables", async () => {
  const text = '{"schema":1,"kind":"constructor","rows":[{"name":"a","size_bytes":4096}]}';
  const { page, close } = await open([{ name: "new.json", text }]);
  assert.ok(await page.getByRole("cell", { name: "4K" }).count());
  await close();
});

test("a document that is nested too deep does not hide the others", async () => {
  for (const kind of ["run", "unknown"]) {
    const text = `{"schema":1,"kind":"${kind}","a":${'{"a":'.repeat(50_000)}1${"}".repeat(50_000)}}`;
    const { page, faults, close } = await open([{ name: "deep.json", text }, document("diagnose-names")]);
    await page.getByText(/deep.json does not follow the schema/).waitFor();
    await page.getByRole("tab", { name: "diagnose-names.json" }).click();
    await page.getByText("python3 names.py").first().waitFor();
    assert.deepEqual(faults, []);
    await close();
  }
});

test("a long list is cut, and the table says so", async () => {
  const text = JSON.stringify({
    schema: 1,
    kind: "list",
    rows: Array.from({ length: 30_000 }, (_, nth) => ({ nth })),
  });
  const { page, close } = await open([{ name: "long.json", text }]);
  await page.getByText("rows (the first 20 000 of 30 000 rows; the JSON has all)").waitFor();
  assert.equal(await page.locator("tbody tr").count(), 20_000);
  await close();
});

const HOSTILE = `<img src=x onerror="alert(1)"></script><script>alert(2)</script>'"&`;

/** Replaces every string but those that a view looks up, and adds a hostile key to each map. */
function poison(value, key = "") {
  if (typeof value === "string")
    return ["kind", "provenance", "unit", "standing", "verdict", "status", "outcome"].includes(key)
      ? value
      : HOSTILE;
  if (Array.isArray(value)) return value.map((inner) => poison(inner, key));
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).map(([name, inner]) => [name, poison(inner, name)]);
  const isMap = ["counters", "params", "latency", "environment", "columns", "readings"].includes(key);
  return Object.fromEntries(isMap && entries.length > 0 ? [...entries, [HOSTILE, entries[0][1]]] : entries);
}

for (const name of [
  "diagnose-names",
  "run-mmap3",
  "runs-sweep",
  "compare-size",
  "compare-sizes",
  "bill-after",
  "reproduce-sun-4",
  "trapstat-sort",
  "whatif-sort",
  "misscurve-sort",
  "doctor",
  "huge_page_causes",
  "page_maps",
  "page_size_change",
  "servers",
  "machines",
]) {
  test(`hostile names in ${name} are text`, async () => {
    const text = JSON.stringify(poison(JSON.parse(document(name).text)));
    const { page, faults, close } = await open([{ name: HOSTILE, text }]);
    await page.evaluate(() =>
      document.querySelectorAll("details").forEach((details) => (details.open = true)),
    );
    await page.waitForTimeout(150);
    assert.equal(await page.locator("img").count(), 0);
    assert.ok((await page.locator("body").innerText()).includes("<img src=x"));
    assert.deepEqual(faults, []);
    await close();
  });
}

test("a second run is compared; another machine and job are reasons not to", async () => {
  const { page, faults, close } = await open([document("run-host")]);
  const run = JSON.parse(document("run-host").text);
  run.environment.cpu_model = "Another CPU";
  run.environment.kernel = "7.2";
  run.job.name = "another";
  run.job.seed = 9;
  await add(page, { name: "second.json", text: JSON.stringify(run) });
  const panel = page.getByRole("tabpanel").filter({ hasText: "should not be compared" });
  const shown = await panel.innerText();
  for (const reason of ["`another`", "seed: `1` and `9`", "and `Another CPU`", "setting differs: kernel:"])
    assert.ok(shown.includes(reason), shown);
  assert.ok(await page.getByRole("cell", { name: "1.000" }).count());
  await checkAccess(page, "comparison");
  assert.deepEqual(faults, []);
  await close();
});

test("arguments of the same program are a heading; another program is a reason not to compare", async () => {
  const { page, close } = await open([document("diagnose-names")]);
  const diagnosis = JSON.parse(document("diagnose-names").text);
  const named = (name, command) => ({ name, text: JSON.stringify({ ...diagnosis, command }) });
  await add(page, named("more.json", ["python3", "names.py", "9"]));
  await page.getByRole("heading", { name: "command: `python3 names.py` and `python3 names.py 9`" }).waitFor();
  assert.equal(await page.locator(".refusal").count(), 0);
  await add(page, named("other.json", ["ruby", "names.py"]));
  await page.getByText("should not be compared").waitFor();
  await page.getByText("command: `python3 names.py` and `ruby names.py`").waitFor();
  await page.getByRole("heading", { name: "other.json ÷ diagnose-names.json" }).waitFor();
  await close();
});

test("a bill is not compared with a run, and a broken one is refused", async () => {
  const { page, faults, close } = await open([document("bill-before")]);
  await add(page, document("run-host"));
  await page.getByText("One is a bill, the other a run. Choose two runs").waitFor();
  await add(page, { name: "odd.json", text: '{"schema":1,"kind":"bill","commands":7}' });
  await page.getByText(/does not follow the schema of bill/).waitFor();
  assert.deepEqual(faults, []);
  await close();
});

test("bills name what one alone has, and another kernel", async () => {
  const { page, close } = await open([document("bill-before")]);
  const bill = JSON.parse(document("bill-after").text);
  bill.commands[2].name = "new";
  bill.environment.kernel = "7.2";
  await add(page, { name: "b.json", text: JSON.stringify(bill) });
  for (const sentence of [
    "true: in bill-before.json alone",
    "new: in b.json alone",
    "counted with another kernel:",
  ])
    await page.getByText(sentence).waitFor();
  await close();
});

test("a page that pagetax made is compared, too", async () => {
  const { page, close } = await open([document("diagnose-names")]);
  await add(page, {
    name: "page.html",
    text: makePage([{ ...document("diagnose-names"), name: "inside.json" }]),
  });
  await page.getByRole("heading", { name: "inside.json ÷ diagnose-names.json" }).waitFor();
  assert.equal(await page.locator(".refusal").count(), 0);
  await close();
});

test("two kinds are not compared, and a sentence says what to do", async () => {
  const { page, close } = await open([document("diagnose-names")]);
  await add(page, document("run-host"));
  await page.getByText("One is a diagnosis, the other a run. Choose two runs").waitFor();
  await add(page, document("jobs"));
  await page.getByText(/A document of kind jobs is not compared. Choose two runs/).waitFor();
  await close();
});

test("the page gives back the JSON byte for byte", async () => {
  const { page, close } = await open([document("run-mmap3")]);
  const [download] = await Promise.all([
    page.waitForEvent("download"),
    page.getByRole("button", { name: "Save the JSON" }).click(),
  ]);
  assert.equal(readFileSync(await download.path(), "utf8"), document("run-mmap3").text);
  assert.equal(download.suggestedFilename(), "run-mmap3.json");
  await close();
});
